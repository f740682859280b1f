from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hop_rules import broken_by_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.hopper.approximate import approximate
from hetctl.methods.hopper.schedule import (
    Hop,
    Schedule,
    SearchOptions,
    UnitTimes,
    in_sequence,
    lower_bound,
    visits_of,
)
from hetctl.methods.hopper.simulate import HopTrace, Outage, simulate_hops
from hetctl.methods.hopper.worker_groups import DATA_PARALLEL, HOPPER, HYBRID, estimated_costs
from hetctl.model.errors import InfeasibleError
from hetctl.model.hops import Unit

ONCE = SearchOptions(seconds=0)
"""Plans on the way are the first schedules: the same on any machine."""


@st.composite
def unit_times(draw: st.DrawFn, copies: bool = True) -> UnitTimes:
    """Return times with a first copy of partition j on worker j, and perhaps more copies."""
    configs, workers = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    seconds = np.full((configs, workers, workers), np.inf)
    for j in range(workers):
        for k in draw(st.sets(st.integers(0, workers - 1))) | {j} if copies else {j}:
            seconds[:, j, k] = draw(st.lists(st.integers(0, 9), min_size=configs, max_size=configs))
    names = [tuple(f"{letter}{i}" for i in range(n)) for letter, n in zip("cpw", seconds.shape, strict=True)]
    return UnitTimes(names[0], names[1], names[2], seconds)


def schedule_of(trace: HopTrace, units: UnitTimes, epoch: int = 0) -> Schedule:
    return Schedule(
        tuple(
            Hop(
                units.configs.index(record.visit.config),
                units.partitions.index(record.visit.partition),
                units.workers.index(record.visit.worker),
                record.start_s,
                record.end_s,
            )
            for record in trace.records
            if not record.lost and record.visit.epoch == epoch
        )
    )


@settings(max_examples=50)
@given(unit_times(), st.integers(0, 9))
def test_a_random_run_keeps_the_invariants(units, seed):
    trace = simulate_hops(units, seed=seed)
    assert broken_by_schedule(schedule_of(trace, units), units) == []
    assert simulate_hops(units, seed=seed) == trace


@settings(max_examples=50)
@given(unit_times(), st.randoms(use_true_random=False))
def test_a_schedule_is_followed(units, draw):
    sequence = [
        (i, j, draw.choice(np.flatnonzero(np.isfinite(units.seconds[i, j])).tolist()))
        for i in range(len(units.configs))
        for j in range(len(units.partitions))
    ]
    draw.shuffle(sequence)
    schedule = in_sequence(units, sequence)
    trace = simulate_hops(units, plan=visits_of(schedule, units), reschedule=draw.choice([None, ONCE]))
    assert sorted(schedule_of(trace, units).hops) == sorted(schedule.hops)
    assert trace.makespan_s == schedule.makespan_s


AWAY = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 40), st.floats(0.1, 20)), max_size=5)


@given(unit_times(), AWAY, st.booleans(), st.integers(1, 3), st.sampled_from([None, ONCE]))
def test_with_workers_that_fail_and_return_every_unit_is_done(units, away, drawn, epochs, reschedule):
    outages = [
        Outage(units.workers[k % len(units.workers)], start, start + length) for k, start, length in away
    ]
    plan = () if drawn else visits_of(schedule_of(simulate_hops(units), units), units, epochs)
    trace = simulate_hops(units, plan=plan, epochs=epochs, outages=outages, reschedule=reschedule)
    for epoch in range(epochs):
        assert broken_by_schedule(schedule_of(trace, units, epoch), units) == []
    for outage in outages:
        for record in trace.records:
            during = record.start_s < outage.end_s and record.end_s > outage.start_s
            assert not (during and record.visit.worker == outage.worker)
    for of in ("config", "worker"):
        for name in (*units.configs, *units.workers):
            records = [record for record in trace.records if getattr(record.visit, of) == name]
            assert all(earlier.end_s <= later.start_s for earlier, later in pairwise(records))
    assert len(trace.log) == epochs * len(units.configs) * len(units.partitions)


def test_a_failure_undoes_a_unit_and_another_copy_takes_it():
    seconds = np.full((1, 1, 2), 10.0)
    seconds[0, 0, 1] = 15.0
    units = UnitTimes(("a",), ("p0",), ("w0", "w1"), seconds)
    trace = simulate_hops(
        units, plan=visits_of(in_sequence(units, [(0, 0, 0)]), units), outages=[Outage("w0", 4)]
    )
    assert [(s.visit.worker, s.start_s, s.end_s, s.lost) for s in trace.records] == [
        ("w0", 0.0, 4.0, True),
        ("w1", 4.0, 19.0, False),
    ]


@pytest.mark.parametrize("away", [(0.2, 0.6), (0.0, 0.4), (0.3, 0.35)])
def test_rescheduling_beats_random_draws_and_the_old_plan(away):
    """12 configurations on 6 workers, 5 epochs; means of 6 seeds, each with another worker away."""
    drawn, kept, anew = [], [], []
    for seed in range(6):
        units = UnitTimes.from_matrix(np.random.default_rng(seed).uniform(1, 100, (12, 6)))
        plan = visits_of(approximate(units, ONCE), units, epochs=5)
        start_s, end_s = (share * 5 * lower_bound(units) for share in away)
        outages = [Outage(units.workers[seed], start_s, end_s)]
        for found, how in (
            (drawn, {}),
            (kept, {"plan": plan}),
            (anew, {"plan": plan, "reschedule": ONCE}),
        ):
            found.append(simulate_hops(units, epochs=5, seed=seed, outages=outages, **how).makespan_s)
    assert sum(anew) < sum(drawn)
    assert sum(anew) < sum(kept)


