"""Rules that schedules of hops and the visits of runs must obey (CEREBRO, section 2)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter

from hetctl.methods.hopper.schedule import PRECISION, Hop, Schedule, UnitTimes
from hetctl.model.hops import DONE, VisitEnd, slots_in


def broken_by_schedule(schedule: Schedule, units: UnitTimes) -> list[str]:
    """Return messages on the violated invariants of CEREBRO, section 2; empty if there are none."""
    slack_s = PRECISION * schedule.makespan_s
    return [
        *_hops_missing(schedule, units),
        *_hops_overlap("isolation", schedule, attrgetter("config"), units.configs, slack_s),
        *_hops_overlap("exclusive access", schedule, attrgetter("worker"), units.workers, slack_s),
        *_hops_preempted(schedule, units, slack_s),
    ]


def _hops_missing(schedule: Schedule, units: UnitTimes) -> list[str]:
    """Return violations of the rule that each configuration is trained on each partition exactly once."""
    times = Counter((hop.config, hop.partition) for hop in schedule.hops)
    return [
        f"completeness: {config} visits {partition} {times[i, j]} times"
        for i, config in enumerate(units.configs)
        for j, partition in enumerate(units.partitions)
        if times[i, j] != 1
    ]


def _hops_overlap(
    rule: str, schedule: Schedule, of: Callable[[Hop], int], names: tuple[str, ...], slack_s: float
) -> list[str]:
    """Return violations of the rule that a configuration or worker has one hop at a time."""
    hops = sorted(schedule.hops, key=lambda hop: (of(hop), hop.start_s, hop.end_s))
    return [
        f"{rule}: {names[of(hop)]} starts at {later.start_s:g} s, before it has ended at {hop.end_s:g} s"
        for hop, later in pairwise(hops)
        if of(hop) == of(later) and later.start_s < hop.end_s - slack_s
    ]


def _hops_preempted(schedule: Schedule, units: UnitTimes, slack_s: float) -> list[str]:
    """Return violations of the rule that a hop takes the time of its unit, on a worker with the partition."""
    return [
        f"no preemption: {units.configs[config]} takes {units.seconds[config, partition, worker]:g} s on"
        f" {units.workers[worker]}, not from {start_s:g} to {end_s:g} s"
        for config, partition, worker, start_s, end_s in schedule.hops
        # Written with `not`, so that a NaN time counts as a violation.
        if start_s < 0 or not abs(end_s - start_s - units.seconds[config, partition, worker]) <= slack_s
    ]


def broken_by_visits(
    visits: Sequence[VisitEnd], partitions: int, epochs: Mapping[str, int], slack_s: float = 0.0
) -> list[str]:
    """Return messages on the violated invariants of CEREBRO, section 2; empty if there are none.

    Parameters
    ----------
    visits : sequence of VisitEnd
        All visits of a run.
    partitions : int
        Number of partitions.
    epochs : mapping of str to int
        Finished epochs by member. A later epoch has each of its visits at most once.
    slack_s : float
        Largest difference of the clocks of two nodes, in seconds.
    """
    done = [visit for visit in visits if visit.state == DONE]
    return [
        *_visits_missing(done, partitions, epochs),
        *_in_wrong_order(done, slack_s),
        *_visits_overlap("isolation", ((visit.member, visit) for visit in visits), slack_s),
        *_visits_overlap("exclusive access", _on_each_gpu(visits), slack_s),
        *_visits_preempted(done),
    ]


def _visits_missing(done: Sequence[VisitEnd], partitions: int, epochs: Mapping[str, int]) -> list[str]:
    """Return violations of the rule that a member visits each partition once in each pass."""
    times = Counter((visit.member, visit.hopper_epoch, visit.partition) for visit in done)
    wanted = {
        (member, epoch, partition): 1
        for member, count in epochs.items()
        for epoch in range(2 * count)
        for partition in range(partitions)
    }
    return [
        f"completeness: {member} visits partition {partition} {times[member, epoch, partition]} times in"
        f" {'evaluation' if epoch % 2 else 'training'} of epoch {epoch // 2 + 1}"
        for member, epoch, partition in sorted(wanted.keys() | times.keys())
        if times[member, epoch, partition] > 1 or (member, epoch, partition) in wanted.keys() - times.keys()
    ]


def _in_wrong_order(done: Sequence[VisitEnd], slack_s: float) -> list[str]:
    """Return violations of the rule that a member ends each pass before the next one begins."""
    return [
        f"completeness: visit {later.number} of {member} belongs to an earlier pass than visit {visit.number}"
        for member, own in _grouped((visit.member, visit) for visit in done).items()
        for visit, later in pairwise(sorted(own, key=attrgetter("began_at")))
        if later.hopper_epoch < visit.hopper_epoch and later.began_at >= visit.began_at + slack_s
    ]


def _on_each_gpu(visits: Iterable[VisitEnd]) -> Iterator[tuple[str, VisitEnd]]:
    """Yield each visit with the name of each of its GPUs, as a worker: one of a group has several."""
    for visit in visits:
        yield from ((slot, visit) for slot in slots_in(visit.worker))


def _visits_overlap(rule: str, visits: Iterable[tuple[str, VisitEnd]], slack_s: float) -> list[str]:
    """Return violations of the rule that a member or a GPU has one visit at a time."""
    return [
        f"{rule}: visit {later.number} of {name} begins before visit {visit.number} has ended"
        for name, own in _grouped(visits).items()
        for visit, later in pairwise(sorted(own, key=lambda one: (one.began_at, one.ended_at)))
        if later.began_at < visit.ended_at - slack_s
    ]


def _visits_preempted(done: Sequence[VisitEnd]) -> list[str]:
    """Return violations of the rule that a visit is one interval at one worker."""
    numbers = Counter(visit.number for visit in done)
    twice = [f"no preemption: visit {number} is {n} intervals" for number, n in numbers.items() if n > 1]
    # Written with `not`, so that a NaN time counts as a violation.
    wrong = [v for v in done if not v.ended_at >= v.began_at]
    return [*twice, *(f"no preemption: visit {visit.number} ends before it begins" for visit in wrong)]


def _grouped(pairs: Iterable[tuple[str, VisitEnd]]) -> Mapping[str, list[VisitEnd]]:
    """Return the visits of each name."""
    found: defaultdict[str, list[VisitEnd]] = defaultdict(list)
    for name, visit in pairs:
        found[name].append(visit)
    return found
