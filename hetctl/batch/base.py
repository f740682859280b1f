"""What hetctl asks of a batch system."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hetctl.core.job import JobState
from hetctl.core.site import Queue, Site


@dataclass(frozen=True)
class FunctionCall:
    """A Python function that is to run once, inside a job of its own.

    Parameters
    ----------
    folder : Path
        Where submitit keeps the call and its output.
    """

    function: Callable[[str], Any]
    argument: str
    folder: Path
    name: str
    site: Site
    queue: Queue
    nodes: int
    wall_s: int


class BatchSystem(Protocol):
    """A batch system as seen from a login node."""

    def submit(self, script: Path, command: Sequence[str], wall_s: int) -> str:
        """Submit a rendered script with the command that was shown; return the job's id.

        Raises
        ------
        BatchSystemError
            If the batch system cannot be reached or refuses.
        """

    def call(self, call: FunctionCall) -> str:
        """Submit a function through submitit; return the job's id."""

    def states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        """Ask for many jobs at once; a job that nobody knows is UNKNOWN, never FINISHED."""

    def cancel(self, ids: Sequence[str]) -> None:
        """End jobs; those that are over already are no error."""
