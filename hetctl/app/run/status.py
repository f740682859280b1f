"""Status of a run from the catalog and the run's files, which are not changed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.app.project import Project
from hetctl.app.run.job_states import (
    claimant_in,
    current_jobs,
    ended_by_files,
    job_events,
    used_until_now,
)
from hetctl.app.run.method_status import (
    balance_histories,
    hop_spans,
    hop_status,
    pipeline_statuses,
    time_shares,
)
from hetctl.app.run.select_run import known_run, require_folder
from hetctl.app.run.view import RunView
from hetctl.catalog.stored_runs import ListedRun, RunRecord, Stamp, stamp_of, stored_jobs
from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.model.cost import energy_of
from hetctl.model.errors import BatchSystemError
from hetctl.model.events import Event, in_order
from hetctl.model.hops import HopStatus, worker_named
from hetctl.model.interpreter import frozen_afterwards
from hetctl.model.job import (
    ENDED,
    FAILED,
    FINISHED,
    STALLED,
    STOPPED,
    UNDER_WAY,
    Job,
    JobState,
    RunReason,
    run_after,
)
from hetctl.model.plan import HOPPER
from hetctl.model.run import RunSpec
from hetctl.model.run_results import RunSummary
from hetctl.model.run_status import RunStatus, foremost
from hetctl.model.searches import SearchStatus
from hetctl.model.site import Site
from hetctl.storage.patience import PATIENT
from hetctl.storage.purge import kept_files, last_uses, purge_warning
from hetctl.storage.run_files import read_live_metrics
from hetctl.storage.run_results import known_summary, noted_summary, summary_of
from hetctl.storage.run_state import RunState, state_in
from hetctl.storage.snapshot import StaleSnapshotError
from hetctl.storage.visit_fold import FoldLog, StageFold, VisitFold, totals_of


def run_status(project: Project, run: str | None, most: int | None = None) -> RunStatus:
    """Return the status of a run, by default the newest; the batch system is queried once.

    Parameters
    ----------
    most : int or None
        Largest number of members to show; None: all.
    """
    with frozen_afterwards():
        return RunWatch(project, run).poll(most)


def compared_status(project: Project, run: str | None) -> RunStatus:
    """Return the status of a run for its report.

    It has the histories of balanced batches, the staleness of pipelines, the visits of members that hop and,
    if the run has finished, simulations of it for comparison.
    """
    return RunWatch(project, run).reported()


def search_in(project: Project, status: RunStatus) -> SearchStatus | None:
    """Return the trials of a run with this status, and what matters in them; None if it has no search."""
    ensemble = known_run(project, status.run)[0].spec.ensemble
    if ensemble.search is None:
        return None
    # Imported here since most runs have no search.
    from hetctl.app.run.search_status import explained

    return explained(status, ensemble, project.home.run(status.run))


class RunWatch:
    """Repeated reading of a run's status: it reads only new data of files, and rarely queries jobs.

    Parameters
    ----------
    run : str or None
        Name of the run, by default the newest; it stays the same in all calls.
    """

    def __init__(self, project: Project, run: str | None) -> None:
        self._project, self._run = project, run
        self._known: tuple[RunRecord, Sequence[Job]] | None = None
        self._stamp: Stamp | None = None
        self._view: RunView | None = None
        self._visits: FoldLog[VisitFold] | None = None
        self._stages: FoldLog[StageFold] | None = None
        self._purge: str | None = None
        self._seen: tuple[Sequence[Job], int] = ((), 0)
        self._answer: tuple[Sequence[Job], str] = ((), "")
        self._asked_at = -math.inf

    @property
    def silent(self) -> bool:
        """True if the batch system did not answer the last query."""
        return bool(self._answer[1])

    def poll(self, most: int | None = None, order: str = "") -> RunStatus:
        """Return the present status, of at most `most` members or, by default, of all.

        Parameters
        ----------
        order : str
            One of `ORDERS`, in which the first members are chosen and come; empty: that of the ensemble, of
            the foremost.
        """
        return PATIENT.call(self._poll, most, order)

    def _poll(self, most: int | None, order: str = "") -> RunStatus:
        try:
            return self._read(most, order)
        except StaleSnapshotError:
            # The driver has replaced it meanwhile.
            self._view = None
            return self._poll(most, order)

    def _read(self, most: int | None, order: str) -> RunStatus:
        record, jobs, view = self.read(lazily=most is not None)
        news = (jobs, len(view.state.facts.jobs))
        site = record.spec.site
        interval_s = site.query_interval_s or BATCH_SYSTEMS[site.batch_system].least_query_interval_s
        asking = time.monotonic() - self._asked_at >= interval_s
        # The batch system is asked every few seconds only, or when the files have news of jobs.
        if asking or news != self._seen:
            self._seen, self._asked_at = news, time.monotonic()
            spec = record.spec
            self._answer = _asked(self._project, spec.run, spec.site, jobs, view.state.facts.jobs)
        if self._purge is None:
            self._purge = _purge_warning(self._project, record.spec, record.created_at)
        status = _status(record, *self._answer, view, most, order)
        if self._purge:
            status = replace(status, warnings=(*status.warnings, self._purge))
        if self._stages:
            status = replace(status, pipelines=pipeline_statuses(self._stages.refresh(), status.history))
        return replace(status, hops=self._hops(status, record, view)) if self._visits else status

    def read(self, *, lazily: bool = False) -> tuple[RunRecord, Sequence[Job], RunView]:
        """Return the run's record, jobs, and present view, with which later calls go on."""
        record, jobs = self._stored()
        view = self._view_of(record, lazily=lazily)
        view.refresh()
        return record, jobs, view

    def compared(self, most: int | None = None) -> RunStatus:
        """Return the present status as `poll` does, that of a finished run with its comparison."""
        from hetctl.app.run.baseline import comparison_of

        status = self.poll(most)
        record, _, view = self.read()
        spec, state = record.spec, view.state
        # Simulations know no hops, put members on one GPU that do not fit there, and give all jobs the size
        # of the last one.
        sizes = {(job.nodes, job.wall_s) for job in status.jobs}
        if HOPPER in spec.phases or spec.pipelines or len(sizes) > 1:
            return status
        first = [state.facts.first_step] if state.facts.first_step else []
        return replace(status, comparison=comparison_of(spec, state.progress, first))

    def reported(self) -> RunStatus:
        """Return the present status, with the parts that only reports have."""
        from hetctl.app.pipeline import wave_checks

        status = self.compared()
        record, _, view = self.read()
        if self._visits and status.hops:
            spans = hop_spans(self._visits.refresh().visits, _start(record, view))
            status = replace(status, hops=replace(status.hops, spans=spans))
        return replace(
            status,
            balances=balance_histories(view.folder),
            wave_checks=wave_checks(view.folder) if status.pipelines else (),
            shares=time_shares(view.folder, status.members),
        )

    def _hops(self, status: RunStatus, record: RunRecord, view: RunView) -> HopStatus:
        assert self._visits is not None
        assert record.spec.ensemble.partitions is not None
        # Each event is read once, unless visits were undone that the run's state has only counted.
        hops = view.state.hops
        totals = hops.totals if hops.is_exact else totals_of(self._visits.refresh().visits)
        open_tasks = [task for task in status.tasks if task.end_s is None and task.gpus]
        return hop_status(
            totals,
            hops.plans,
            record.spec.ensemble.partitions.count,
            _start(record, view),
            members=[member.member for member in status.members],
            ended=[name for name, progress in view.state.progress.items() if not progress.active],
            at={task.member: worker_named(task.node, task.gpus) for task in open_tasks},
        )

    def _stored(self) -> tuple[RunRecord, Sequence[Job]]:
        """Read the catalog, if it has changed since the last call."""
        stamp = stamp_of(self._project.home.catalog)
        # Seeing that its file has not changed is faster than reading the catalog of a large run.
        if self._known is None or stamp is None or stamp != self._stamp:
            self._known, self._stamp = known_run(self._project, self._run), stamp
            self._run = self._known[0].spec.run
        require_folder(self._project, *self._known)
        return self._known

    def _view_of(self, record: RunRecord, *, lazily: bool) -> RunView:
        """Return the view of the run; a new one if the run's specification has changed."""
        if self._view is None or self._view.spec != record.spec:
            folder = self._project.home.run(record.spec.run)
            self._view = RunView(folder, record.spec, record.plan, lazily=lazily)
            names = [member.name for member in record.spec.ensemble.members]
            self._visits = FoldLog(VisitFold(), folder, names) if HOPPER in record.spec.phases else None
            self._stages = (
                FoldLog(StageFold(), folder, record.spec.pipelines) if record.spec.pipelines else None
            )
        return self._view