def test_a_worker_may_join_late():
    units = UnitTimes.from_matrix([[10.0, 10.0]])
    trace = simulate_hops(units, outages=[Outage("w0", 0, 30)])
    assert [(s.visit.worker, s.start_s) for s in trace.records] == [("w1", 0.0), ("w0", 30.0)]


def test_outages_that_overlap_are_one():
    units = UnitTimes.from_matrix([[10.0]])
    trace = simulate_hops(units, outages=[Outage("w0", 0, 30), Outage("w0", 20, 50), Outage("w0", 50, 60)])
    assert [record.start_s for record in trace.records] == [60.0]


def test_a_partition_that_is_lost_for_good_has_no_schedule():
    units = UnitTimes.from_matrix([[10.0, 10.0]])
    with pytest.raises(InfeasibleError, match="no worker is left with p1"):
        simulate_hops(units, outages=[Outage("w1", 5, math.inf)])


def test_a_worker_may_leave_after_its_last_unit():
    units = UnitTimes.from_matrix([[10.0, 10.0]])
    assert simulate_hops(units, outages=[Outage("w0", 25), Outage("w1", 25)]).makespan_s == 20.0


def test_there_is_no_barrier_between_epochs():
    units = UnitTimes.from_matrix([[1.0, 1.0], [10.0, 10.0]])
    trace = simulate_hops(units, epochs=2)
    starts = {(s.visit.config, s.visit.epoch): s.start_s for s in reversed(trace.records)}
    ends = {(s.visit.config, s.visit.epoch): s.end_s for s in trace.records}
    assert starts["c0", 1] < ends["c1", 0]


@given(unit_times(), AWAY, st.data())
def test_configurations_may_have_different_epochs(units, away, data):
    wanted = {config: data.draw(st.integers(0, 3)) for config in units.configs}
    outages = [Outage(units.workers[k % len(units.workers)], at, at + length) for k, at, length in away]
    trace = simulate_hops(units, epochs=wanted, outages=outages)
    assert Counter(visit.unit for visit in trace.log) == {
        (config, epoch, partition): 1
        for config, epochs in wanted.items()
        for epoch in range(epochs)
        for partition in units.partitions
    }
    for config in units.configs:
        records = [record for record in trace.records if record.visit.config == config]
        assert all(earlier.end_s <= later.start_s for earlier, later in pairwise(records))
        assert [s.visit.epoch for s in records] == sorted(s.visit.epoch for s in records)


def test_a_configuration_that_is_not_named_does_not_join():
    units = UnitTimes.from_matrix([[1.0, 1.0], [10.0, 10.0]])
    assert {visit.config for visit in simulate_hops(units, epochs={"c0": 2}).log} == {"c0"}


def orders(trace: HopTrace, of: str) -> dict[str, list[tuple[Unit, str]]]:
    """Return the visits of each configuration or worker in the order of their starts."""
    done: dict[str, list[tuple[Unit, str]]] = {}
    for record in trace.records:
        if not record.lost:
            done.setdefault(getattr(record.visit, of), []).append((record.visit.unit, record.visit.worker))
    return done


@given(unit_times(), AWAY, st.integers(1, 3), st.randoms(use_true_random=False))
def test_a_replay_of_the_starts_keeps_the_order_with_other_times(units, away, epochs, draw):
    outages = [Outage(units.workers[k % len(units.workers)], at, at + length) for k, at, length in away]
    first = simulate_hops(units, epochs=epochs, outages=outages)
    started = [record.visit for record in first.records if not record.lost]
    factors = [draw.choice((0.0, 0.5, 1.0, 4.0)) for _ in units.configs]
    others = np.where(
        np.isinf(units.seconds),
        np.inf,
        np.nan_to_num(units.seconds, posinf=0) * np.reshape(factors, (-1, 1, 1)),
    )
    slower = UnitTimes(units.configs, units.partitions, units.workers, others)
    for plan in (started, first.log):
        second = simulate_hops(slower, plan=plan, seed=1, epochs=epochs)
        assert orders(first, "config") == orders(second, "config")
        assert orders(first, "worker") == orders(second, "worker")


def first_come(units: UnitTimes) -> Schedule:
    return in_sequence(
        units, [(i, j, j) for i in range(len(units.configs)) for j in range(len(units.workers))]
    )


@pytest.mark.parametrize(("efficiency", "cheapest"), [(1.0, DATA_PARALLEL), (0.3, HOPPER)])
def test_the_cheapest_mode_depends_on_the_efficiency(efficiency, cheapest):
    """One configuration on four workers: 4 x 10 s alone, 10 s / efficiency together."""
    units = UnitTimes.from_matrix([[10.0] * 4])
    share = {1: 1.0, 2: 0.8 * efficiency, 4: 0.5 * efficiency}
    costs = estimated_costs(units, (HOPPER, HYBRID, DATA_PARALLEL), share.__getitem__, first_come)
    makespans = {one.mode: one.schedule.makespan_s for one in costs}
    assert makespans[HOPPER] == 40.0
    assert makespans[HYBRID] == makespans[DATA_PARALLEL] == pytest.approx(20.0 / efficiency)
    assert costs[0].mode in ((HYBRID, DATA_PARALLEL) if cheapest == DATA_PARALLEL else (HOPPER,))
