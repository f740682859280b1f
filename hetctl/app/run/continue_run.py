"""Continuation of a run: unchanged except for new options and files that may change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, TypeVar

from hetctl.app.plan.job_request import job_size
from hetctl.app.plan.planning import AUTO, PlanRequest, plan_from, with_limit_of_shares, with_measurements
from hetctl.app.profile.catalog_profiles import member_profiles
from hetctl.app.project import Project
from hetctl.app.run.changes import (
    KEPT,
    MOST_NAMED,
    Change,
    changes_among,
    differences,
    refusals,
    refuse_edited_modules,
    refuse_what_is_kept,
)
from hetctl.app.run.job_states import used_until_now
from hetctl.catalog.catalog import Catalog
from hetctl.catalog.stored_runs import RunRecord
from hetctl.cluster.render.job_script import refuse_unknown_options
from hetctl.inputs.visit_times import read_run_trace
from hetctl.model.combinations import HOPS, features_of, refuse_conflicts
from hetctl.model.ensemble import Ensemble, StopRule
from hetctl.model.errors import BadInputError
from hetctl.model.job import ENDED
from hetctl.model.plan import DATA_PARALLEL, HOPPER, PIPELINE, Plan
from hetctl.model.profile import some_of
from hetctl.model.run import Budget, MemberEdit, RunSpec
from hetctl.model.serialization import decode, encode
from hetctl.model.site import Site
from hetctl.model.values import dataclass
from hetctl.storage.kept_modules import imported_modules, modules_of, revision_of
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_files import checkpoint_folder
from hetctl.storage.run_state import RunState, state_in


def check_replay(trace: Path, ensemble: Ensemble, mode: str) -> None:
    """Check a trace for a run of an ensemble; nothing is written.

    Raises
    ------
    BadInputError
        If the members do not hop or come from a search, or a line of the trace does not fit the ensemble.
    """
    refuse_conflicts(ensemble.name, "--replay", *features_of(ensemble), mode=mode)
    count = ensemble.partitions.count if ensemble.partitions else 0
    members = [member.name for member in ensemble.members]
    read_run_trace(trace, members, [f"p{number}" for number in range(count)])


def replay_now(stored: str, trace: Path | None) -> str:
    """Return the path of the stored trace if the given one has the same content, else the given path.

    Parameters
    ----------
    stored : str
        Path of the trace of a run; empty if it has none.
    trace : Path or None
        Trace that is given now; None: none is given.
    """
    if trace is None or (stored and _text(Path(stored)) == _text(trace)):
        return stored
    return str(trace)


def _text(trace: Path) -> str:
    try:
        return trace.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{trace}: cannot be read: {error}") from None


T = TypeVar("T", Ensemble, Site)


@dataclass(frozen=True)
class RequestedOptions:
    """Options given for a run; None means not given.

    Parameters
    ----------
    site : str or None
        Name or file of the site.
    nodes : int or None
        Whole nodes, in place of GPUs.
    replay : Path or None
        Trace of the visits to be repeated.
    options : mapping
        Options of the planner, as in `planners.base.Options`, without those that were not given.
    chain : int or None
        Jobs to queue at once, each behind the one before; 1: each job queues the next one when it starts.
    modules : str or None
        Modules with which the run goes on: `KEPT` or `EDITED`; None: they must not have been edited.
    """

    site: str | None = None
    account: str | None = None
    job_options: Mapping[str, str] | None = None
    launch: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    wall_s: int | None = None
    queue: str | None = None
    planner: str | None = None
    sharing: str | None = None
    mode: str | None = None
    replay: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    retries: int | None = None
    chain: int | None = None
    track: str | None = None
    modules: str | None = None
    budget: Budget = field(default_factory=Budget)

    @property
    def given(self) -> dict[str, str]:
        """Options that a run has to store, as in `RunSpec`."""
        site = self.site
        if site and ("/" in site or site.endswith(".yaml")):
            site = str(Path(site).resolve())
        named = {
            "site": site,
            "account": self.account,
            "job_options": json.dumps(self.job_options) if self.job_options else None,
            "launch": self.launch,
            "queue": self.queue,
            "planner": self.planner,
        }
        return {name: value for name, value in named.items() if value is not None}


def with_input(project: Project, spec: RunSpec, ensemble: Ensemble, requested: RequestedOptions) -> RunSpec:
    """Return the specification that a run would have with the present input, whether or not it may change so.

    Parameters
    ----------
    ensemble : Ensemble
        The ensemble as its file is now.

    Raises
    ------
    BadInputError
        If the site's file is wrong or gone, or a trace cannot be read.
    """
    site = _site_now(project, spec, requested)
    # Of the same ``auto``, the planner that was chosen for the run.
    wanted = requested.planner
    planner = spec.planner if wanted in (None, spec.given.get("planner")) else wanted
    sharing, mode = requested.sharing or spec.sharing, requested.mode or spec.mode
    # Kept modules stay kept; each further edit of others needs a new choice.
    modules = requested.modules or (KEPT if spec.given.get("modules") == KEPT else None)
    return replace(
        spec,
        ensemble=_ensemble_now(spec, ensemble),
        site=site,
        planner=planner,
        options=with_limit_of_shares(
            {**spec.options, **requested.options}, ensemble, site, planner, sharing, mode
        ),
        sharing=sharing,
        mode=mode,
        replay=replay_now(spec.replay, requested.replay),
        retries=spec.retries if requested.retries is None else requested.retries,
        track=requested.track or spec.track,
        chain=spec.chain if requested.chain is None else requested.chain == 1,
        ahead=requested.chain or spec.ahead,
        budget=replace(
            requested.budget, since=used_until_now(state_in(project.home.run(spec.run), spec), ())
        ),
        modules=spec.modules if modules == KEPT else modules_of(ensemble),
        revision=spec.revision if modules == KEPT else revision_of(Path(ensemble.folder)),
        given={**spec.given, **requested.given, **({"modules": modules} if modules else {})},
    )


def continued(
    project: Project, catalog: Catalog, spec: RunSpec, now: RunSpec, requested: RequestedOptions
) -> tuple[RunSpec, tuple[Change, ...]]:
    """Return the run's specification from now on, and its changes; nothing is written.

    Parameters
    ----------
    now : RunSpec
        Result of `with_input`.

    Raises
    ------
    BadInputError
        If anything differs that a run keeps, with a line for each difference, or if modules were edited and
        none are chosen.
    InfeasibleError
        If no queue accepts the size of the jobs, or no progress is possible in them.
    """
    site = now.site
    # Before the size: a refused edit must not be hidden by an error about queues.
    refuse_what_is_kept(differences(spec, now), spec.run)
    if not (requested.modules or now.given.get("modules") == KEPT):
        imported = imported_modules(now.ensemble, {*spec.modules, *now.modules})
        refuse_edited_modules(differences(spec, now), spec.run, imported)
        # Others, such as notes beside them, are no reason for another copy.
        now = replace(now, modules=spec.modules, revision=spec.revision)
    if HOPPER in spec.phases:
        refuse_conflicts(
            *(now.ensemble.name, HOPS, *features_of(now.ensemble)), launch=site.launch, sharing=now.sharing
        )
    gpus = requested.gpus or (requested.nodes or 0) * site.gpus_per_node or spec.gpus
    size = job_size(site, gpus, requested.wall_s or spec.wall_s, _queue_now(spec, site, requested))
    now = replace(
        _with_profiles(catalog, now),
        gpus=size.gpus,
        queue=size.queue.name,
        wall_s=size.wall_s,
        grace_s=size.grace_s,
    )
    changes = changes_among(differences(spec, now))
    # Planning takes time, and only changes of these can make progress impossible.
    if (now.site, now.gpus, now.wall_s, now.ensemble) != (spec.site, spec.gpus, spec.wall_s, spec.ensemble):
        plan_of_rest(project, catalog, now)
    return now, changes


def plan_of_rest(
    project: Project,
    catalog: Catalog,
    spec: RunSpec,
    state: RunState | None = None,
    *,
    explain: bool = False,
) -> Plan:
    """Plan the work that a run has left, as its next job will.

    Parameters
    ----------
    state : RunState or None
        Present state of the run; None: it is read.

    Raises
    ------
    InfeasibleError
        If its jobs permit no progress.
    """
    size = job_size(spec.site, spec.gpus, spec.wall_s, spec.queue)
    request = PlanRequest(
        *(spec.ensemble, spec.site, size, spec.planner, spec.options),
        explain=explain,
        sharing=spec.sharing,
        mode=_planning_mode(spec),
        profiles={profile.member: profile for profile in spec.profiles},
        progress=(state or state_in(project.home.run(spec.run), spec)).progress,
    )
    if request.mode in (AUTO, PIPELINE):
        request = with_measurements(catalog, request)
    return plan_from(request)


def has_work(folder: RunFolder, spec: RunSpec, now: RunSpec) -> bool:
    """Return true if a run has work left, or gets some by new input that it may take over.

    Parameters
    ----------
    now : RunSpec
        Result of `with_input`.
    """
    if state_in(folder, spec).has_work:
        return True
    return all(one.rule.may for one in differences(spec, now)) and state_in(folder, now).has_work


def _with_profiles(catalog: Catalog, spec: RunSpec) -> RunSpec:
    """Return a specification with the profiles of its new members."""
    known = {profile.member for profile in spec.profiles}
    if known >= {member.name for member in spec.ensemble.members}:
        return spec
    found = member_profiles(catalog, spec.ensemble, spec.site)
    return replace(spec, profiles=(*spec.profiles, *(each for each in found if each.member not in known)))


def _site_now(project: Project, spec: RunSpec, requested: RequestedOptions) -> Site:
    """Return the run's site from its present file, with the values that the user gave."""
    given = requested.job_options or json.loads(spec.given.get("job_options", "{}"))
    site = _as_stored(project.site(requested.site or spec.given.get("site") or spec.site.name))
    site = replace(
        site,
        account=requested.account or spec.given.get("account") or site.account,
        job_options={**site.job_options, **given},
        launch=requested.launch or spec.given.get("launch") or site.launch,
    )
    # Before the next job is rendered, by a script that nobody watches.
    refuse_unknown_options(site)
    return site


