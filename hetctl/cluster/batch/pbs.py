"""Client of PBS (OpenPBS, PBS Professional): qstat knows running jobs, and ended ones from its history."""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterator, Mapping, Sequence

from hetctl.cluster.batch.command import CommandBatch, sections
from hetctl.cluster.batch.queues import parse_slurm_time
from hetctl.model.job import JobState, JobStatus

STATES = {
    "Q": JobState.PENDING,
    "H": JobState.PENDING,  # held, as a job is that waits for another one
    "T": JobState.PENDING,  # on its way to another server
    "W": JobState.PENDING,  # for its time to begin
    "R": JobState.RUNNING,
    "E": JobState.RUNNING,  # has ended, and is tidied up
    "S": JobState.RUNNING,  # suspended by the scheduler, and continues later
    "U": JobState.RUNNING,  # suspended because the owner of its workstation is active
    "M": JobState.UNKNOWN,  # moved to another server
    "F": JobState.FAILED,  # over, in one of the ways below
}
ENDS = {
    -1: JobState.NODE_FAILED,  # it could not be started
    -2: JobState.NODE_FAILED,
    -4: JobState.NODE_FAILED,  # its first node was started anew
    -20: JobState.NODE_FAILED,  # its first node was lost
    -30: JobState.NODE_FAILED,  # one of its nodes did not join
    -26: JobState.OUT_OF_MEMORY,
    -27: JobState.OUT_OF_MEMORY,
    -28: JobState.TIMEOUT,
    -29: JobState.TIMEOUT,
}
"""States by ``Exit_status``, where PBS itself ended a job (``JOB_EXEC_`` in OpenPBS' job.h)."""
TERMINATED = "91"
"""Substate of jobs that qdel ended (``JOB_SUBSTATE_TERMINATED``)."""
SIGNALLED = 256
"""Added by PBS to the number of the signal that ended a job's shell."""

TRANSIENT = (
    "cannot connect to server",
    "Connection refused",
    "Communication failure",
    "No Permission",  # while the server starts
    "Premature end of message",
    "Batch protocol error",
    "Server shutting down",
    "errno=15031",
    "errno=15010",
)
"""Messages of temporary failures."""

REFUSALS = (
    "Unknown queue",
    "Queue is not enabled",
    "Access to queue is denied",
    "Job violates queue and/or server resource limits",
    "Job rejected by all possible destinations",
    "No default queue specified",
    "Invalid Account",
    "Invalid Job Dependency",
    "Job has finished",
    "hook rejected request",
    "Cannot be used with select or place",
    "Unknown resource",
    "Illegal attribute or resource value",
    "Undefined attribute",
    "Resource invalid in",
    "is required to be set",
    "would exceed",
    "exceeds",
    "Maximum number of jobs already in queue",
    "Invalid credential",
    "Unauthorized Request",
    "Bad UID for job execution",
    "Invalid request",
    "illegal -",
    "invalid option",
    "Unknown Job Id",
    "script file",
    "usage: qsub",
)
"""Parts of messages of qsub after which no job exists; any other failure leaves a doubt."""

NOTHING_FOUND = ("Unknown Job Id",)
OVER_ALREADY = ("Unknown Job Id", "Job has finished", "Request invalid for state of job")

SUBMITTED = re.compile(r"^([0-9]{1,18}\.[\w.-]+)\s*$", re.MULTILINE | re.ASCII)
"""Line of qsub, possibly after lines of the site: ``12.server``."""
JOB = re.compile(r"^Job Id: ([0-9]{1,18}(?:\.[\w.-]+)?)\s*$", re.MULTILINE | re.ASCII)
ATTRIBUTE = re.compile(r"^    ([\w.]+) = (.*)$", re.MULTILINE | re.ASCII)


def qstat_command(ids: Sequence[str]) -> list[str]:
    """Return the query for jobs, those that are over included."""
    # Not -F json: releases before 2022 print values there that are not quoted.
    return ["qstat", "-x", "-f", *ids]


def parse_qstat(text: str) -> dict[str, JobStatus]:
    """Parse the output of `qstat_command`, by job."""
    return {job: _status(record) for job, record in _records(text) if "job_state" in record}


def find_command(name: str, user: str, *, recorded: bool) -> list[str]:
    """Return the query for the ids of a user's jobs with this name."""
    return ["qselect", *(["-x"] if recorded else []), "-u", user, "-N", name]


def parse_found(text: str) -> str | None:
    """Parse the output of `find_command`: the newest job; None if there is none."""
    return max(SUBMITTED.findall(text), key=lambda job: int(job.partition(".")[0]), default=None)


def _records(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the attributes of each job; long lines go on after a tab."""
    for head, attributes in sections(JOB, text.replace("\n\t", "")):
        record: dict[str, str] = {}
        for name, value in ATTRIBUTE.findall(attributes):
            record.setdefault(name, value.strip())
        yield head[1], record


def _status(record: Mapping[str, str]) -> JobStatus:
    """Return a job's state; a job that never started has no exit status."""
    state, comment = STATES.get(record["job_state"], JobState.UNKNOWN), record.get("comment", "")
    if state != JobState.FAILED:
        return JobStatus(
            state, None, comment if state == JobState.PENDING and comment else record["job_state"]
        )
    code = _number(record.get("Exit_status", ""))
    if record.get("substate") == TERMINATED or code is None:
        return JobStatus(JobState.CANCELLED, None, comment or "deleted")
    if code == 0:
        return JobStatus(JobState.FINISHED, 0, "F")
    if code < 0:
        return JobStatus(ENDS.get(code, JobState.FAILED), None, f"Exit_status {code}: {comment}")
    signalled = code > SIGNALLED
    late = signalled and _used_up(record)
    exit_code = code - SIGNALLED + 128 if signalled else code
    return JobStatus(JobState.TIMEOUT if late else JobState.FAILED, exit_code, comment or "F")


def _used_up(record: Mapping[str, str]) -> bool:
    """Return true if a job ran for as long as it might: before release 19, only this tells its limit."""
    used, limit = (
        parse_slurm_time(record.get(f"{name}.walltime", "")) for name in ("resources_used", "Resource_List")
    )
    return used is not None and limit is not None and used >= limit


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,5}", text, re.ASCII) else None


class PbsBatch(CommandBatch):
    """PBS, used through its commands."""

    refusals, transient, over = REFUSALS, TRANSIENT, OVER_ALREADY
    cancel_command = ("qdel",)
    submitted = SUBMITTED

    def _statuses(self, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        return parse_qstat(self._ask(qstat_command(ids), NOTHING_FOUND))

    def _find(self, names: Sequence[str], recorded: bool) -> Mapping[str, str | None]:
        """Query one name after the other, as qselect takes no list."""
        user = getpass.getuser()
        return {name: parse_found(self._ask(find_command(name, user, recorded=recorded))) for name in names}
