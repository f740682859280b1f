"""Users' requests about members of a run: pause, resume, cancel, retry; a running job heeds them at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hetctl.app.project import Project
from hetctl.app.run.select_run import record_of, require_folder, split_names
from hetctl.model.errors import BadInputError
from hetctl.model.events import REQUESTS, Request
from hetctl.model.job import UNDER_WAY
from hetctl.model.plan import HOPPER
from hetctl.model.profile import some_of
from hetctl.model.run import RunSpec
from hetctl.model.training_progress import Progress
from hetctl.model.values import dataclass
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import RunFolder
from hetctl.storage.patience import PATIENT
from hetctl.storage.run_state import RunState, state_in

MOST_NAMED = 5
"""Largest number of members that a refusal names."""


@dataclass(frozen=True)
class RequestOutcome:
    """Effect of a request.

    Parameters
    ----------
    members : tuple of str
        Members that it concerns.
    state, reason : str
        State of the run, and what happens next, for the user.
    """

    run: str
    members: tuple[str, ...]
    want: Request
    state: str
    reason: str


def request(project: Project, names: Sequence[str], want: Request) -> RequestOutcome:
    """Record a request about members; a job that runs heeds it within two seconds, any other when it starts.

    Parameters
    ----------
    names : sequence of str
        Members of the newest run, or a run and its members.

    Raises
    ------
    BadInputError
        If the run has no such member, or one whose state does not permit it; nothing is then recorded.
    """
    with project.writing() as catalog:
        run, members = split_names(catalog.run_names(), names)
        record = record_of(catalog, run)
        spec, folder = record.spec, project.home.run(record.spec.run)
        refuse_unknown(spec, members, want.value)
        require_folder(project, record, catalog.jobs(spec.run))
        refuse_hopping(spec)
        state = state_in(folder, spec)
        _refuse_unfit(members, state.progress, want)
        write_requests(folder, state, want, members)
        state.refresh()
        done = f"{some_of(members, MOST_NAMED)} {DONE[want]}; {effect_of(record.state, state)}"
        return RequestOutcome(spec.run, members, want, record.state, done)


def refuse_unknown(spec: RunSpec, members: Sequence[str], verb: str) -> None:
    """Raise BadInputError if no member is named, or one that the run does not have."""
    known = [member.name for member in spec.ensemble.members]
    if not members:
        raise BadInputError(
            f"no member of run {spec.run} is named",
            f"name some, as in `hetctl {verb} {spec.run} {known[0]}`",
        )
    if unknown := sorted({*members} - {*known}, key=members.index):
        raise BadInputError(
            f"run {spec.run} has no member {some_of(unknown, MOST_NAMED)}",
            f"its members are {some_of(known, MOST_NAMED)}; a run has to be named before its members",
        )


def refuse_hopping(spec: RunSpec) -> None:
    """Raise BadInputError if members hop."""
    if HOPPER in spec.phases:
        raise BadInputError(
            f"members of run {spec.run} hop, and visits of one depend on those of all others",
            "`hetctl cancel` ends the whole run, and `hetctl submit` continues it",
        )


def write_requests(
    folder: RunFolder, state: RunState, want: Request, members: Sequence[str], **more: Any
) -> None:
    """Append a request about each member, with more fields, to the file that drivers read."""
    # Clocks of nodes may be ahead: the request has to come after all that the run has reported so far.
    last = state.facts.last.time if state.facts.last else 0.0
    events = EventWriter(folder.events, REQUESTS, patience=PATIENT)
    for name in members:
        events.write("request", time=max(time.time(), last), member=name, want=want.value, **more)


def effect_of(now: str, state: RunState) -> str:
    """Return who heeds a request, by the state of the run."""
    if now in UNDER_WAY:
        return "the running job heeds it at once, any other when it starts"
    return "`hetctl submit` continues the run" if state.has_work else f"the run is {now}"


def names_a_run(project: Project, names: Sequence[str]) -> bool:
    """Return true if the names are at most one, which is no member of the newest run."""
    with project.reading() as catalog:
        _, members = split_names(catalog.run_names(), names)
        if len(names) > 1 or not members:
            return not members
        return members[0] not in {member.name for member in record_of(catalog, None).spec.ensemble.members}


def _state_word(progress: Progress) -> str:
    if progress.converged or progress.failed:
        return "converged" if progress.converged else "failed"
    return progress.withheld or "active"


DONE = {
    Request.PAUSE: "paused",
    Request.RESUME: "resumed",
    Request.CANCEL: "cancelled",
    Request.RETRY: "tried again",
}
PERMITTED: Mapping[Request, tuple[str, ...]] = {
    Request.PAUSE: ("active", "paused"),
    Request.RESUME: ("active", "paused", "cancelled"),
    Request.CANCEL: ("active", "paused", "cancelled"),
    Request.RETRY: ("failed",),
}
"""States of members to which each request applies."""


def _refuse_unfit(members: Sequence[str], progress: Mapping[str, Progress], want: Request) -> None:
    """Raise BadInputError if the state of a member does not permit the request."""
    for name in members:
        if (word := _state_word(progress[name])) not in PERMITTED[want]:
            raise BadInputError(
                f"{name} is {word}; hetctl {want.value} is for members that are"
                f" {' or '.join(PERMITTED[want])}",
                f"leave {name} out" if len(members) > 1 else "`hetctl status` shows all states",
            )
