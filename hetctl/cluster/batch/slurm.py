"""Client of Slurm and its commands: squeue for jobs in its memory, sacct for older ones."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetctl.cluster.batch.command import CommandBatch, newest
from hetctl.model.job import JobState, JobStatus
from hetctl.model.values import dataclass

STATES = {
    "BOOT_FAIL": JobState.NODE_FAILED,
    "CANCELLED": JobState.CANCELLED,
    "COMPLETED": JobState.FINISHED,
    "COMPLETING": JobState.RUNNING,  # its processes may still be ending
    "CONFIGURING": JobState.PENDING,
    "DEADLINE": JobState.TIMEOUT,
    "EXPEDITING": JobState.PENDING,
    "FAILED": JobState.FAILED,
    "NODE_FAIL": JobState.NODE_FAILED,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
    "PENDING": JobState.PENDING,
    "POWER_UP_NODE": JobState.PENDING,
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

TRANSIENT = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Zero Bytes were transmitted or received",
    "Unexpected message received",
    "Communication connection failure",
    "Connection refused",  # the accounting daemon is down
    "Connection timed out",
    "Slurm backup controller in standby mode",
    "Resource temporarily unavailable",
)
"""Messages of temporary failures."""

REFUSALS = (
    # Of the command itself, which has sent nothing.
    "(connect failure)",
    "unrecognized option",
    "invalid option",
    "Invalid --",
    "invalid number of",
    "Invalid directive found in batch script",
    "Unable to open file",
    "Batch script ",
    "This does not look like a batch script",
    "cli_filter plugin terminated with error",
    # Of the controller.
    "partition specified",
    "partition name specified",
    "specification",
    "account/partition combination",
    "Job violates accounting/QOS policy",
    "time limit is invalid",
    "configuration is not available",
    "configuration not available",
    "node not available",
    "partition not available",
    "permission denied",
    "not permitted to use this partition",
    "Access denied",
    "Requested reservation",
    "Requested nodes not in this partition",
    "Invalid node name specified",
    "More processors requested than permitted",
    "Requested account has breached requested QOS usage threshold",
    "Job dependency problem",
)
"""Parts of messages of sbatch after which no job exists (slurm_errno.c); any other failure leaves a doubt."""

GONE = ("Invalid job id",)
"""Messages of squeue about a single job that has left Slurm's memory."""
NO_ACCOUNTING = ("accounting storage is disabled",)
OVER_ALREADY = ("already completing or completed", *GONE)

NODE_TROUBLE = ("down", "drain", "err", "fail", "unk")
"""Prefixes of the states of nodes that do not work; a * after a state marks a node that does not respond."""

REFUSED = (("FAILED", ""), ("FAILED", "None assigned"))
"""State and nodes of a job that has never begun, as squeue and sacct print them."""
JOB_ID = re.compile(r"[0-9]{1,18}\Z")
SUBMITTED = re.compile(r"^([0-9]{1,18})(?:;\S*)?\s*\Z", re.MULTILINE)
"""Last line of ``sbatch --parsable``: ``id`` or ``id;cluster``."""
MEMORY_DAYS = 30
"""Number of days for which the accounting is searched for a name."""


@dataclass(frozen=True)
class JobRecord:
    """Slurm's record of a job; `nodes` in Slurm's notation, ``n[1-4,7]``."""

    status: JobStatus
    nodes: str = ""


def squeue_command(ids: Sequence[str]) -> list[str]:
    """Return the query for jobs in Slurm's memory."""
    columns = "JobID:|,State:|,exit_code:|,Reason:|,NodeList:|"
    # --states=all: by default squeue hides ended jobs, which it keeps for MinJobAge.
    return ["squeue", "--noheader", "--states=all", f"--Format={columns}", f"--jobs={','.join(ids)}"]


def parse_squeue(text: str) -> dict[str, JobRecord]:
    """Parse the output of `squeue_command`, by job; lines without a complete record are skipped."""
    records = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 6 and JOB_ID.match(fields[0]):
            job, state, code, reason, nodes, _ = fields
            records[job] = _record(state, code, "" if reason == "None" else reason, nodes)
    return records


def sacct_command(ids: Sequence[str]) -> list[str]:
    """Return the query of the accounting for older jobs; for a requeued job it reports the last run."""
    return ["sacct", "-X", "-P", "-n", "--format=JobID,State,ExitCode,NodeList", f"--jobs={','.join(ids)}"]


def parse_sacct(text: str) -> dict[str, JobRecord]:
    """Parse the output of `sacct_command`, by job; lines without a complete record are skipped."""
    records = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 4 and JOB_ID.match(fields[0]):
            job, state, code, nodes = fields
            records[job] = _record(state, code, "", nodes)
    return records