def _queue_now(spec: RunSpec, site: Site, requested: RequestedOptions) -> str:
    """Return the given queue, or else the site file's if it was edited since, or else the run's."""
    usual = next(iter(site.wanted_queues), spec.queue)
    edited = site.queue != spec.site.queue and "queue" not in spec.given
    return requested.queue or (usual if edited else spec.queue)


def _ensemble_now(spec: RunSpec, now: Ensemble) -> Ensemble:
    """Return the ensemble as a run would store it, as commands have edited it, in the run's order.

    Paths to the same place count as equal: a home may have other names on other login nodes.
    """
    now, then = _as_stored(now), spec.ensemble
    known = {member.name: member for member in then.members}
    order = {name: position for position, name in enumerate(known)}
    named = {member.name for member in now.members}
    added = [known[name] for name, edit in spec.edited.items() if edit.added and name in known.keys() - named]
    members = (
        replace(
            member,
            layers=_same_place(known[member.name].layers, member.layers)
            if member.name in known
            else member.layers,
            stop=_rule_now(member.stop, spec.edited.get(member.name, MemberEdit())),
        )
        for member in (*now.members, *added)
        if not spec.edited.get(member.name, MemberEdit()).dropped
    )
    return replace(
        now,
        members=tuple(sorted(members, key=lambda member: order.get(member.name, len(order)))),
        folder=_same_place(then.folder, now.folder) or now.folder,
        data=_same_place(then.data, now.data),
    )


