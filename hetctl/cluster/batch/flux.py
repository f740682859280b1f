"""Client of Flux, which keeps ended jobs in its memory until a site purges them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hetctl.cluster.batch.command import CommandBatch
from hetctl.model.job import JobState, JobStatus

STATES = {
    "DEPEND": JobState.PENDING,
    "PRIORITY": JobState.PENDING,
    "SCHED": JobState.PENDING,
    "RUN": JobState.RUNNING,
    "CLEANUP": JobState.RUNNING,
    "INACTIVE": JobState.FAILED,  # over, with one of the results below
}
RESULTS = {
    "COMPLETED": JobState.FINISHED,
    "FAILED": JobState.FAILED,
    "CANCELED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIMEOUT,
}

TRANSIENT = ("Unable to connect to Flux", "Connection refused", "Connection reset", "Host is down")
"""Messages of temporary failures."""

REFUSALS = (
    "Unable to connect to Flux",
    "is not a valid queue",
    "no default queue",
    "invalid Flux standard duration",
    "No such file or directory",
    "unrecognized arguments",
    "invalid choice",
    "job not found",
    "exceeds",
    "unsatisfiable",
    "submission disabled",
    "not a member of",
    "no bank",
    "invalid value",
    "usage: flux",
)
"""Parts of messages of ``flux batch`` after which no job exists; any other failure leaves a doubt."""

OVER_ALREADY = ("job is inactive", "unknown job id")

JOB_ID = re.compile(r"^[\u0192f]([1-9A-HJ-NP-Za-km-z]{1,12})\s*$", re.MULTILINE)
RECORD = "{id.f58plain}|{state}|{result}|{returncode}|{exception.type}|{exception.note}"


def jobs_command(ids: Sequence[str]) -> list[str]:
    """Return the query for jobs, those that are over included."""
    return ["flux", "jobs", "--no-header", f"--format={RECORD}", *ids]


def parse_jobs(text: str) -> dict[str, JobStatus]:
    """Parse the output of `jobs_command`, by job."""
    fields = (line.split("|", 5) for line in text.splitlines())
    return {each[0]: _status(*each[1:]) for each in fields if len(each) == 6 and JOB_ID.match(each[0])}


def find_command(name: str, *, recorded: bool) -> list[str]:
    """Return the query for the ids of this user's jobs with this name, the newest first."""
    return [
        *("flux", "jobs", *(["-a"] if recorded else []), f"--name={name}"),
        *("--no-header", "--format={id.f58plain}"),
    ]


def _status(state: str, result: str, code: str, kind: str, note: str) -> JobStatus:
    found = STATES.get(state, JobState.UNKNOWN)
    if found != JobState.FAILED:
        return JobStatus(found, None, state)
    found = RESULTS.get(result, JobState.UNKNOWN)
    ended_by_itself = found in (JobState.FINISHED, JobState.FAILED) and code.isascii() and code.isdecimal()
    return JobStatus(found, int(code[:6]) if ended_by_itself else None, f"{kind} {note}".strip() or result)


class FluxBatch(CommandBatch):
    """Flux, used through its commands."""

    refusals, transient, over = REFUSALS, TRANSIENT, OVER_ALREADY
    cancel_command = ("flux", "cancel")
    # In base 58, after a letter that depends on the locale.
    submitted, id_prefix = JOB_ID, "f"

    def _statuses(self, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        return parse_jobs(self._ask(jobs_command(ids)))

    def _find(self, names: Sequence[str], recorded: bool) -> Mapping[str, str | None]:
        """Query one name after the other, as ``flux jobs`` takes no list."""
        found = {name: self._ask(find_command(name, recorded=recorded)).split() for name in names}
        return {name: jobs[0] for name, jobs in found.items() if jobs}
