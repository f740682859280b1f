"""Slurm: squeue for jobs that live, sacct for those that are gone."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetctl.batch import process
from hetctl.batch.base import FunctionCall
from hetctl.batch.functions import submit_function
from hetctl.core.errors import BatchSystemError
from hetctl.core.job import JobState

STATES = {
    "BOOT_FAIL": JobState.NODE_FAILED,
    "CANCELLED": JobState.CANCELLED,
    "COMPLETED": JobState.FINISHED,
    "COMPLETING": JobState.RUNNING,  # its processes may still be ending
    "CONFIGURING": JobState.PENDING,
    "DEADLINE": JobState.TIMEOUT,
    "FAILED": JobState.FAILED,
    "NODE_FAIL": JobState.NODE_FAILED,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
    "PENDING": JobState.PENDING,
    "PREEMPTED": JobState.PREEMPTED,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "RESIZING": JobState.RUNNING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "REVOKED": JobState.CANCELLED,
    "RUNNING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "SPECIAL_EXIT": JobState.PENDING,
    "STAGE_OUT": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "TIMEOUT": JobState.TIMEOUT,
}


def squeue_command(ids: Sequence[str]) -> list[str]:
    """Ask for the states of jobs that Slurm still holds in memory."""
    return ["squeue", "--noheader", "--states=all", "--format=%i|%T", f"--jobs={','.join(ids)}"]


def sacct_command(ids: Sequence[str]) -> list[str]:
    """Ask the accounting for the states of jobs that are gone."""
    jobs = ",".join(ids)
    return ["sacct", "-X", "-P", "-n", "--format=JobIDRaw,State%30", f"--jobs={jobs}"]


def parse_states(text: str) -> dict[str, JobState]:
    """Read ``id|STATE`` lines of squeue or sacct; a state nobody knows is UNKNOWN."""
    states = {}
    for line in text.splitlines():
        job, separator, state = line.strip().partition("|")
        if separator and state.strip():
            states[job] = _state_named(state.split()[0])  # sacct adds by whom: "CANCELLED by 1000"
    return states


def _state_named(word: str) -> JobState:
    """Look a state up; sacct cuts long names (``OUT_OF_ME+``), and what could be two of them is none."""
    if not word.endswith("+"):
        return STATES.get(word, JobState.UNKNOWN)
    found = [state for name, state in STATES.items() if name.startswith(word.rstrip("+"))]
    return found[0] if len(found) == 1 else JobState.UNKNOWN


def parse_job_id(text: str) -> str:
    """Read what ``sbatch --parsable`` prints: ``id`` or ``id;cluster``.

    Raises
    ------
    BatchSystemError
        If there is no job id in it.
    """
    lines = text.strip().splitlines()
    job = lines[-1].partition(";")[0] if lines else ""
    if not job.isdigit():
        raise BatchSystemError(f"sbatch printed no job id: {text.strip()!r}")
    return job


class SlurmBatch:
    """Slurm through its commands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def submit(self, script: Path, command: Sequence[str], wall_s: int) -> str:  # noqa: ARG002
        """Run sbatch, which reads the script itself unless the command names it; the limits are in there."""
        stdin = None if str(script) in command else script
        return parse_job_id(process.order(command, stdin))

    def call(self, call: FunctionCall) -> str:
        """Submit with submitit's Slurm executor, without its srun: the function starts steps itself.

        What is reserved is what the batch template reserves, and for its reasons.
        """
        site = call.site
        parameters = {
            "slurm_job_name": call.name,
            "slurm_time": math.ceil(call.wall_s / 60),
            "slurm_nodes": call.nodes,
            "slurm_mem": f"{site.memory_per_node // 2**20}M",
            "slurm_partition": call.queue.name,
            "slurm_account": site.account,
            "slurm_setup": [
                *site.setup,
                *(f"export {k}={shlex.quote(v)}" for k, v in site.environment.items()),
            ]
            or None,
            "slurm_gres": f"gpu:{site.gpus_per_node}" if site.device == "gpu" else None,
            "slurm_additional_parameters": {
                "mincpus": site.gpus_per_node * site.cores_per_gpu,
                **_directives(site.directives),
            },
            "slurm_use_srun": False,
        }
        return submit_function(call, "slurm", parameters)

    def states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        """Ask squeue, then sacct for what squeue no longer knows; without accounting that is UNKNOWN."""
        if not ids:
            return {}
        answer = process.run(squeue_command(ids))
        states = parse_states(answer.stdout)
        # squeue fails for a single job that is gone, and when the controller is away.
        if answer.code != 0 and "Invalid job id" not in answer.stderr:
            raise BatchSystemError(f"squeue failed ({answer.code}): {answer.stderr.strip()}")
        if missing := [job for job in ids if job not in states]:
            states.update(parse_states(process.run(sacct_command(missing)).stdout))
        return {job: states.get(job, JobState.UNKNOWN) for job in ids}

    def cancel(self, ids: Sequence[str]) -> None:
        """Run scancel, which is content with jobs that are over."""
        if ids:
            process.order(["scancel", *ids])


def _directives(lines: Sequence[str]) -> dict[str, object]:
    """Turn ``--key=value`` lines into submitit's mapping."""
    parsed: dict[str, object] = {"no-requeue": True}
    for line in lines:
        key, separator, value = line.lstrip("-").partition("=")
        parsed[key.strip()] = value.strip() if separator else True
    return parsed
