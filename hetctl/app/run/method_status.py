"""Status of a run's hops, pipelines and balanced batches, and parts of its members' time, from its files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.model.errors import BadInputError
from hetctl.model.hops import (
    HopForecast,
    HopMember,
    HopStatus,
    HopWorkerUse,
    RunHopPlan,
    VisitEnd,
    numbers_by_value,
    slots_in,
)
from hetctl.model.pipelines import PipelineEpoch, PipelineStatus, pipeline_use
from hetctl.model.run_status import BalanceHistory, MemberStatus, TimeShares
from hetctl.model.training_progress import EpochResult
from hetctl.storage.event_files import read_events
from hetctl.storage.paths import RunFolder
from hetctl.storage.visit_fold import Interval, StageFold, VisitTotals, WorkerTotals


def hop_status(
    totals: Mapping[str, VisitTotals],
    plans: Sequence[RunHopPlan],
    partitions: int,
    start: float,
    *,
    members: Iterable[str],
    ended: Collection[str] = (),
    at: Mapping[str, str] | None = None,
) -> HopStatus:
    """Return the status of hops.

    Parameters
    ----------
    totals : mapping of str to VisitTotals
        Visits of the run by member.
    start : float
        Time from which seconds count, in seconds since the epoch.
    members : iterable of str
        Members to be shown.
    ended : collection of str
        Members that need no more training.
    at : mapping of str to str or None
        Workers of the visits in progress, by member.
    """
    rounds = _intervals(totals.values())
    return HopStatus(
        partitions=partitions,
        visits=sum(own.done for own in totals.values()),
        lost=sum(own.lost for own in totals.values()),
        undone=sum(own.undone for own in totals.values()),
        members=tuple(
            _member(name, totals.get(name, VisitTotals()), partitions, name in ended, (at or {}).get(name))
            for name in members
        ),
        workers=_workers(totals.values(), plans, sum(end - start for start, end in rounds.values())),
        plans=tuple(_forecast(plan, rounds, start) for plan in plans),
    )


def hop_spans(visits: Iterable[VisitEnd], start: float) -> tuple[VisitEnd, ...]:
    """Return visits in seconds from the run's start."""
    return tuple(replace(v, began_at=v.began_at - start, ended_at=v.ended_at - start) for v in visits)


def _member(name: str, own: VisitTotals, partitions: int, ended: bool, at: str | None) -> HopMember:
    present, visited = own.newest_pass, len(own.visited)
    if visited == partitions and not ended:
        present, visited = present + 1, 0
    return HopMember(
        member=name,
        epoch=present // 2 + 1,
        evaluating=present % 2 == 1,
        visited=visited,
        partitions=partitions,
        worker=at or own.last[1] or None,
        visits=own.done,
        repeated=own.lost + own.undone,
        ended=ended,
    )


def _workers(
    totals: Iterable[VisitTotals], plans: Sequence[RunHopPlan], whole_s: float
) -> tuple[HopWorkerUse, ...]:
    """Return the GPUs of all workers that a plan or a visit names; `node-10` comes after `node-9`."""
    by_gpu: defaultdict[str, list[WorkerTotals]] = defaultdict(list)
    for own in totals:
        for name, each in own.workers.items():
            for slot in slots_in(name):
                by_gpu[slot].append(each)
    names = by_gpu.keys() | {slot for plan in plans for worker in plan.workers for slot in slots_in(worker)}
    return tuple(_worker(name, by_gpu.get(name, []), whole_s) for name in sorted(names, key=numbers_by_value))


def _worker(name: str, own: Sequence[WorkerTotals], whole_s: float) -> HopWorkerUse:
    hops = sum(each.hops for each in own)
    return HopWorkerUse(
        worker=name,
        visits=sum(each.done for each in own),
        repeated=sum(each.repeated for each in own),
        gpu_busy_fraction=math.fsum(each.worked_s for each in own) / whole_s if whole_s else 0.0,
        waiting_fraction=math.fsum(each.waited_s for each in own) / whole_s if whole_s else 0.0,
        hop_s=math.fsum(each.hops_s for each in own) / hops if hops else None,
    )


def _intervals(totals: Iterable[VisitTotals]) -> dict[int, Interval]:
    """Return the time from the first to the last visit of each round: a job has one for all its visits."""
    found: dict[int, Interval] = {}
    for index, (began, ended) in (entry for own in totals for entry in own.rounds.items()):
        first, last = found.get(index, (began, ended))
        found[index] = min(first, began), max(last, ended)
    return found


