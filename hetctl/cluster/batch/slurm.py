"""Client of Slurm: squeue for jobs in Slurm's memory, sacct for older ones."""

from __future__ import annotations

import math
import os
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.cluster.batch.base import FunctionCall, JobRequest
from hetctl.cluster.batch.command import USUAL_COMMANDS, CommandRunner
from hetctl.cluster.batch.slurm_commands import (
    GONE,
    NO_ACCOUNTING,
    OVER_ALREADY,
    REFUSALS,
    TRANSIENT,
    JobRecord,
    find_command,
    find_gone_command,
    parse_failed_nodes,
    parse_found,
    parse_job_id,
    parse_sacct,
    parse_squeue,
    record_of,
    sacct_command,
    sinfo_command,
    squeue_command,
)
from hetctl.cluster.batch.submitit_jobs import array_elements, setup_lines, submit_function
from hetctl.model.errors import BadInputError
from hetctl.model.job import JobState, JobStatus

FIRST_ELEMENT = 0
"""Index of the first element of submitit's arrays."""
SHORT_OPTIONS = {
    "A": "account",
    "B": "extra-node-info",
    "C": "constraint",
    "D": "chdir",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "L": "licenses",
    "M": "clusters",
    "N": "nodes",
    "O": "overcommit",
    "S": "core-spec",
    "b": "begin",
    "c": "cpus-per-task",
    "d": "dependency",
    "k": "no-kill",
    "m": "distribution",
    "n": "ntasks",
    "p": "partition",
    "q": "qos",
    "s": "oversubscribe",
    "t": "time",
    "w": "nodelist",
    "x": "exclude",
}
"""Long names of the short options of sbatch(1) that concern where and when a job runs."""
WITHOUT_VALUE = frozenset({"hold", "no-kill", "overcommit", "oversubscribe"})
"""Those of them that take no value in their short form."""


class SlurmBatch:
    """Slurm, used through its commands."""

    def __init__(self, folder: Path, commands: CommandRunner = USUAL_COMMANDS) -> None:
        self._folder, self._commands = folder, commands

    def submit(self, request: JobRequest) -> str:
        """Run sbatch, which reads the script unless the command names it; the script has all options."""
        stdin = None if str(request.script) in request.command else request.script
        return parse_job_id(self._commands.submit(request.command, stdin, REFUSALS))

    def call(self, call: FunctionCall) -> tuple[str, ...]:
        """Submit with submitit's Slurm executor, without its srun: the function starts steps itself.

        It requests the same resources as the batch template, for the same reasons.
        """
        site = call.site
        parameters = {
            "slurm_job_name": call.name,
            "slurm_time": math.ceil(call.wall_s / 60),
            "slurm_nodes": call.nodes,
            "slurm_array_parallelism": call.max_concurrent,
            "slurm_mem": f"{site.memory_per_node // 2**20}M",
            f"slurm_{site.queue_option}": call.queue.name,
            "slurm_account": site.account,
            "slurm_setup": setup_lines(site) or None,
            "slurm_gres": f"gpu:{site.gpus_per_node}" if site.device == "gpu" else None,
            "slurm_additional_parameters": {
                # Steps inherit most options of a job, --cpus-per-task among
                # them, but not --mincpus and --gres.
                "mincpus": site.requested_cores,
                **_directives(site.directives),
            },
            "slurm_use_srun": False,
        }
        return submit_function(call, "slurm", parameters, REFUSALS)

    def statuses(self, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        """Query squeue, then sacct for jobs that squeue no longer has (UNKNOWN without accounting)."""
        if not ids:
            return {}
        records = parse_squeue(self._commands.check_output(squeue_command(ids), TRANSIENT, GONE))
        if missing := [job for job in ids if record_of(job, records) is None]:
            records |= parse_sacct(self._commands.run_best_effort(sacct_command(missing)))
        found = {job: record_of(job, records) for job in ids}
        return {job: self._status(record) for job, record in found.items()}

    def find(self, names: Sequence[str], *, recorded: bool = True) -> Mapping[str, str]:
        """Query squeue, then sacct for jobs that squeue no longer has.

        Without accounting, a job is found as long as squeue has it (MinJobAge after its end).
        """
        if not names:
            return {}
        found = parse_found(self._commands.check_output(find_command(names, os.getuid()), TRANSIENT, GONE))
        if recorded and (missing := [name for name in names if name not in found]):
            # Unlike in `statuses`, a failure counts: a job that is not found is submitted again.
            command = find_gone_command(missing, os.getuid())
            found |= parse_found(self._commands.check_output(command, TRANSIENT, NO_ACCOUNTING))
        return {name: job for name, job in found.items() if name in names}

    def find_call(self, name: str, count: int) -> tuple[str, ...]:
        """Return the ids of the job, or of the elements of the array, of that name."""
        job = self.find([name]).get(name, "")
        return array_elements(job, count, FIRST_ELEMENT) if job else ("",) * count

    def cancel(self, ids: Sequence[str]) -> None:
        """Run scancel."""
        if ids:
            self._commands.check_output(["scancel", *ids], TRANSIENT, OVER_ALREADY)

    def _status(self, record: JobRecord | None) -> JobStatus:
        """Return a job's state, completed by data of the nodes themselves."""
        if record is None:
            return JobStatus(JobState.UNKNOWN)
        if record.status.state != JobState.NODE_FAILED or not record.nodes:
            return record.status
        failed = parse_failed_nodes(self._commands.run_best_effort(sinfo_command(record.nodes)))
        return replace(record.status, failed_nodes=failed)


def _directives(lines: Sequence[str]) -> dict[str, object]:
    """Convert the options in lines of ``#SBATCH`` to submitit's mapping, which has their long names alone.

    Raises
    ------
    BadInputError
        If there is anything but options, or an unknown short one.
    """
    # hetctl submits the next job itself: a requeued one would come on top of it.
    parsed: dict[str, object] = {"no-requeue": True}
    for line in lines:
        words = deque(shlex.split(line))
        while words:
            key, value = _option(words, line)
            parsed[key] = value
    return parsed


def _option(words: deque[str], line: str) -> tuple[str, str | bool]:
    """Take the next option with its value, which may be the next word; True if it has none."""
    word = words.popleft()
    if word.startswith("--"):
        key, separator, value = word[2:].partition("=")
        takes_next = not separator and words and not words[0].startswith("-")
        return key, words.popleft() if takes_next else value if separator else True
    key = SHORT_OPTIONS.get(word[1:2], "") if word.startswith("-") else ""
    if not key:
        raise BadInputError(
            f"directive {line!r} of the site file: {word!r} is no option of sbatch that is known",
            "write options by their long names, such as --constraint=gpu",
        )
    if key in WITHOUT_VALUE:
        return key, True
    return key, word[2:] or (words.popleft() if words else True)