def find_command(names: Sequence[str], user: int) -> list[str]:
    """Return the query for a user's jobs of these names in Slurm's memory."""
    return [
        *("squeue", "--noheader", "--states=all", f"--user={user}"),
        *("--format=%A|%j|%T|%N", f"--name={','.join(names)}"),
    ]


def find_gone_command(names: Sequence[str], user: int) -> list[str]:
    """Return the query of the accounting for a user's jobs of these names."""
    # By default sacct searches from midnight of this day on.
    return [
        *("sacct", "-X", "-P", "-n", f"--user={user}", f"--starttime=now-{MEMORY_DAYS}days"),
        *("--format=JobID,JobName,State,NodeList", f"--name={','.join(names)}"),
    ]


def parse_found(text: str) -> dict[str, str]:
    """Parse ``id|name|state|nodes`` lines: the ids by name, the newest if there are several."""
    lines = ((*line.strip().split("|"), "") for line in text.splitlines())
    # Slurm keeps a record of a job that it has refused.
    return newest(
        (name, job)
        for job, name, *state_and_nodes in lines
        if JOB_ID.match(job) and tuple(state_and_nodes[:2]) not in REFUSED
    )


def sinfo_command(nodes: str) -> list[str]:
    """Return the query for the states of nodes."""
    return ["sinfo", "--noheader", "--Node", "--format=%N|%T", f"--nodes={nodes}"]


def parse_failed_nodes(text: str) -> tuple[str, ...]:
    """Parse ``node|state`` lines, one per partition of a node; return the nodes that do not work."""
    failed = {}
    for line in text.splitlines():
        node, _, state = line.strip().partition("|")
        if node and (state.lower().startswith(NODE_TROUBLE) or state.endswith("*")):
            failed[node] = True
    return tuple(failed)


def _record(words: str, code: str, reason: str, nodes: str) -> JobRecord:
    state = _state_named(words.split()[0] if words else "")  # sacct appends the user: "CANCELLED by 1000"
    exit_code = _exit_code(code) if state.over else None
    if state == JobState.FINISHED and exit_code != 0:
        state = JobState.FAILED  # Slurm 20.11 reports COMPLETED, -1 if the prolog failed
    elif state == JobState.NODE_FAILED or (state != JobState.FINISHED and exit_code == 0):
        exit_code = None  # Slurm ended it: there is no exit code, or a fabricated one
    if state == JobState.CANCELLED:
        reason = ""  # squeue still reports the reason for which it was pending
    return JobRecord(JobStatus(state, exit_code, reason or words), nodes)


def _state_named(word: str) -> JobState:
    """Return the state of a name; sacct truncates long names (``OUT_OF_ME+``); ambiguous ones are UNKNOWN."""
    if not word.endswith("+"):
        return STATES.get(word, JobState.UNKNOWN)
    found = [state for name, state in STATES.items() if name.startswith(word.rstrip("+"))]
    return found[0] if len(found) == 1 else JobState.UNKNOWN


def _exit_code(text: str) -> int | None:
    """Parse sacct's ``code:signal``, or squeue's status in the form of wait(2)."""
    if match := re.fullmatch(r"(\d{1,3}):(\d{1,3})", text, re.ASCII):
        code, number = int(match.group(1)), int(match.group(2))
    elif re.fullmatch(r"\d{1,5}", text, re.ASCII):
        code, number = int(text) >> 8, int(text) & 0x7F
    else:
        return None
    return 128 + number if number else code


class SlurmBatch(CommandBatch):
    """Slurm, used through its commands."""

    refusals, transient, over = REFUSALS, TRANSIENT, OVER_ALREADY
    cancel_command = ("scancel",)
    submitted = SUBMITTED

    def _statuses(self, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        """Query squeue, then sacct for jobs that squeue lacks."""
        records = parse_squeue(self._ask(squeue_command(ids), GONE))
        if missing := [job for job in ids if job not in records]:
            records |= parse_sacct(self._commands.run_best_effort(sacct_command(missing)))
        return {job: self._completed(record) for job, record in records.items()}

    def _find(self, names: Sequence[str], recorded: bool) -> Mapping[str, str | None]:
        """Query squeue, then sacct for jobs that squeue lacks.

        Without accounting, a job is found as long as squeue has it (MinJobAge after its end).
        """
        found = parse_found(self._ask(find_command(names, os.getuid()), GONE))
        if recorded and (missing := [name for name in names if name not in found]):
            # Unlike in `_statuses`, a failure counts: a job that is not found is submitted again.
            found |= parse_found(self._ask(find_gone_command(missing, os.getuid()), NO_ACCOUNTING))
        return found

    def _completed(self, record: JobRecord) -> JobStatus:
        """Return a job's state, completed by data of the nodes themselves."""
        if record.status.state != JobState.NODE_FAILED or not record.nodes:
            return record.status
        failed = parse_failed_nodes(self._commands.run_best_effort(sinfo_command(record.nodes)))
        return replace(record.status, failed_nodes=failed)
