"""What hetctl asks of a batch system."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobStatus
from hetctl.model.site import Queue, Site


class SubmissionInDoubtError(BatchSystemError):
    """The batch system did not answer in time: it may have taken the job, or take it yet."""


@dataclass(frozen=True)
class JobRequest:
    """A rendered script that is to become a job.

    Parameters
    ----------
    name : str
        Unique, and the job's name in the script's directives.
    command : tuple of str
        As it was shown to the user.
    wall_s, gpus : int
        What the script asks for: its limit, and GPUs (or slots) on all its nodes together.
    after : str or None
        Id of the job that must be over, however it ended, before this one may start.
    """

    name: str
    script: Path
    command: tuple[str, ...]
    wall_s: int
    site: Site
    gpus: int
    after: str | None = None


@dataclass(frozen=True)
class FunctionCall:
    """A Python function that is to run once for each of its arguments, each time in a job of its own.

    Parameters
    ----------
    arguments : tuple of str
        If several, the jobs are the elements of one array.
    folder : Path
        Where submitit keeps the call and its output.
    name : str
        Unique: by it the jobs are found if nobody lived to note their ids.
    nodes, wall_s : int
        Of each job.
    at_once : int or None
        At most so many jobs run at the same time.
    """

    function: Callable[[str], Any]
    arguments: tuple[str, ...]
    folder: Path
    name: str
    site: Site
    queue: Queue
    nodes: int
    wall_s: int
    max_concurrent: int | None = None


class BatchSystem(Protocol):
    """A batch system as seen from a login node.

    All methods raise BatchSystemError if it cannot be reached. They ask again by themselves where
    that may help, but never submit twice.
    """

    def submit(self, request: JobRequest) -> str:
        """Submit a script; return the job's id.

        Raises
        ------
        BatchSystemError
            If the batch system refuses. If it may have taken the job all the same, because it did not
            answer in time, the error is a `SubmissionInDoubtError`.
        """

    def call(self, call: FunctionCall) -> tuple[str, ...]:
        """Submit a function through submitit; return the jobs' ids, in the order of the arguments.

        Raises
        ------
        BatchSystemError
            As of `submit`.
        """

    def statuses(self, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        """Ask for many jobs at once; a job that nobody knows is UNKNOWN, never FINISHED."""

    def find(self, names: Sequence[str]) -> Mapping[str, str]:
        """Return the ids of those of our jobs that have one of these names, by name.

        Jobs that are over are found, too, as long as the batch system remembers them.
        """

    def find_call(self, name: str, count: int) -> tuple[str, ...]:
        """Return the ids of a call's jobs by its name, as `call` does; "" for each that is not to be found.

        Parameters
        ----------
        count : int
            How many arguments the function was called with.
        """

    def cancel(self, ids: Sequence[str]) -> None:
        """End jobs; those that are over already are no error."""
