"""Client of LSF and its commands: bjobs for jobs in its memory, bhist for older ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from hetctl.cluster.batch.command import CommandBatch, newest, sections
from hetctl.model.job import JobState, JobStatus

STATES = {
    "PEND": JobState.PENDING,
    "PROV": JobState.PENDING,  # its node is being switched on
    "PSUSP": JobState.PENDING,  # held
    "WAIT": JobState.PENDING,  # in a chunk of jobs
    "RUN": JobState.RUNNING,
    "USUSP": JobState.RUNNING,  # suspended by a user, and continues later
    "SSUSP": JobState.RUNNING,  # suspended by LSF, and continues later
    "DONE": JobState.FINISHED,
    "EXIT": JobState.FAILED,  # for one of the reasons below
    "UNKWN": JobState.UNKNOWN,  # its node does not answer; the job may still run there
    "ZOMBI": JobState.UNKNOWN,  # killed while its node did not answer, which is not informed yet
}
REASONS = {
    "TERM_ADMIN": JobState.CANCELLED,
    "TERM_BUCKET_KILL": JobState.CANCELLED,
    "TERM_CPULIMIT": JobState.TIMEOUT,
    "TERM_CSM_ALLOC": JobState.NODE_FAILED,  # its nodes could not be prepared
    "TERM_DEADLINE": JobState.TIMEOUT,
    "TERM_FORCE_ADMIN": JobState.CANCELLED,
    "TERM_FORCE_OWNER": JobState.CANCELLED,
    "TERM_LOAD": JobState.PREEMPTED,  # its node was overloaded
    "TERM_MEMLIMIT": JobState.OUT_OF_MEMORY,
    "TERM_ORPHAN_SYSTEM": JobState.CANCELLED,  # the condition that it waited for cannot become true
    "TERM_OWNER": JobState.CANCELLED,
    "TERM_PREEMPT": JobState.PREEMPTED,
    "TERM_RC_RECLAIM": JobState.PREEMPTED,  # the cloud reclaimed the node
    "TERM_REMOVE_HUNG_JOB": JobState.NODE_FAILED,  # its node did not answer for too long
    "TERM_REQUEUE_ADMIN": JobState.PREEMPTED,
    "TERM_REQUEUE_OWNER": JobState.PREEMPTED,
    "TERM_RUNLIMIT": JobState.TIMEOUT,
    "TERM_SWAP": JobState.OUT_OF_MEMORY,
    "TERM_WINDOW": JobState.TIMEOUT,  # its queue runs jobs at certain hours only
    "TERM_ZOMBIE": JobState.NODE_FAILED,
}
"""States of ended jobs by LSF's reason; any other reason means that the job failed by itself."""

TRANSIENT = (
    "LSF is down",
    "Cannot connect to LSF",
    "ommunication time out",
    "batch daemon not responding",
    "batch system is temporarily not responding",
    "Failed in sending/receiving a message",
    "Connection refused",
)
"""Messages of temporary failures."""

REFUSALS = (
    "Illegal option",
    "No such queue",
    "Bad queue name",
    "Queue has been closed",
    "User cannot use the queue",
    "User permission denied",
    "Unknown user",
    "No such user/host group",
    "Bad host name",
    "Bad host specification",
    "Bad resource requirement syntax",
    "Bad resource name",
    "Bad time specification",
    "Bad CPU limit specification",
    "Bad argument",
    "Bad job name",
    "Cannot exceed queue's hard limit(s)",
    "Cannot exceed queue's resource reservation",
    "Too many processors requested",
    "Too few processors requested",
    "does not have enough",
    "has reached its job limit",
    "does not accept EXCLUSIVE jobs",
    "Request from non-LSF host rejected",
    "Request aborted by esub",
    "Dependency condition",
    "No matching job found",
    "is not a valid project",
    "not in the specified",
)
"""Parts of messages of bsub after which no job exists (lsb.err.c); any other failure leaves a doubt."""

NOTHING_FOUND = ("is not found", "No matching job found", "No job found", "No unfinished job found")
OVER_ALREADY = ("Job has already finished", "No matching job found", "is being terminated")

FIELDS = "jobid job_name stat exit_code exit_reason pend_reason exec_host"
SUBMITTED = re.compile(r"^Job <([0-9]{1,18})> is submitted to ", re.MULTILINE)
JOB_ID = re.compile(r"[0-9]{1,18}\Z")
HISTORY = re.compile(r"^Job <([^>\n]*)>,(?: Job Name <([^>\n]*)>)?", re.MULTILINE)
EVENT = re.compile(r"^\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d(?: \d{4})?: (.*)$", re.MULTILINE | re.ASCII)
ENDED = re.compile(
    r"(?P<done>Done successfully\.)"
    r"|Exited with exit code (?P<code>\d{1,3})\."
    r"|Exited by (?:LSF )?signal (?P<signal>\d{1,3})\."
    r"|Completed <exit>(?:; (?P<reason>TERM_\w+: .*))?",
    re.ASCII,
)


def bjobs_command(ids: Sequence[str]) -> list[str]:
    """Return the query for jobs in LSF's memory."""
    # -json is accepted only with -o; -a includes jobs that ended a short time ago.
    return ["bjobs", "-a", "-json", "-o", FIELDS, *ids]


def parse_bjobs(text: str) -> dict[str, JobStatus]:
    """Parse the output of `bjobs_command`, by job; records of jobs unknown to LSF are skipped."""
    return {job: _status(record) for job, record in _records(text) if "STAT" in record}