def _forecast(plan: RunHopPlan, rounds: Mapping[int, Interval], start: float) -> HopForecast:
    _, last = rounds.get(plan.round, (0.0, -math.inf))
    return HopForecast(
        start_s=plan.time - start,
        scheduler=plan.scheduler,
        reason=plan.reason,
        workers=len(plan.workers),
        predicted_s=plan.predicted_s,
        lower_bound_s=plan.lower_bound_s,
        measured_s=last - plan.time if last > plan.time else None,
    )


def pipeline_statuses(
    fold: StageFold, history: Mapping[str, Sequence[EpochResult]]
) -> tuple[PipelineStatus, ...]:
    """Return the pipelines of members that train, or trained, in that mode.

    Parameters
    ----------
    history : mapping of str to sequence of EpochResult
        Finished epochs of the members to be shown.
    """
    found = (_status(name, fold, epochs) for name, epochs in history.items())
    return tuple(status for status in found if status is not None)


def _status(name: str, fold: StageFold, epochs: Iterable[EpochResult]) -> PipelineStatus | None:
    task, stages = fold.task_of(name), fold.stages_of(name)
    if task is None or task.pipeline is None:
        return None
    # After the loss of a node the layers are on other stages: the figures of the earlier ones are void.
    planned = {
        (number, index, plan.first, plan.last)
        for number, plans in enumerate(task.pipeline.workers)
        for index, plan in enumerate(plans)
    }
    last = None
    if stages and planned == {(one.virtual_worker, one.stage, *one.layers) for one in stages.stages}:
        rate = next((result.rate for result in epochs if result.epoch == stages.epoch), None)
        use = pipeline_use(stages.stages)
        last = PipelineEpoch(stages.epoch, stages.duration_s, rate, use, stages.stages)
    return PipelineStatus(name, task.pipeline, task.rate, last)


def balance_histories(folder: RunFolder) -> tuple[BalanceHistory, ...]:
    """Return the histories of all members with balanced batches, the largest gain first."""
    found = (_history(path) for path in sorted(folder.balance.glob("*.jsonl")))
    return tuple(sorted(filter(None, found), key=lambda history: -history.gain))


def _history(path: Path) -> BalanceHistory | None:
    """Return the history of one member; None for a log without iterations, or damaged on disk."""
    # Imported here, with NumPy, since most runs have no such log.
    from hetctl.methods.balance.observation_log import ManagerStart, balance_history, counted, records_in

    try:
        with path.open(encoding="utf-8") as lines:
            records = list(records_in(lines))
    except (OSError, UnicodeDecodeError, BadInputError):
        return None
    workers = [record.workers for record in records if isinstance(record, ManagerStart)]
    iterations = counted(records)
    # A member may go on with another number of workers: only the last number counts.
    same = [one for one in iterations if workers and len(one.batches) == len(workers[-1])]
    return balance_history(path.stem, workers[-1], same) if same else None


def time_shares(folder: RunFolder, members: Sequence[MemberStatus]) -> tuple[TimeShares, ...]:
    """Return the parts of the members' time, of those that have finished an epoch in rounds."""
    found = []
    for member in members:
        if not member.measured_s:
            continue
        events = list(read_events(folder.events_of(member.member), ("first_step", "epoch")))
        startup_s = sum(event.record.startup_s for event in events if event.kind == "first_step")
        # A member that resumes reports its last epoch again.
        epochs = {(e.record.epoch, e.record.finished_at): e for e in events if e.kind == "epoch"}.values()
        trained_s = sum(event.record.duration_s for event in epochs)
        if not trained_s:
            continue

        data_s, evaluate_s, save_s = (
            sum(float(event.data.get(name) or 0.0) for event in epochs)
            for name in ("data_s", "evaluate_s", "save_s")
        )
        shares = TimeShares(
            member.member,
            startup_s=startup_s,
            steps_s=max(0.0, trained_s - data_s),
            data_s=data_s,
            evaluate_s=evaluate_s,
            save_s=save_s,
            rest_s=max(0.0, member.measured_s - (startup_s + trained_s + evaluate_s + save_s)),
        )
        found.append(shares)
    return tuple(found)
