"""A run as it stands: from the catalog and the run's files, changing neither."""

from __future__ import annotations

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
from hetctl.core.status import MemberStatus, RoundSpan, RunStatus, StepSpan
from hetctl.runner.collect import current_jobs
from hetctl.runner.logs import tail_of
from hetctl.runner.project import Project
from hetctl.runner.running import QUEUED, RUNNING, record_of


def run_status(project: Project, run: str | None) -> RunStatus:
    """Return the status of a run, by default the newest; asks the batch system once."""
    with project.reading() as catalog:
        record = record_of(catalog, run)
        jobs: Sequence[Job] = catalog.jobs(record.spec.run)
    folder = project.home.run(record.spec.run)
    note = ""
    try:
        jobs = current_jobs(jobs, project.batch_system(record.spec.site), folder)
    except BatchSystemError as error:
        note = f"state of the jobs as last seen: {error.message}"
    return _status(record, jobs, folder, note)


def _status(record: RunRecord, jobs: Sequence[Job], folder: RunFolder, note: str) -> RunStatus:
    spec, events = record.spec, events_in(folder)
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
    running = alive[-1].state is JobState.RUNNING and alive[-1].number in started
    return (RUNNING if running else QUEUED), f"job {alive[-1].batch_id}"


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
    return MemberStatus(
        member=member.name,
        state=_member_state(progress, own),
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
    )


def _member_state(progress: Progress, steps: Sequence[StepSpan]) -> str:
    if progress.failed:
        return "failed"
    if progress.converged:
        return "converged"
    return "training" if any(step.end_s is None for step in steps) else "waiting"


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
