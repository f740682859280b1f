from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.workload import Workload
from hetctl.perf.bounds import Backlog, Envelope, envelope_of, fluid_bound, fluid_time

curves = st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=12).map(
    lambda values: dict(enumerate(values, start=1))
)
jobs = st.lists(st.tuples(curves, st.floats(1.0, 1e5)), min_size=1, max_size=6).map(
    lambda pairs: tuple(Workload(f"m{i}", curve, work) for i, (curve, work) in enumerate(pairs))
)
rate_curves = st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=16).map(
    lambda values: dict(enumerate(values, start=1))
)


def test_nothing_to_do_takes_no_time() -> None:
    assert fluid_bound((), 4) == 0
    assert fluid_bound((Workload("a", {1: 10.0}, 0.0),), 4) == 0


def test_one_member_that_fits_runs_at_its_best_rate() -> None:
    assert fluid_bound((Workload("a", {1: 10.0, 2: 16.0}, 320.0),), 8) == 20


def test_one_member_on_fewer_gpus_than_it_could_use() -> None:
    assert fluid_bound((Workload("a", {1: 10.0, 2: 16.0, 3: 20.0}, 320.0),), 2) == pytest.approx(20)


def test_members_share_a_gpu_in_time() -> None:
    members = (Workload("a", {1: 10.0}, 100.0), Workload("b", {1: 5.0}, 100.0))
    assert fluid_bound(members, 1) == pytest.approx(10 + 20)


def test_a_dip_in_the_curve_is_bridged_by_time_sharing() -> None:
    # Between 1 GPU at 10 and 3 GPUs at 20, two GPUs on the average are worth 15 and not the 1 measured.
    dipped = Workload("a", {1: 10.0, 2: 1.0, 3: 20.0}, 150.0)
    other = Workload("b", {1: 15.0}, 150.0)
    assert fluid_bound((dipped, other), 3) == pytest.approx(10)


def test_two_alike_members_by_hand() -> None:
    # Each has 3 of 6 GPUs on the average: halfway between the corners at 2 and 4 GPUs, 18 and 28.
    member = Workload("a", {1: 10.0, 2: 18.0, 3: 20.0, 4: 28.0}, 230.0)
    assert fluid_bound((member, replace(member, name="b")), 6) == pytest.approx(10)


@settings(deadline=None)
@given(jobs, st.integers(1, 20))
def test_more_gpus_never_take_longer(members: tuple[Workload, ...], gpus: int) -> None:
    assert fluid_bound(members, gpus + 1) <= fluid_bound(members, gpus) * (1 + 1e-9)


@settings(deadline=None)
@given(jobs, st.integers(1, 20))
def test_the_bound_is_between_the_longest_member_and_the_sum(
    members: tuple[Workload, ...], gpus: int
) -> None:
    alone = [
        member.samples_left / max(rate for m, rate in member.rates.items() if m <= gpus) for member in members
    ]
    bound = fluid_bound(members, gpus)
    assert max(alone) * (1 - 1e-9) <= bound <= sum(alone) * (1 + 1e-9)


@settings(deadline=None)
@given(jobs, st.integers(1, 20), st.floats(0.1, 10.0))
def test_twice_the_work_takes_twice_as_long(members: tuple[Workload, ...], gpus: int, factor: float) -> None:
    more = tuple(replace(member, samples_left=member.samples_left * factor) for member in members)
    assert fluid_bound(more, gpus) == pytest.approx(fluid_bound(members, gpus) * factor, rel=1e-9)


def test_an_envelope_bridges_dips_and_ends_at_the_peak() -> None:
    curve = {1: 10.0, 2: 11.0, 3: 24.0, 4: 30.0, 5: 28.0}
    assert envelope_of(curve, 8) == Envelope((0, 1, 3, 4), (0.0, 10.0, 24.0, 30.0))
    assert envelope_of(curve, 2) == Envelope((0, 1, 2), (0.0, 10.0, 11.0))


def test_superlinear_members_share_all_their_gpus_in_time() -> None:
    assert envelope_of({1: 10.0, 2: 30.0}, 8) == Envelope((0, 2), (0.0, 30.0))


def test_gpus_for_a_rate_between_corners() -> None:
    envelope = Envelope((0, 1, 3), (0.0, 10.0, 20.0))
    assert envelope.gpus_for(5.0) == (0.5, 0.1)
    assert envelope.gpus_for(10.0) == (1.0, 0.1)
    assert envelope.gpus_for(15.0) == (2.0, 0.2)
    assert envelope.gpus_for(20.0) == (3.0, 0.2)


@given(rate_curves)
def test_an_envelope_is_concave_and_above_the_curve(curve: dict[int, float]) -> None:
    envelope = envelope_of(curve, 16)
    slopes = [envelope.gpus_for(rate)[1] for rate in envelope.rates[1:]]
    assert slopes == sorted(slopes)
    for gpus, rate in curve.items():
        if rate <= envelope.highest:
            assert envelope.gpus_for(rate)[0] <= gpus + 1e-9


@given(st.lists(st.tuples(st.floats(1.0, 1e6), rate_curves), min_size=1, max_size=8), st.integers(1, 30))
def test_the_fluid_time_needs_all_gpus_or_a_member_at_its_peak(
    members: list[tuple[float, dict[int, float]]], gpus: int
) -> None:
    works = [(work, envelope_of(curve, gpus)) for work, curve in members]
    time_s = fluid_time(works, gpus)

    def needed(time_s: float) -> float:
        return sum(envelope.gpus_for(work / time_s)[0] for work, envelope in works)

    fastest = max(work / envelope.highest for work, envelope in works)
    # A curve may be so flat that the rounding of a time is worth several GPUs.
    rounding = 1e-12
    assert needed(time_s * (1 + rounding)) <= gpus * (1 + 1e-9)
    assert time_s == pytest.approx(fastest) or needed(time_s * (1 - rounding)) >= gpus * (1 - 1e-9)


@given(jobs, st.integers(1, 20), st.randoms(use_true_random=False))
def test_a_backlog_counts_as_its_members_after_every_change(
    members: tuple[Workload, ...], gpus: int, draw: random.Random
) -> None:
    backlog, there = Backlog(gpus), dict[int, Workload]()
    for _ in range(3 * len(members)):
        number = draw.randrange(len(members))
        if number in there:
            backlog.remove(number, there.pop(number))
        else:
            there[number] = members[number]
            backlog.add(number, there[number])
        expected_s = fluid_bound(list(there.values()), gpus)
        assert fluid_time([], gpus, backlog=backlog) == pytest.approx(expected_s, rel=1e-9)


def test_nothing_left_takes_no_time() -> None:
    assert fluid_time([], 4) == 0.0
