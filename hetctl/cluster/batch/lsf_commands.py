"""What LSF is asked, and what its answers mean: pairs of pure functions.

Ids of jobs are written as submitit does, which names files by them: an element of an array is ``12_3``
where LSF writes ``12[3]``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from hetctl.cluster.batch.base import SubmissionInDoubtError
from hetctl.cluster.batch.command import DOUBT
from hetctl.model.job import JobState, JobStatus

STATES = {
    "PEND": JobState.PENDING,
    "PROV": JobState.PENDING,  # its node is being switched on
    "PSUSP": JobState.PENDING,  # held
    "WAIT": JobState.PENDING,  # in a chunk of jobs
    "RUN": JobState.RUNNING,
    "USUSP": JobState.RUNNING,  # stopped by somebody, and goes on
    "SSUSP": JobState.RUNNING,  # stopped by LSF, and goes on
    "DONE": JobState.FINISHED,
    "EXIT": JobState.FAILED,  # for the reasons below
    "UNKWN": JobState.UNKNOWN,  # its node does not answer; the job may well go on there
    "ZOMBI": JobState.UNKNOWN,  # killed while its node did not answer, which does not know of it yet
}
REASONS = {
    "TERM_ADMIN": JobState.CANCELLED,
    "TERM_BUCKET_KILL": JobState.CANCELLED,
    "TERM_CPULIMIT": JobState.TIMEOUT,
    "TERM_CSM_ALLOC": JobState.NODE_FAILED,  # its nodes could not be prepared
    "TERM_DEADLINE": JobState.TIMEOUT,
    "TERM_FORCE_ADMIN": JobState.CANCELLED,
    "TERM_FORCE_OWNER": JobState.CANCELLED,
    "TERM_LOAD": JobState.PREEMPTED,  # its node had too much to do
    "TERM_MEMLIMIT": JobState.OUT_OF_MEMORY,
    "TERM_ORPHAN_SYSTEM": JobState.CANCELLED,  # what it waited for can no longer happen
    "TERM_OWNER": JobState.CANCELLED,
    "TERM_PREEMPT": JobState.PREEMPTED,
    "TERM_RC_RECLAIM": JobState.PREEMPTED,  # the cloud took the node back
    "TERM_REMOVE_HUNG_JOB": JobState.NODE_FAILED,  # its node did not answer for too long
    "TERM_REQUEUE_ADMIN": JobState.PREEMPTED,
    "TERM_REQUEUE_OWNER": JobState.PREEMPTED,
    "TERM_RUNLIMIT": JobState.TIMEOUT,
    "TERM_SWAP": JobState.OUT_OF_MEMORY,
    "TERM_WINDOW": JobState.TIMEOUT,  # its queue runs jobs at certain hours only
    "TERM_ZOMBIE": JobState.NODE_FAILED,
}
"""Why a job was ended; any other reason means that it failed by itself."""

TRANSIENT = (
    "LSF is down",
    "Cannot connect to LSF",
    "ommunication time out",
    "batch daemon not responding",
    "batch system is temporarily not responding",
    "Failed in sending/receiving a message",
    "Connection refused",
)
"""Troubles that pass by themselves."""

AMBIGUOUS = ("ommunication time out", "Failed in sending/receiving a message", "not responding")
"""What bsub says when LSF may have taken the job all the same."""

NOTHING_FOUND = ("is not found", "No matching job found", "No job found", "No unfinished job found")
OVER_ALREADY = ("Job has already finished", "No matching job found", "is being terminated")

FIELDS = "jobid jobindex job_name stat exit_code exit_reason pend_reason exec_host"
SUBMITTED = re.compile(r"^Job <([0-9]{1,18})> is submitted to ", re.MULTILINE)
JOB_ID = re.compile(r"([0-9]{1,18})(?:\[([0-9]{1,18})\])?\Z", re.ASCII)
HISTORY = re.compile(r"^Job <([^>\n]*)>,(?: Job Name <([^>\n]*)>)?", re.MULTILINE)
EVENT = re.compile(r"^\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d(?: \d{4})?: (.*)$", re.MULTILINE | re.ASCII)
ENDED = re.compile(
    r"(?P<done>Done successfully\.)"
    r"|Exited with exit code (?P<code>\d{1,3})\."
    r"|Exited by (?:LSF )?signal (?P<signal>\d{1,3})\."
    r"|Completed <exit>(?:; (?P<reason>TERM_\w+: .*))?",
    re.ASCII,
)


def parse_job_id(text: str) -> str:
    """Read what bsub prints: ``Job <12> is submitted to queue <normal>.``, maybe after other lines.

    Raises
    ------
    SubmissionInDoubtError
        If there is no job id in it.
    """
    found = SUBMITTED.search(text)
    if not found:
        raise SubmissionInDoubtError(f"bsub printed no job id: {text.strip()!r}", DOUBT)
    return found.group(1)


def bjobs_command(ids: Sequence[str]) -> list[str]:
    """Ask for jobs that LSF still holds in memory; of an array, for all elements."""
    return ["bjobs", "-a", "-json", "-o", FIELDS, *dict.fromkeys(job.partition("_")[0] for job in ids)]


def parse_bjobs(text: str) -> dict[str, JobStatus]:
    """Read what `bjobs_command` prints, by job; records of jobs that LSF does not know are passed over."""
    return {job: _status(record) for job, record in _records(text) if "STAT" in record}


def bhist_command(ids: Sequence[str]) -> list[str]:
    """Ask the log for jobs that LSF no longer holds in memory."""
    return ["bhist", "-l", *map(lsf_id, ids)]


def parse_bhist(text: str) -> dict[str, JobStatus]:
    """Read what `bhist_command` prints: the jobs that have ended, and how.

    A log that does not tell of the end is cut short or turned over: then nobody knows.
    """
    ends = ((job, _end(story)) for job, _, story in _stories(text))
    return {job: end for job, end in ends if end}


def find_command(names: Sequence[str]) -> list[str]:
    """Ask for our jobs of these names, and maybe others, that LSF still holds in memory."""
    return ["bjobs", "-a", "-json", "-o", FIELDS, "-J", _pattern(names)]


def parse_found(text: str) -> dict[str, str]:
    """Read what `find_command` prints: the ids by name, the newest if there are several."""
    return _newest((record.get("JOB_NAME", "").partition("[")[0], job) for job, record in _records(text))


def find_gone_command(names: Sequence[str]) -> list[str]:
    """Ask the log for our jobs of these names, and maybe others."""
    return ["bhist", "-a", "-l", "-J", _pattern(names)]


def parse_found_gone(text: str) -> dict[str, str]:
    """Read what `find_gone_command` prints: the ids by name, the newest if there are several."""
    return _newest((name, job) for job, name, _ in _stories(text))


def lsf_id(job: str) -> str:
    """Write a job's id as LSF does."""
    array, separator, index = job.partition("_")
    return f"{array}[{index}]" if separator else array


