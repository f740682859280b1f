"""Points of a profile that can change a plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.profile import Hardware, ProfilePoint, shapes_of
from hetctl.perf.profile_points import ShapeRates, shape_rates, wanted_error, worth_measuring

COUNTS = (1, 2, 4, 8)


def shape(name: str, samples: float | None, rates: dict[int, float]) -> ShapeRates:
    left = tuple(gpus for gpus in COUNTS if gpus not in rates)
    return ShapeRates(name, left, rates, samples, samples or 1.0)


def test_first_each_shape_is_measured_once() -> None:
    assert worth_measuring([shape("a", None, {}), shape("b", 9.0, {1: 1.0})], 4) == [("a", 1)]


def test_a_failed_number_of_gpus_is_followed_by_the_next() -> None:
    assert worth_measuring([ShapeRates("a", (2, 4), {})], 4) == [("a", 2)]


def test_only_members_that_take_longer_than_the_bound_are_measured_on_more() -> None:
    """On 4 GPUs 110 s of work end after 27.5 s at best: a needs more than one of them, b and c do not."""
    shapes = [shape("a", 60.0, {1: 1.0}), shape("b", 25.0, {1: 1.0}), shape("c", 25.0, {1: 1.0})]
    assert worth_measuring(shapes, 4) == [("a", 2), ("a", 4), ("a", 8)]
    shapes[1] = shape("b", 40.0, {1: 1.0})
    assert worth_measuring(shapes, 4)[3:] == [("b", 2)]


def test_nothing_is_left_once_all_end_in_time() -> None:
    """The longest has been measured on all numbers, and the other one ends in time on two GPUs."""
    shapes = [shape("a", 60.0, {1: 1.0, 2: 1.9, 4: 3.5, 8: 6.0}), shape("b", 40.0, {1: 1.0, 2: 1.9})]
    assert worth_measuring(shapes, 4) == []


def test_members_of_unknown_length_are_measured_on_all_numbers_one_after_another() -> None:
    shapes = [shape("a", None, {1: 2.0}), shape("b", None, {1: 1.0, 2: 1.9})]
    assert worth_measuring(shapes, 4) == [("a", 2), ("b", 4), ("b", 8)]
    assert worth_measuring([shape("a", None, {1: 2.0, 2: 3.8})], 4) == [("a", 4), ("a", 8)]


@given(
    st.lists(st.tuples(st.floats(1.0, 1e4), st.floats(0.1, 1e3), st.floats(0.2, 1.0)), min_size=1),
    st.integers(1, 64),
)
def test_measuring_ends_and_repeats_nothing(members: list[tuple[float, float, float]], gpus: int) -> None:
    curves = [{k: rate * k**power for k in COUNTS} for _, rate, power in members]
    known: list[dict[int, float]] = [{} for _ in members]

    def now() -> list[ShapeRates]:
        return [shape(str(i), members[i][0], rates) for i, rates in enumerate(known)]

    for _ in range(len(COUNTS) * len(members) + 1):
        if not (found := worth_measuring(now(), gpus)):
            break
        for name, count in found:
            assert count not in known[int(name)]
            known[int(name)][count] = curves[int(name)][count]
    assert not worth_measuring(now(), gpus)
    assert all(known)
    # Who is left at fewer GPUs than possible ends within the time that all work takes at least.
    bound_s = sum(
        samples / max(c[k] / k for k in COUNTS) for (samples, *_), c in zip(members, curves, strict=True)
    )
    for (samples, *_), rates in zip(members, known, strict=True):
        assert len(rates) == len(COUNTS) or samples / max(rates.values()) <= 1.04 * bound_s / gpus


def test_the_work_of_a_shape_is_that_of_all_its_members() -> None:
    stops = [StopRule(max_epochs=9, expected_epochs=epochs) for epochs in (3, 5)]
    members = [Member(f"m{i}", config={"lr": i}, stop=stop) for i, stop in enumerate(stops)]
    ensemble = Ensemble("e", "pytorch", Functions("m:i", "m:m"), tuple(members), "/nowhere")
    point = ProfilePoint("m0", 1, 10.0, "", 32, 1.0, Hardware("gpu", "", ""), samples_per_epoch=100)
    (found,) = shape_rates(ensemble, shapes_of(ensemble), [point], {("m0", 2)})
    assert found == ShapeRates("m0", (2,), {1: 10.0}, 800.0, 500.0)


def test_errors_of_many_rates_cancel_each_other_out() -> None:
    assert [wanted_error(shapes) for shapes in (1, 4, 100)] == [0.03, pytest.approx(0.06), 0.1]
