"""Status of a run's hops from the visits in its event files."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from hetctl.model.hop_status import HopForecast, HopMember, HopSpan, HopStatus, HopWorkerUse
from hetctl.model.run_visit import DONE, LOST, UNDONE, RunHopPlan, RunVisit

Interval = tuple[float, float]
"""Start and end in seconds since the epoch."""


def hop_status(
    visits: Sequence[RunVisit],
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
    visits : sequence of RunVisit
        All visits of the run.
    start : float
        Time from which seconds count, in seconds since the epoch.
    members : iterable of str
        Members to be shown.
    ended : collection of str
        Members that need no more training.
    at : mapping of str to str or None
        Workers of the visits in progress, by member.
    """
    by_member = _grouped((visit.member, visit) for visit in visits)
    states = [visit.state for visit in visits]
    return HopStatus(
        partitions=partitions,
        visits=states.count(DONE),
        lost=states.count(LOST),
        undone=states.count(UNDONE),
        members=tuple(
            _member(name, by_member.get(name, []), partitions, name in ended, (at or {}).get(name))
            for name in members
        ),
        workers=_workers(visits, plans),
        plans=tuple(_forecast(plan, visits, start) for plan in plans),
    )


def hop_spans(visits: Iterable[RunVisit], start: float) -> tuple[HopSpan, ...]:
    """Return visits in seconds from the run's start."""
    return tuple(
        HopSpan(
            member=visit.member,
            worker=visit.worker,
            epoch=visit.epoch,
            evaluates=visit.evaluates,
            partition=visit.partition,
            start_s=visit.began_at - start,
            end_s=visit.ended_at - start,
            done=visit.state == DONE,
        )
        for visit in visits
    )


def _member(name: str, own: Sequence[RunVisit], partitions: int, ended: bool, at: str | None) -> HopMember:
    done = [visit for visit in own if visit.state == DONE]
    present = max((visit.hopper_epoch for visit in done), default=0)
    visited = len({visit.partition for visit in done if visit.hopper_epoch == present})
    if visited == partitions and not ended:
        present, visited = present + 1, 0
    return HopMember(
        member=name,
        epoch=present // 2 + 1,
        evaluating=present % 2 == 1,
        visited=visited,
        partitions=partitions,
        worker=at or (own[-1].worker if own else None),
        visits=len(done),
        repeated=len(own) - len(done),
    )


def _workers(visits: Sequence[RunVisit], plans: Sequence[RunHopPlan]) -> tuple[HopWorkerUse, ...]:
    """Return all workers that a plan or a visit names; `node-10` comes after `node-9`."""
    by_worker = _grouped((visit.worker, visit) for visit in visits)
    names = by_worker.keys() | {worker for plan in plans for worker in plan.workers}
    whole_s = sum(end - start for start, end in _intervals(visits).values())
    return tuple(
        _worker(name, by_worker.get(name, []), whole_s) for name in sorted(names, key=_numbers_by_value)
    )


def _numbers_by_value(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() and part.isascii() else (-1, part)
        for part in re.split("([0-9]+)", name)
    ]


def _worker(name: str, own: Sequence[RunVisit], whole_s: float) -> HopWorkerUse:
    done = [visit for visit in own if visit.state == DONE]
    waited_s = math.fsum(visit.waited_s for visit in done)
    worked_s = math.fsum(visit.ended_at - visit.began_at for visit in done) - waited_s
    hops_s = [visit.hop_s for visit in done if visit.bytes]
    return HopWorkerUse(
        worker=name,
        visits=len(done),
        repeated=len(own) - len(done),
        busy=worked_s / whole_s if whole_s else 0.0,
        waiting=waited_s / whole_s if whole_s else 0.0,
        hop_s=math.fsum(hops_s) / len(hops_s) if hops_s else None,
    )


def _intervals(visits: Iterable[RunVisit]) -> dict[int, Interval]:
    """Return the time from the first to the last visit of each round: a job has one for all its visits."""
    found: dict[int, Interval] = {}
    for visit in visits:
        began, ended = found.get(visit.round, (math.inf, -math.inf))
        found[visit.round] = min(began, visit.began_at), max(ended, visit.ended_at)
    return found


def _forecast(plan: RunHopPlan, visits: Iterable[RunVisit], start: float) -> HopForecast:
    last = max((v.ended_at for v in visits if v.round == plan.round and v.ended_at > plan.time), default=None)
    return HopForecast(
        start_s=plan.time - start,
        scheduler=plan.scheduler,
        reason=plan.reason,
        workers=len(plan.workers),
        predicted_s=plan.predicted_s,
        lower_bound_s=plan.lower_bound_s,
        measured_s=None if last is None else last - plan.time,
    )


def _grouped(pairs: Iterable[tuple[str, RunVisit]]) -> Mapping[str, list[RunVisit]]:
    found: defaultdict[str, list[RunVisit]] = defaultdict(list)
    for name, visit in pairs:
        found[name].append(visit)
    return found