def _purge_warning(project: Project, spec: RunSpec, created_at: float) -> str:
    """Return a warning of the site's deletion of a run's files; empty without any, or long before it."""
    purge, checkpoints = spec.site.purge, Path(spec.checkpoints)
    if not purge or not purge.takes(str(project.home.path), spec.checkpoints):
        return ""
    uses = last_uses(kept_files(project.home.run(spec.run), checkpoints))
    return purge_warning(purge, created_at, uses, time.time())


def state_and_summary(project: Project, run: ListedRun) -> tuple[str, RunSummary]:
    """Return the state of a run under way and its results as a whole.

    Those of a running job are as its driver has last noted them, at most some minutes ago.
    """
    folder = project.home.run(run.name)
    site, known = stored_jobs(project.home.catalog, run.name)
    events: Sequence[Event] = job_events(folder)
    jobs, note = _asked(project, run.name, site, known, events)
    states = {job.state for job in jobs}
    noted = noted_summary(folder) if JobState.RUNNING in states else known_summary(folder)
    if noted is None or note or JobState.UNKNOWN in states:
        # What its members have left to do may decide whether a job has ended.
        record, _ = known_run(project, run.name)
        state = state_in(folder, record.spec)
        jobs, events = _ended(record, jobs, note, state)
        noted = summary_of(state, record.spec)
    alive = [job for job in jobs if not job.state.over]
    return _state(run, alive, events)[0], noted


