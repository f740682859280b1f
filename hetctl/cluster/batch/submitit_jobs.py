"""Functions as jobs, by submitit; no other module of hetctl imports it."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetctl.cluster.batch.base import FunctionCall, SubmissionInDoubtError
from hetctl.cluster.batch.command import DOUBT
from hetctl.cluster.launchers import LAUNCHERS
from hetctl.model.errors import BadInputError, BatchSystemError
from hetctl.model.site import Site, yields
from hetctl.storage.atomic_io import make_private_folder


def submit_function(
    call: FunctionCall, executor_name: str, parameters: Mapping[str, Any], refusals: Collection[str]
) -> tuple[str, ...]:
    """Submit a call by one of submitit's executors; return the ids of the jobs, one per argument.

    Parameters
    ----------
    refusals : collection of str
        Parts of the error messages after which no job exists.

    Raises
    ------
    BatchSystemError
        If the batch system cannot be reached or refuses; a `SubmissionInDoubtError` if that is unknown.
    """
    # Imported here, because it takes 0.11 s.
    import submitit

    with _private_files(call.folder):
        try:
            executor = submitit.AutoExecutor(call.folder, cluster=executor_name, **_no_requeue(executor_name))
            executor.update_parameters(**{k: v for k, v in parameters.items() if v is not None})
            return tuple(str(job.job_id) for job in executor.map_array(call.function, call.arguments))
        except (RuntimeError, OSError) as error:
            message = f"submitit could not submit to {executor_name}: {error}"
            if _is_refusal(error, refusals):
                raise BatchSystemError(message) from None
            raise SubmissionInDoubtError(message, DOUBT) from None


def setup_lines(site: Site) -> list[str]:
    """Return the shell lines that a function's job begins with, in the order of ``templates/base.sh.j2``."""
    fails = [f"unset {variable}" for variable in LAUNCHERS[site.launcher].fails_with]
    # Those of communication libraries are set for the job's steps, unless `setup` or the user has set them.
    own = {name: value for name, value in site.environment.items() if not yields(name)}
    return [*fails, *site.setup, *(f"export {name}={shlex.quote(value)}" for name, value in own.items())]


def write_call(folder: Path, function: Callable[[str], Any], argument: str, job: str, wall_s: int) -> None:
    """Write a call to the file that submitit's program reads when it runs as this job, unless it exists."""
    from submitit.core.utils import DelayedSubmission, JobPaths

    path = JobPaths(folder, job).submitted_pickle
    if path.exists():
        return
    with _private_files(folder):
        submission = DelayedSubmission(function, argument)
        submission.set_timeout(-(-wall_s // 60), 0)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        submission.dump(temporary)
        temporary.replace(path)  # atomically: the job may be waiting for the file


def array_elements(job: str, count: int, first: int) -> tuple[str, ...]:
    """Return the ids of a call's jobs in submitit's form; a single job is not an array."""
    return (job,) if count == 1 else tuple(f"{job}_{index}" for index in range(first, first + count))


def has_result(folder: Path, job: str) -> bool:
    """Return true if the function has returned or raised."""
    return (folder / f"{job}_0_result.pkl").exists()


def _is_refusal(error: Exception, refusals: Collection[str]) -> bool:
    """Return true if no job exists: submitit called no command, or the command's message is one of these."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    if isinstance(error, FailedJobError):
        killed = getattr(error.__cause__, "returncode", 0) < 0
        return not killed and any(part in str(error) for part in refusals)
    return not isinstance(error, (FailedSubmissionError, OSError))


@contextmanager
def _private_files(folder: Path) -> Iterator[None]:
    """Make submitit's pickles private: a user who could write one could run any code as this user."""
    make_private_folder(folder)
    _refuse_open_folders(folder)
    # submitit 1.5.4 writes its pickles with mode 0644 under a umask of 022.
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _refuse_open_folders(folder: Path) -> None:
    """Raise BadInputError if any user could replace this folder by another one."""
    for path in (folder, *folder.parents):
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise BadInputError(
                f"{path} is writable for all users, who could run programs as you through it",
                f"chmod o-w {path}, or set HETCTL_HOME to a folder of your own",
            )


def _no_requeue(executor_name: str) -> dict[str, int]:
    """Prevent submitit from counting a short job as timed out at once and requeueing it."""
    return {f"{executor_name}_max_num_timeout": 0}
