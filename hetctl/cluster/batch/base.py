"""Interface of batch systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobStatus
from hetctl.model.site import Site
from hetctl.model.values import dataclass

START_PATIENCE_S = 120
"""Seconds after which a job that has not started and is unknown to the batch system counts as gone."""


class SubmissionInDoubtError(BatchSystemError):
    """Submission without an answer in time: the batch system may have taken the job, or may still take it."""


@dataclass(frozen=True)
class JobRequest:
    """Rendered script to be submitted as a job.

    Parameters
    ----------
    name : str
        Unique name; also the job's name in the script's directives.
    command : tuple of str
        Submit command as shown to the user.
    wall_s, gpus : int
        Resources in the script: wall-clock limit in seconds, and GPUs (or slots) on all its nodes together.
    after : str or None
        Id of the job that must be over, with any result, before this one may start.
    submitit : Path or None
        Folder of submitit's files, if it is to run the command.
    """

    name: str
    script: Path
    command: tuple[str, ...]
    wall_s: int
    site: Site
    gpus: int
    after: str | None = None
    submitit: Path | None = None

    @property
    def stdin(self) -> Path | None:
        """The script, if the command reads it from its standard input."""
        return None if str(self.script) in self.command else self.script


class BatchSystem(Protocol):
    """Client of a batch system on a login node.

    All methods raise BatchSystemError if it cannot be reached. Queries are repeated where that may help;
    submissions never are.
    """

    def submit(self, request: JobRequest) -> str:
        """Submit a script; return the job's id.

        Raises
        ------
        BatchSystemError
            If the batch system refuses the job. The error is a `SubmissionInDoubtError` if it did not
            answer in time and may have taken the job.
        """

    def statuses(self, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        """Return the states of many jobs by one query; an unknown job is UNKNOWN, never FINISHED."""

    def find(self, names: Sequence[str], *, recorded: bool = True) -> Mapping[str, str]:
        """Return the ids of this user's jobs with one of these names, by name.

        Parameters
        ----------
        recorded : bool
            If true, include finished jobs as long as there is any record of them. If false, jobs in the batch
            system's memory are enough, where all are that wait or run.
        """

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs; a job that is already over is no error."""
