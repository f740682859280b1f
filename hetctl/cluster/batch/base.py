"""Interface of batch systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobStatus
from hetctl.model.site import Queue, Site

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
    """Python function to be run once for each of its arguments, each time in a separate job.

    Parameters
    ----------
    arguments : tuple of str
        Arguments; if there are several, the jobs are the elements of one array.
    folder : Path
        Folder in which submitit stores the call and its output.
    name : str
        Unique name, by which the jobs are found if their ids were not recorded.
    nodes, wall_s : int
        Nodes, and wall-clock limit in seconds, of each job.
    max_concurrent : int or None
        Largest number of jobs that run at the same time; None: unlimited.
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

    def call(self, call: FunctionCall) -> tuple[str, ...]:
        """Submit a function by submitit; return the ids of the jobs in the order of the arguments.

        Raises
        ------
        BatchSystemError
            Same as in `submit`.
        """

    def statuses(self, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        """Return the states of many jobs by one query; an unknown job is UNKNOWN, never FINISHED."""

    def find(self, names: Sequence[str], *, recorded: bool = True) -> Mapping[str, str]:
        """Return the ids of this user's jobs with one of these names, by name.

        Parameters
        ----------
        recorded : bool
            If true, finished jobs are included as long as there is any record of them. If false, those that
            the batch system still has in memory are enough: it has all that wait or run.
        """

    def find_call(self, name: str, count: int) -> tuple[str, ...]:
        """Return the ids of a call's jobs by its name, in the order of `call`; "" for each one not found.

        Parameters
        ----------
        count : int
            Number of arguments of the call.
        """

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs; a job that is already over is no error."""
