"""Edits of a run by its users: members that join or leave it, stop rules, next jobs; and requests.

Requests are about members: pause, resume, cancel, retry. A running job heeds edits and requests at once; a
run that has ended does so by the next ``hetctl submit``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetctl.app.project import Project
from hetctl.app.run.changes import KEPT, OF_JOBS
from hetctl.app.run.continue_run import RequestedOptions, continued, with_input
from hetctl.app.run.job_states import CONTINUES
from hetctl.app.run.lifecycle import RunTransition
from hetctl.app.run.select_run import record_of, require_folder, split_names
from hetctl.catalog.catalog import Catalog
from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.errors import BadInputError
from hetctl.model.events import REQUESTS, Request
from hetctl.model.job import UNDER_WAY
from hetctl.model.plan import HOPPER
from hetctl.model.profile import some_of
from hetctl.model.run import MemberEdit, RunSpec
from hetctl.model.serialization import encode
from hetctl.model.training_progress import Progress
from hetctl.storage.event_files import EventWriter
from hetctl.storage.kept_modules import imported_modules
from hetctl.storage.paths import RunFolder
from hetctl.storage.patience import PATIENT
from hetctl.storage.run_files import write_spec
from hetctl.storage.run_state import RunState, state_in

Edit = Callable[[Catalog, RunSpec, tuple[str, ...]], tuple[RunSpec, tuple[str, ...]]]
"""Function of a run and the named members; it returns the edited run, and the members with a request."""
OF_RUN = ("",)
"""Names of the members in a request about the run."""
AS_BEFORE = RequestedOptions()


def add_members(project: Project, names: Sequence[str], ensemble: Ensemble) -> RunTransition:
    """Add members of the ensemble, as its file is now, to a run; by default all that it does not have.

    Parameters
    ----------
    names : sequence of str
        A run, by default the newest, and members; those that were dropped return only if they are named.

    Raises
    ------
    BadInputError
        If there is no such run or member, or the run takes no more.
    """

    def edit(_catalog: Catalog, spec: RunSpec, chosen: tuple[str, ...]) -> tuple[RunSpec, tuple[str, ...]]:
        kept = {name: one for name, one in spec.edited.items() if name not in chosen or not one.dropped}
        now = _with_files(project, replace(spec, edited=kept), ensemble)
        known = {each.name for each in spec.ensemble.members}
        new = {each.name: each for each in now.ensemble.members if each.name not in known}
        if missing := [name for name in chosen if name not in new]:
            raise BadInputError(
                f"{some_of(missing, MOST_NAMED)}: no run, and no new member of the ensemble file, which has"
                f" {some_of(list(new), MOST_NAMED) or 'none'} of these for run {spec.run}",
                "add an entry to the ensemble file, or name another with --ensemble",
            )
        joining = {name: one for name, one in new.items() if name in chosen or not chosen}
        if not joining:
            raise BadInputError(
                f"run {spec.run} has all members of the ensemble file",
                "add an entry to it; a member that was dropped is added by its name",
            )
        return _joined(now, spec, joining.values()), tuple(joining)

    return _edit(project, names, Request.ADD, edit)


def add_trial(project: Project, run: str | None, trial: str, name: str | None) -> RunTransition:
    """Add a member to a run with the config of a trial, and the stop rule of the run's first member.

    Parameters
    ----------
    trial : str
        A run with a search, and a trial of it, as ``RUN:TRIAL``.
    name : str or None
        Name of the member; None: that of the trial.

    Raises
    ------
    BadInputError
        If there is no such run or trial, the trial has other code, or the run takes no more members.
    """

    def edit(catalog: Catalog, spec: RunSpec, _chosen: tuple[str, ...]) -> tuple[RunSpec, tuple[str, ...]]:
        member = _member_like(project, catalog, spec, trial, name)
        if member.name in {each.name for each in spec.ensemble.members}:
            raise BadInputError(f"run {spec.run} has a member {member.name}", "give another name with --name")
        now = replace(spec, edited={**spec.edited, member.name: MemberEdit(added=True)})
        return _joined(now, spec, (member,)), (member.name,)

    return _edit(project, [run] if run else [], Request.ADD, edit)


def drop_members(project: Project, names: Sequence[str]) -> RunTransition:
    """Take members out of a run; what they have written stays.

    Raises
    ------
    BadInputError
        If there is no such run or member, or none would be left.
    """

    def edit(_catalog: Catalog, spec: RunSpec, chosen: tuple[str, ...]) -> tuple[RunSpec, tuple[str, ...]]:
        refuse_unknown(spec, chosen, "drop")
        left = tuple(each for each in spec.ensemble.members if each.name not in chosen)
        if not left:
            raise BadInputError(
                f"run {spec.run} would have no member left", f"`hetctl cancel {spec.run}` ends it"
            )
        gone = {name: MemberEdit(dropped=True) for name in chosen}
        ensemble = replace(spec.ensemble, members=left)
        return replace(spec, ensemble=ensemble, edited={**spec.edited, **gone}), chosen

    return _edit(project, names, Request.DROP, edit)


def change_run(
    project: Project,
    names: Sequence[str],
    requested: RequestedOptions,
    rule: Mapping[str, Any],
    ensemble: Ensemble | None = None,
) -> RunTransition:
    """Change a run's next jobs, and members from now on.

    Parameters
    ----------
    names : sequence of str
        A run, by default the newest, and the members that the rule is of; by default all.
    requested : RequestedOptions
        Options of the next jobs, and retries.
    rule : mapping
        Values of keys of stop rules.
    ensemble : Ensemble or None
        The ensemble as its file is now, whose edits the members get; None: they stay as they are.

    Raises
    ------
    BadInputError
        If there is no such run or member, or a run keeps what would change.
    InfeasibleError
        If the next jobs would permit no progress.
    """

    def edit(_catalog: Catalog, spec: RunSpec, chosen: tuple[str, ...]) -> tuple[RunSpec, tuple[str, ...]]:
        if chosen:
            refuse_unknown(spec, chosen, "change")
        now = _with_files(project, spec, ensemble or spec.ensemble, requested)
        edited = {each.name: each for each in now.ensemble.members}
        members = tuple(
            edited.get(each.name, each) if not chosen or each.name in chosen else each
            for each in spec.ensemble.members
        )
        now = replace(now, ensemble=replace(now.ensemble, members=members))
        return (_with_rule(now, chosen, rule) if rule else now), OF_RUN

    return _edit(project, names, Request.CHANGE, edit, requested)


def _edit(
    project: Project,
    names: Sequence[str],
    want: Request,
    edit: Edit,
    requested: RequestedOptions = AS_BEFORE,
) -> RunTransition:
    """Edit a run; a job that runs goes on so within two seconds, any other when it starts."""
    with project.writing() as catalog:
        run, chosen = split_names(catalog.run_names(), names)
        record = record_of(catalog, run)
        spec = record.spec
        folder = require_folder(project, record, catalog.jobs(spec.run))
        state = state_in(folder, spec)
        if state.facts.edits < spec.edits:
            # A command was killed before it could tell the driver.
            write_spec(folder, spec)
            write_requests(folder, state, Request.CHANGE, OF_RUN, edits=spec.edits)
        now, named = edit(catalog, spec, chosen)
        now = replace(now, edits=spec.edits + 1)
        new, changed = continued(project, catalog, spec, now, replace(requested, modules=KEPT))
        if not changed:
            raise BadInputError(
                f"run {spec.run} has nothing to change",
                "give options, or edit the ensemble file first; `hetctl add` adds its new members",
            )
        # The modules of a later submit are its user's choice.
        given = {key: word for key, word in new.given.items() if key != "modules" or key in spec.given}
        new = replace(new, given=given)
        catalog.save_spec(new)
        write_spec(folder, new)
        write_requests(folder, state, want, named, edits=new.edits, changed=encode(changed))
        effect = effect_of(record.state, state_in(folder, new))
        if record.state in UNDER_WAY and all(one.what in OF_JOBS for one in changed):
            effect = "the next job is submitted so; one that is queued or running stays as it is"
    return RunTransition(spec.run, record.state, effect, changed=changed)


def _with_files(
    project: Project,
    spec: RunSpec,
    ensemble: Ensemble,
    requested: RequestedOptions = AS_BEFORE,
) -> RunSpec:
    """Return a run by its present files and options; the budget is not granted anew."""
    return replace(with_input(project, spec, ensemble, replace(requested, modules=KEPT)), budget=spec.budget)


def _joined(now: RunSpec, spec: RunSpec, joining: Any) -> RunSpec:
    """Return a run with more members at the end, and the others as they are."""
    return replace(now, ensemble=replace(now.ensemble, members=(*spec.ensemble.members, *joining)))


def _member_like(project: Project, catalog: Catalog, spec: RunSpec, trial: str, name: str | None) -> Member:
    run, colon, of_search = trial.partition(":")
    if not colon:
        raise BadInputError(f"{trial!r} names no trial", "give --from-trial RUN:TRIAL")
    other = record_of(catalog, run).spec
    asked = state_in(project.home.run(run), other).facts.trials.get(of_search)
    if asked is None:
        raise BadInputError(
            f"run {run} has no trial {of_search!r} that has begun", f"`hetctl search show {run}` lists them"
        )
    slot = other.ensemble.member(of_search)
    modules = imported_modules(spec.ensemble, {*spec.modules, *other.modules})
    same = all(spec.modules.get(one) == other.modules.get(one) for one in modules)
    if not same or (slot.code or other.ensemble.code) != spec.ensemble.code:
        raise BadInputError(
            f"{trial} trains with other functions, modules or data than run {spec.run}",
            "write its config into the ensemble file, and start another run with `hetctl submit --new`",
        )
    config = {**slot.config, **asked.record.config}
    # The trial's own rule ends with the epochs of its search.
    rule = spec.ensemble.members[0].stop
    return replace(slot, name=name or of_search, config=config, stop=rule, search_objective=None)


def _with_rule(spec: RunSpec, chosen: Sequence[str], rule: Mapping[str, Any]) -> RunSpec:
    """Return a run whose members, the chosen ones or all, have other values in their stop rules."""
    if spec.ensemble.search is not None:
        raise BadInputError(
            f"the search of run {spec.run} sets the epochs of its trials",
            "edit the ensemble file, and start another run with `hetctl submit --new`",
        )
    edited, members = dict(spec.edited), []
    for each in spec.ensemble.members:
        if not chosen or each.name in chosen:
            before = edited.get(each.name, MemberEdit())
            in_file = {key: before.stop.get(key, (None, getattr(each.stop, key)))[1] for key in rule}
            stop = {key: (value, in_file[key]) for key, value in rule.items()}
            edited[each.name] = replace(before, stop={**before.stop, **stop})
            each = replace(each, stop=replace(each.stop, **rule))
        members.append(each)
    return replace(spec, ensemble=replace(spec.ensemble, members=tuple(members)), edited=edited)


MOST_NAMED = 5
"""Largest number of members that a refusal names."""


def request(project: Project, names: Sequence[str], want: Request) -> RunTransition:
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
        spec = record.spec
        refuse_unknown(spec, members, want.value)
        folder = require_folder(project, record, catalog.jobs(spec.run))
        if HOPPER in spec.phases:
            raise BadInputError(
                f"members of run {spec.run} hop, and visits of one depend on those of all others",
                "`hetctl cancel` ends the whole run, and `hetctl submit` continues it",
            )
        state = state_in(folder, spec)
        _refuse_unfit(members, state.progress, want)
        write_requests(folder, state, want, members)
        state.refresh()
        done = f"{some_of(members, MOST_NAMED)} {DONE[want]}; {effect_of(record.state, state)}"
        return RunTransition(spec.run, record.state, done, members=members, want=want)


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
    return CONTINUES if state.has_work else f"the run is {now}"


def names_a_run(project: Project, names: Sequence[str]) -> bool:
    """Return true if the names are at most one, which is no member of the newest run."""
    with project.reading() as catalog:
        _, members = split_names(catalog.run_names(), names)
        if len(names) > 1 or not members:
            return not members
        return members[0] not in {member.name for member in record_of(catalog, None).spec.ensemble.members}


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
        own = progress[name]
        word = "converged" if own.converged else "failed" if own.failed else own.withheld or "active"
        if word not in PERMITTED[want]:
            raise BadInputError(
                f"{name} is {word}; hetctl {want.value} is for members that are"
                f" {' or '.join(PERMITTED[want])}",
                f"leave {name} out" if len(members) > 1 else "`hetctl status` shows all states",
            )