def _our_id(text: str, index: str = "") -> str | None:
    """Read an id as LSF writes it; bjobs has the index of an array's element in another field."""
    match = JOB_ID.match(text)
    if not match:
        return None
    index = match.group(2) or (index if index.isascii() and index.isdigit() else "0")
    return match.group(1) if int(index) == 0 else f"{match.group(1)}_{int(index)}"


def _records(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the records of a JSON answer by job, where other lines may come first."""
    try:
        answer = json.loads(text[max(0, text.find("{")) :])
    except (ValueError, RecursionError):
        return
    records: Any = answer.get("RECORDS") if isinstance(answer, dict) else None
    for record in records if isinstance(records, list) else ():
        if isinstance(record, dict) and "ERROR" not in record:
            fields = {key: value.strip() for key, value in record.items() if isinstance(value, str)}
            job = _our_id(fields.get("JOBID", ""), fields.get("JOBINDEX", ""))
            if job:
                yield job, fields


def _status(record: Mapping[str, str]) -> JobStatus:
    """Decide by STAT alone whether a job is over; the exit code may be missing."""
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
        hosts = dict.fromkeys(h.rpartition("*")[2] for h in record.get("EXEC_HOST", "").split(":") if h)
        failed_nodes = tuple(hosts) if len(hosts) == 1 else ()  # of several, nobody says which
    return JobStatus(state, code or None, reason.strip(" .;") or "EXIT", failed_nodes)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 3 else None


def _stories(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (job, name, events) of bhist's long format, whose lines are folded behind 21 spaces."""
    unfolded = re.sub(r"\n {21}", "", text)
    heads = list(HISTORY.finditer(unfolded))
    ends = [*(head.start() for head in heads), len(unfolded)][1:]
    for head, end in zip(heads, ends, strict=True):
        if job := _our_id(head.group(1)):
            yield job, (head.group(2) or "").partition("[")[0], unfolded[head.end() : end]


def _end(story: str) -> JobStatus | None:
    """Return how the last run of a job ended; a requeued job ends several times."""
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


def _newest(named: Iterator[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, job in named:
        array = job.partition("_")[0]
        if name:
            found[name] = max(array, found.get(name, array), key=int)
    return found


def _pattern(names: Sequence[str]) -> str:
    """Return the narrowest pattern that all names fit; LSF takes no list of them."""
    start = "".join(letters[0] for letters in takewhile(_alike, zip(*names, strict=False)))
    return names[0] if len(names) == 1 else f"{start}*"


def _alike(letters: tuple[str, ...]) -> bool:
    return len(set(letters)) == 1