def bhist_command(ids: Sequence[str]) -> list[str]:
    """Return the query of the log for jobs that have left LSF's memory."""
    return ["bhist", "-l", *ids]


def parse_bhist(text: str) -> dict[str, JobStatus]:
    """Parse the output of `bhist_command`: the jobs that have ended, with their states.

    If a log does not contain the end of a job, it is truncated or was rotated: the state is unknown.
    """
    ends = ((job, _end(story)) for job, _, story in _stories(text))
    return {job: end for job, end in ends if end}


def find_command(names: Sequence[str]) -> list[str]:
    """Return the query for this user's jobs of these names, and possibly others, in LSF's memory."""
    return ["bjobs", "-a", "-json", "-o", FIELDS, "-J", _pattern(names)]


def parse_found(text: str) -> dict[str, str]:
    """Parse the output of `find_command`: the ids by name, the newest if there are several."""
    return newest((record.get("JOB_NAME", ""), job) for job, record in _records(text))


def find_gone_command(names: Sequence[str]) -> list[str]:
    """Return the query of the log for this user's jobs of these names, and possibly others."""
    return ["bhist", "-a", "-l", "-J", _pattern(names)]


def parse_found_gone(text: str) -> dict[str, str]:
    """Parse the output of `find_gone_command`: the ids by name, the newest if there are several."""
    return newest((name, job) for job, name, _ in _stories(text))


def _records(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the records of a JSON answer by job; other lines may precede it."""
    try:
        answer = json.loads(text[max(0, text.find("{")) :])
    except (ValueError, RecursionError):
        return
    records: Any = answer.get("RECORDS") if isinstance(answer, dict) else None
    for record in records if isinstance(records, list) else ():
        if isinstance(record, dict) and "ERROR" not in record:
            fields = {key: value.strip() for key, value in record.items() if isinstance(value, str)}
            if JOB_ID.match(job := fields.get("JOBID", "")):
                yield job, fields


def _status(record: Mapping[str, str]) -> JobStatus:
    """Return a job's state, from STAT alone, because the exit code may be missing."""
    word = record["STAT"]
    state = STATES.get(word, JobState.UNKNOWN)
    if state == JobState.FAILED:
        return _failed(_number(record.get("EXIT_CODE", "")), record.get("EXIT_REASON", ""), record)
    if state == JobState.FINISHED:
        return JobStatus(state, 0, word)
    return JobStatus(state, None, record.get("PEND_REASON") or word)


def _failed(code: int | None, reason: str, record: Mapping[str, str] | None = None) -> JobStatus:
    state = REASONS.get(reason.partition(":")[0].strip(), JobState.FAILED)
    failed_nodes: tuple[str, ...] = ()
    if state == JobState.NODE_FAILED and record:
        # EXEC_HOST has 16*host for 16 slots of a host.
        hosts = dict.fromkeys(h.rpartition("*")[2] for h in record.get("EXEC_HOST", "").split(":") if h)
        failed_nodes = tuple(hosts) if len(hosts) == 1 else ()  # of several, the failed one is unknown
    return JobStatus(state, code or None, reason.strip(" .;") or "EXIT", failed_nodes)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 3 else None


def _stories(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (job, name, events) from bhist's long format; continuation lines are indented by 21 spaces."""
    for head, events in sections(HISTORY, re.sub(r"\n {21}", "", text)):
        if JOB_ID.match(head[1]):
            yield head[1], head[2] or "", events


def _end(story: str) -> JobStatus | None:
    """Return the state at the end of the last run of a job; a requeued job ends several times."""
    code: int | None = None
    end: JobStatus | None = None
    for event in EVENT.findall(story):
        if event.startswith(("Dispatched", "Starting", "Pending", "Requeued")):
            code, end = None, None
        found = ENDED.match(event)
        if not found:
            continue
        if found["done"]:
            end = JobStatus(JobState.FINISHED, 0, "DONE")
            continue
        code = int(found["code"]) if found["code"] else code
        code = 128 + int(found["signal"]) if found["signal"] else code
        end = _failed(code, found["reason"] or "")
    return end


def _pattern(names: Sequence[str]) -> str:
    """Return the narrowest pattern that matches all names; LSF accepts no list of names."""
    return names[0] if len(names) == 1 else f"{commonprefix(names)}*"  # noqa: RUF071 (no paths)


class LsfBatch(CommandBatch):
    """LSF, used through its commands."""

    refusals, transient, over = REFUSALS, TRANSIENT, OVER_ALREADY
    cancel_command = ("bkill",)
    submitted = SUBMITTED

    def _statuses(self, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        """Query bjobs, then bhist for jobs that bjobs lacks."""
        found = parse_bjobs(self._ask(bjobs_command(ids), NOTHING_FOUND))
        if missing := [job for job in ids if job not in found]:
            found |= parse_bhist(self._commands.run_best_effort(bhist_command(missing)))
        return found

    def _find(self, names: Sequence[str], recorded: bool) -> Mapping[str, str | None]:
        """Query bjobs, then bhist for jobs that bjobs lacks."""
        found = parse_found(self._ask(find_command(names), NOTHING_FOUND))
        if recorded and (missing := [name for name in names if name not in found]):
            found |= parse_found_gone(self._ask(find_gone_command(missing), NOTHING_FOUND))
        return found