def _rule_now(rule: StopRule, edit: MemberEdit) -> StopRule:
    """Return the stop rule of a file, with the edits by commands since which the file has not changed."""
    edits = {key: now for key, (now, in_file) in edit.stop.items() if getattr(rule, key) == in_file}
    return replace(rule, **edits)


def _same_place(then: str | None, now: str | None) -> str | None:
    if then is None or now is None or not (Path(then).exists() and Path(now).exists()):
        return now
    # Compared by device and inode: automounters and symbolic links give a folder several names.
    return then if Path(then).samefile(now) else now


def _as_stored(value: T) -> T:
    """Return a value as read from ``run.json``, which has only text keys and one type of sequence."""
    return decode(type(value), json.loads(json.dumps(encode(value))))


def _planning_mode(spec: RunSpec) -> str:
    """Return the mode whose plans follow the same rule as the run's jobs."""
    if len(spec.phases) == 1:
        return spec.phases[0] if spec.phases[0] in (HOPPER, PIPELINE) else DATA_PARALLEL
    return AUTO


ANOTHER = "`hetctl submit --new` starts another run"
MORE = "a larger max_epochs or patience, another target, or more members continue it"
MORE_OF_FAILED = f"a larger --retries, {MORE.removeprefix('a ')}"


@dataclass(frozen=True)
class Choice:
    """Choice of a run.

    Parameters
    ----------
    run : str or None
        Run that continues; None: another one starts.
    note : str
        Reason, and how to get the other; empty if there is no choice.
    """

    run: str | None
    note: str = ""


def choose_run(project: Project, ensemble: Ensemble, requested: RequestedOptions) -> Choice:
    """Choose the newest run of an ensemble if it has work left, or gets some by what was edited or given.

    Parameters
    ----------
    ensemble : Ensemble
        The ensemble as its file is now.
    """
    if not project.home.catalog.exists():
        return Choice(None)
    with project.reading() as catalog:
        record = catalog.newest_run(ensemble.name)
    if record is None:
        return Choice(None)
    run = record.spec.run
    if record.state not in ENDED:
        return Choice(run, ANOTHER)
    if obstacle := _obstacle(project, record, ensemble, requested):
        return Choice(None, f"run {run} is {record.state} and does not continue: {obstacle}")
    return Choice(run, f"it was {record.state}, and has more to train now; {ANOTHER}")


def _obstacle(project: Project, record: RunRecord, ensemble: Ensemble, requested: RequestedOptions) -> str:
    """Return why a run that has ended does not continue; empty if it does."""
    spec, folder = record.spec, project.home.run(record.spec.run)
    if not folder.spec.exists():
        return f"its folder {folder.path} is gone"
    try:
        now = with_input(project, spec, ensemble, requested)
    except BadInputError as error:
        return error.message
    if kept := refusals(differences(spec, now), spec.run):
        return "; ".join(kept)
    state = state_in(folder, now)
    progress = state.progress
    if not state.has_work:
        failed = any(member.failed for member in progress.values())
        return f"it has nothing left to train; {MORE_OF_FAILED if failed else MORE}"
    trained = [name for name, member in progress.items() if member.active and member.epochs]
    gone = [name for name in trained if not checkpoint_folder(now, name).exists()]
    return f"the checkpoints of {some_of(gone, MOST_NAMED)} are gone" if gone else ""
