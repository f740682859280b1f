"""Client of LSF: bjobs for jobs in LSF's memory, bhist for older ones."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetctl.cluster.batch.base import FunctionCall, JobRequest
from hetctl.cluster.batch.command import USUAL_COMMANDS, CommandRunner
from hetctl.cluster.batch.lsf_commands import (
    NOTHING_FOUND,
    OVER_ALREADY,
    REFUSALS,
    TRANSIENT,
    bhist_command,
    bjobs_command,
    find_command,
    find_gone_command,
    lsf_id,
    parse_bhist,
    parse_bjobs,
    parse_found,
    parse_found_gone,
    parse_job_id,
)
from hetctl.cluster.batch.submitit_jobs import array_elements, setup_lines, submit_function
from hetctl.cluster.launchers import LAUNCHERS
from hetctl.model.errors import BatchSystemError
from hetctl.model.job import JobState, JobStatus

FIRST_ELEMENT = 1
"""Index of the first element of LSF's arrays."""


class LsfBatch:
    """LSF, used through its commands."""

    def __init__(self, folder: Path, commands: CommandRunner = USUAL_COMMANDS) -> None:
        self._folder, self._commands = folder, commands

    def submit(self, request: JobRequest) -> str:
        """Run bsub, which reads the script unless the command names it; the script has all options."""
        if not request.script.is_file():  # bsub would take its name for a command
            raise BatchSystemError(f"cannot read {request.script}: no such file")
        stdin = None if str(request.script) in request.command else request.script
        return parse_job_id(self._commands.submit(request.command, stdin, REFUSALS))

    def call(self, call: FunctionCall) -> tuple[str, ...]:
        """Submit with hetctl's own executor for submitit; the function starts steps itself.

        It requests the same resources as the batch template.
        """
        site = call.site
        parameters = {
            "lsf_job_name": call.name,
            "lsf_time": math.ceil(call.wall_s / 60),
            "lsf_nodes": call.nodes,
            "lsf_whole_nodes": LAUNCHERS[site.launcher].whole_nodes,
            "lsf_cpus_per_task": site.gpus_per_node * site.cores_per_gpu,
            "lsf_gpus_per_node": site.gpus_per_node if site.device == "gpu" else 0,
            "lsf_array_parallelism": call.max_concurrent,
            "lsf_queue": call.queue.name,
            "lsf_project": site.account,
            "lsf_setup": setup_lines(site),
            "lsf_options": [word for line in site.directives for word in shlex.split(line)],
        }
        return submit_function(call, "lsf", parameters, REFUSALS)

    def statuses(self, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        """Query bjobs, then bhist for jobs that bjobs no longer has; jobs unknown to both are UNKNOWN."""
        if not ids:
            return {}
        found = parse_bjobs(self._commands.check_output(bjobs_command(ids), TRANSIENT, NOTHING_FOUND))
        if missing := [job for job in ids if job not in found]:
            found |= parse_bhist(self._commands.run_best_effort(bhist_command(missing)))
        return {job: found.get(job, JobStatus(JobState.UNKNOWN)) for job in ids}

    def find(self, names: Sequence[str], *, recorded: bool = True) -> Mapping[str, str]:
        """Query bjobs, then bhist for jobs that bjobs no longer has."""
        if not names:
            return {}
        found = parse_found(self._commands.check_output(find_command(names), TRANSIENT, NOTHING_FOUND))
        if recorded and (missing := [name for name in names if name not in found]):
            command = find_gone_command(missing)
            found |= parse_found_gone(self._commands.check_output(command, TRANSIENT, NOTHING_FOUND))
        return {name: job for name, job in found.items() if name in names}

    def find_call(self, name: str, count: int) -> tuple[str, ...]:
        """Return the ids of the job, or of the elements of the array, of that name."""
        job = self.find([name]).get(name, "")
        return array_elements(job, count, FIRST_ELEMENT) if job else ("",) * count

    def cancel(self, ids: Sequence[str]) -> None:
        """Run bkill."""
        if not ids:
            return
        answer = self._commands.run_with_retry(["bkill", *map(lsf_id, ids)], TRANSIENT)
        lines = f"{answer.stdout}\n{answer.stderr}".splitlines()
        # bkill fails if one of several jobs has ended already, although it kills the others.
        if answer.code != 0 and [line for line in lines if line.strip() and not _has(line, OVER_ALREADY)]:
            raise BatchSystemError(f"bkill failed ({answer.code}): {answer.error_tail}")


def _has(line: str, parts: Sequence[str]) -> bool:
    return any(part in line for part in parts)
