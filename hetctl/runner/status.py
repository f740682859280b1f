"""A run as it stands: from the catalog and the run's files, changing neither."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetctl.catalog.catalog import RunRecord
from hetctl.core.codec import decode
from hetctl.core.ensemble import Member
from hetctl.core.errors import BatchSystemError
from hetctl.core.events import DRIVER, Event, read_folder
from hetctl.core.job import Job, JobState
from hetctl.core.layout import RunFolder
from hetctl.core.plan import Placement
from hetctl.core.profile import Progress
from hetctl.core.progress import events_in, progress_of
from hetctl.core.pulse import read_pulse
from hetctl.core.status import MemberStatus, RoundSpan, RunStatus, StepSpan
from hetctl.runner.collect import current_jobs
from hetctl.runner.logs import tail_of
from hetctl.runner.next_state import QUEUED, RUNNING
from hetctl.runner.project import Project
from hetctl.runner.running import record_of, settle

TRAINING = "training"
ASK_S = {"local": 0.0, "slurm": 10.0, "lsf": 10.0}
"""While a run is watched, its batch system is not asked again sooner than that."""


def run_status(project: Project, run: str | None) -> RunStatus:
    """Return the status of a run, by default the newest; asks the batch system once."""
    return RunWatch(project, run).look()


class RunWatch:
    """Looks at a run again and again; its files are read every time, the batch system is spared.

    Parameters
    ----------
    run : str or None
        By default the newest; it stays the same from look to look.
    """

    def __init__(self, project: Project, run: str | None) -> None:
        self._project, self._run = project, run
        self._seen: tuple[Sequence[Job], int] = ((), 0)
        self._answer: tuple[Sequence[Job], str] = ((), "")
        self._asked_at = -math.inf

    def look(self) -> RunStatus:
        """Return the status as it is now."""
        record, jobs = self._stored()
        if jobs and jobs[-1].state is JobState.SUBMITTING:
            settle(self._project, record.spec.run)
            record, jobs = self._stored()
        folder = self._project.home.run(record.spec.run)
        events = events_in(folder)
        news = (jobs, sum(event.kind.startswith("job_") for event in events))
        asking = time.monotonic() - self._asked_at >= ASK_S[record.spec.site.batch_system]
        if asking or news != self._seen:
            self._seen, self._asked_at = news, time.monotonic()
            self._answer = self._ask(record, jobs, folder)
        return _status(record, *self._answer, folder, events)

    def _stored(self) -> tuple[RunRecord, Sequence[Job]]:
        with self._project.reading() as catalog:
            record = record_of(catalog, self._run)
            self._run = record.spec.run
            return record, catalog.jobs(self._run)

    def _ask(self, record: RunRecord, jobs: Sequence[Job], folder: RunFolder) -> tuple[Sequence[Job], str]:
        """Return the jobs as they are, or as they were last seen and why no more is known."""
        try:
            return current_jobs(jobs, self._project.batch_system(record.spec.site), folder), ""
        except BatchSystemError as error:
            return jobs, f"state of the jobs as last seen: {error.message}"


def _status(
    record: RunRecord, jobs: Sequence[Job], note: str, folder: RunFolder, events: Sequence[Event]
) -> RunStatus:
    spec = record.spec
    progress = progress_of(spec.ensemble, events, spec.retries)
    start = min((event.time for event in events), default=record.created_at)
    alive = [job for job in jobs if not job.state.over]
    steps = _steps(folder, start, bool(alive))
    rounds = _rounds(folder, start)
    state, reason = _state(record, alive, events)
    return RunStatus(
        run=spec.run,
        ensemble=spec.ensemble.name,
        site=spec.site.name,
        device=spec.site.device,
        planner=spec.planner,
        gpus=spec.gpus,
        state=state,
        reason=note or reason,
        submitted_at=record.created_at,
        predicted_s=record.plan.predicted_makespan_s,
        measured_s=_measured_s(events, start, bool(alive)),
        members=tuple(
            _member(member, progress[member.name], record, steps, rounds, folder)
            for member in spec.ensemble.members
        ),
        rounds=rounds,
        steps=steps,
        jobs=tuple(jobs),
        history={name: member.epochs for name, member in progress.items()},
    )


def _state(record: RunRecord, alive: Sequence[Job], events: Iterable[Event]) -> tuple[str, str]:
    """Say where the run stands now; the catalog may not have been told yet."""
    if record.state not in (QUEUED, RUNNING):
        return record.state, record.reason
    if not alive:
        return "between-jobs", "`hetctl advance` submits the next job"
    started = {event.data["job"] for event in events if event.kind == "job_started"}
    if alive[-1].state is JobState.SUBMITTING:
        return QUEUED, "its submission was cut short; `hetctl advance` finds out"
    running = [job for job in alive if job.state is JobState.RUNNING and job.number in started]
    job = (running or alive)[0]
    waiting = f", job {alive[-1].batch_id} waits behind it" if alive[-1] is not job else ""
    why = f" ({job.why})" if job.why else ""
    return (RUNNING if running else QUEUED), f"job {job.batch_id}{why}{waiting}"


def _measured_s(events: Sequence[Event], start: float, alive: bool) -> float:
    if not events:
        return 0.0
    return (time.time() if alive else events[-1].time) - start


def _rounds(folder: RunFolder, start: float) -> tuple[RoundSpan, ...]:
    spans = []
    for round_folder in folder.rounds():
        events = {e.kind: e for e in read_folder(round_folder.events) if e.source == DRIVER}
        if "round_started" not in events:
            continue
        begun, ended = events["round_started"], events.get("round_ended")
        spans.append(
            RoundSpan(
                index=round_folder.index,
                job=int(begun.data["job"]),
                start_s=begun.time - start,
                end_s=ended.time - start if ended else None,
                predicted_s=float(begun.data["predicted_s"]),
                ended_by=str(ended.data["ended_by"]) if ended else None,
            )
        )
    return tuple(spans)


def _steps(folder: RunFolder, start: float, alive: bool) -> tuple[StepSpan, ...]:
    return tuple(
        span
        for round_folder in folder.rounds()
        for span in _steps_of(read_folder(round_folder.events), round_folder.index, start, alive)
    )


def _steps_of(events: Sequence[Event], index: int, start: float, alive: bool) -> Iterable[StepSpan]:
    """Pair the starts and ends of a round's steps; what a killed job left open ends with its last event."""
    driver = [event for event in events if event.source == DRIVER]
    ends = {event.data["member"]: event for event in driver if event.kind == "step_ended"}
    for begun in (event for event in driver if event.kind == "step_started"):
        member = str(begun.data["member"])
        ended = ends.get(member)
        last_s = max(e.time for e in events if e.source in (member, DRIVER)) - start
        for place in begun.data["placement"]:
            placement = decode(Placement, place)
            yield StepSpan(
                member=member,
                round=index,
                node=placement.node,
                gpus=placement.gpus,
                start_s=begun.time - start,
                end_s=ended.time - start if ended else None if alive else last_s,
                exit_code=int(ended.data["exit_code"]) if ended else None,
            )