def _asked(
    project: Project, run: str, site: Site, jobs: Sequence[Job], events: Sequence[Event]
) -> tuple[Sequence[Job], str]:
    """Return the jobs with present states, or with the last known ones and the reason."""
    try:
        claimant = claimant_in(project.home.run(run))
        return current_jobs(jobs, project.batch_system(site), events, claimant=claimant), ""
    except BatchSystemError as error:
        # Status must work while the batch system does not: the run's files say most of it.
        return jobs, f"state of the jobs as last seen: {error.message}"


def _ended(
    record: RunRecord, jobs: Sequence[Job], note: str, state: RunState
) -> tuple[Sequence[Job], Sequence[Event]]:
    """Return the jobs, some of which have ended by the run's files, and the events that say so."""
    facts = state.facts
    events = in_order([*facts.jobs, facts.last] if facts.last else facts.jobs)
    # The script of its last job ends the run, and itself a moment later.
    is_over = record.state in (*ENDED, STOPPED, STALLED)
    return ended_by_files(jobs, events, done=not state.has_work, silent=bool(note) or is_over), events


def _start(record: RunRecord, view: RunView) -> float:
    """Return the time from which seconds of a status count, in seconds since the epoch."""
    began_at = view.state.facts.began_at
    return record.created_at if began_at is None else began_at


def _status(
    record: RunRecord, jobs: Sequence[Job], note: str, view: RunView, most: int | None, order: str
) -> RunStatus:
    spec, start = record.spec, _start(record, view)
    jobs, events = _ended(record, jobs, note, view.state)
    alive = [job for job in jobs if not job.state.over]
    # A run that has ended does not take longer, even if its last job is still ending.
    goes_on = record.state in UNDER_WAY
    training = {job.number for job in alive} if goes_on else set()
    files = [view.folder.job(job.number).live_metrics for job in alive]
    live_metrics = {name: metrics for file in files for name, metrics in read_live_metrics(file).items()}
    states = view.states(training)
    chosen = view.first(states, order, most) if order else foremost(states, most)
    state, reason = _state(record, alive, events)
    if state in (FINISHED, FAILED) and view.state.has_work:
        # A command has given it more since.
        reason = "it has more to train now; `hetctl submit` continues it"
    used = used_until_now(view.state, jobs)
    return RunStatus(
        run=spec.run,
        ensemble=spec.ensemble.name,
        site=spec.site.name,
        device=spec.site.device,
        planner=spec.planner,
        gpus=spec.gpus,
        nodes=spec.nodes,
        used=used,
        cost=spec.cost(used.node_seconds),
        predicted_cost=spec.predicted_cost,
        energy=energy_of(used.energy_j, spec.site.billing),
        state=state,
        reason=(note if goes_on or alive else "") or reason,
        submitted_at=record.created_at,
        predicted_s=spec.predicted_s,
        measured_s=_measured_s(events, start, bool(training)),
        states=states,
        jobs=tuple(jobs),
        warnings=view.warnings,
        seeds=view.seed_groups(),
        track=spec.track,
        **view.shown(chosen, start, live_metrics, training),
    )


def _state(record: RunRecord | ListedRun, alive: Sequence[Job], events: Iterable[Event]) -> tuple[str, str]:
    """Return the present state of the run, which the catalog may not have yet, and the reason."""
    if record.state not in UNDER_WAY:
        return record.state, record.reason
    if not alive:
        return run_after(record.state, RunReason.NO_JOB), "`hetctl advance` submits the next job"
    known = [job for job in alive if job.state is not JobState.SUBMITTING]
    if not known:
        return run_after(record.state, RunReason.JOB_IN_SUBMISSION), _doubt(alive[0])
    started = {event.record.job for event in events if event.kind == "job_started"}
    running = [job for job in known if job.state is JobState.RUNNING and job.number in started]
    job = (running or known)[0]
    shown = f" ({job.shown_reason})" if job.shown_reason else ""
    waits = f"job {alive[-1].batch_id} waits behind it" if alive[-1].batch_id else _doubt(alive[-1])
    behind = "" if alive[-1] is job else f", {waits}"
    reason = RunReason.DRIVER_STARTED if running else RunReason.JOB_WAITS
    return run_after(record.state, reason), f"job {job.batch_id}{shown}{behind}"


def _doubt(job: Job) -> str:
    """Return what to do about a job that the batch system may or may not have."""
    return (
        f"job {job.number} is being submitted, or that was cut short:"
        " `hetctl advance` or `hetctl submit` finds out"
    )


def _measured_s(events: Sequence[Event], start: float, under_way: bool) -> float:
    if not events:
        return 0.0
    return (time.time() if under_way else events[-1].time) - start
