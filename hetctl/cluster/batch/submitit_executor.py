"""Submission by submitit; no other module of hetctl imports it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from submitit.core import core, utils

from hetctl.cluster.batch.base import JobRequest, SubmissionInDoubtError
from hetctl.cluster.batch.command import DOUBT, REFUSED
from hetctl.model.errors import BatchSystemError
from hetctl.storage.atomic_io import make_private_folder

# The user's default options could rename a job, which is then not found, or make an array of it.
COMMAND = 'unset SBATCH_JOB_NAME SBATCH_ARRAY_INX; exec timeout "$0" "${@:2}" <"$1"'


class ScriptExecutor(core.PicklingExecutor):  # type: ignore[misc]
    """Executor of rendered scripts: it pickles nothing, and serves every batch system that has a command."""

    def __init__(self, request: JobRequest, folder: Path, parse_id: Callable[[str], str]) -> None:
        super().__init__(folder)
        self._request, self._parse_id = request, parse_id

    def run(self) -> str:
        """Submit the script; return the id of the job."""
        return str(self._submit_command("").job_id)

    def _num_tasks(self) -> int:
        return 1

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002 (submitit's names)
        return self._request.script.read_text(encoding="utf-8")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:  # noqa: ARG002
        # Not submitit's copy of the script, which is renamed as soon as the command returns.
        limit, stdin = f"{self._request.site.timeouts.command_s:g}", self._request.stdin or os.devnull
        return ["bash", "-c", COMMAND, limit, str(stdin), *self._request.command]

    def _get_job_id_from_submission_command(self, string: str) -> str:
        return self._parse_id(string)


def submit_by_submitit(
    request: JobRequest, folder: Path, refusals: Collection[str], parse_id: Callable[[str], str]
) -> str:
    """Submit a script; submitit keeps a copy in `folder`. The rest is as in `CommandBatch.submit`."""
    if not shutil.which(request.command[0]):
        raise BatchSystemError(f"{request.command[0]} is not on the PATH of this machine")
    make_private_folder(folder)
    before = os.umask(0o077)
    try:
        return ScriptExecutor(request, folder, parse_id).run()
    except (RuntimeError, OSError) as error:
        message = f"{request.command[0]} failed, run by submitit: {error}"
        if isinstance(error, utils.FailedJobError) and any(part in message for part in refusals):
            raise BatchSystemError(message, REFUSED) from None
        raise SubmissionInDoubtError(message, DOUBT) from None
    finally:
        os.umask(before)