def _member(
    member: Member,
    progress: Progress,
    record: RunRecord,
    steps: Sequence[StepSpan],
    rounds: Sequence[RoundSpan],
    folder: RunFolder,
) -> MemberStatus:
    own = [step for step in steps if step.member == member.name]
    held: dict[int, int] = defaultdict(int)
    for step in own:
        held[step.round] += len(step.gpus)
    profile = next((p for p in record.spec.profiles if p.member == member.name), None)
    forecast = next((f for f in record.plan.members if f.member == member.name), None)
    metrics = [epoch.metrics[member.stop.metric] for epoch in progress.epochs]
    state = _member_state(progress, own)
    return MemberStatus(
        member=member.name,
        state=state,
        gpus_by_round=tuple(held.get(span.index, 0) for span in rounds),
        profiled_rate=profile.rates.get(1) if profile else None,
        epochs=len(progress.epochs),
        max_epochs=member.stop.max_epochs,
        metric=member.stop.metric,
        best=_best(metrics, member.stop.mode),
        predicted_s=forecast.training_s if forecast else None,
        measured_s=_seconds(own),
        cause=progress.failed or progress.converged,
        log_tail=_last_log(folder, member.name) if progress.failed else (),
        pulse=read_pulse(folder.round(own[-1].round).pulse_of(member.name)) if state == TRAINING else None,
    )


def _member_state(progress: Progress, steps: Sequence[StepSpan]) -> str:
    if progress.failed:
        return "failed"
    if progress.converged:
        return "converged"
    return TRAINING if any(step.end_s is None for step in steps) else "waiting"


def _best(metrics: Sequence[float], mode: str) -> float | None:
    if not metrics:
        return None
    return max(metrics) if mode == "max" else min(metrics)


def _seconds(steps: Sequence[StepSpan]) -> float | None:
    """Sum over rounds; a step on several nodes counts once."""
    by_round: Mapping[int, Any] = {step.round: step for step in steps if step.end_s is not None}
    return sum(step.end_s - step.start_s for step in by_round.values()) if by_round else None


def _last_log(folder: RunFolder, member: str) -> tuple[str, ...]:
    logs = [r.log_of(member) for r in folder.rounds() if r.log_of(member).exists()]
    return tail_of(logs[-1]) if logs else ()
