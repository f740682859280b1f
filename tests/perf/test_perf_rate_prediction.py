from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.profile import MemberProfile
from hetctl.model.training_progress import EpochResult
from hetctl.perf.rate_prediction import (
    corrected,
    estimated_levels,
    is_noteworthy,
    known_rates,
    nearest_config,
    seen_rates,
)


@pytest.mark.parametrize(
    ("wanted", "measured", "nearest"),
    [
        ({"units": 30}, {"a": {"units": 10}, "b": {"units": 40}}, "b"),
        ({"units": 30}, {"a": {"units": 10}, "b": {"units": 100}}, "a"),
        # The difference is relative: 2 is half of 4 layers, 10 a tenth of 100 units.
        (
            {"units": 100, "layers": 4},
            {"a": {"units": 100, "layers": 2}, "b": {"units": 90, "layers": 4}},
            "b",
        ),
        ({"kind": "cnn", "n": 9}, {"a": {"kind": "mlp", "n": 9}, "b": {"kind": "cnn", "n": 1}}, "b"),
        ({"kind": "cnn"}, {"a": {"kind": "mlp"}}, None),
        ({"wide": True}, {"a": {"wide": 1}, "b": {"wide": False}}, None),
        ({"n": 1}, {"a": {}, "b": {"n": 1, "m": 1}}, None),
        ({"hidden": [64, 64]}, {"a": {"hidden": [64]}, "b": {"hidden": [8, 8]}}, "b"),
        ({"hidden": []}, {"a": {"hidden": {}}}, None),
        ({"n": 0}, {"a": {"n": -1}, "b": {"n": 0.0}}, "b"),
        ({"n": 4}, {"first": {"n": 4}, "second": {"n": 4}}, "first"),
        ({"n": 4}, {}, None),
    ],
)
def test_the_nearest_config_is_by_relative_differences(
    wanted: dict[str, Any], measured: dict[str, dict[str, Any]], nearest: str | None
) -> None:
    assert nearest_config(wanted, measured) == nearest


def test_one_rate_tells_the_level_of_all_and_larger_networks_are_slower() -> None:
    units = {"a": 8, "b": 64, "c": 512}
    sizes = {name: {"config": {"units": size}, "batch_size": 32} for name, size in units.items()}
    found = estimated_levels(sizes, {"b": 1000.0})
    assert found["a"].log > math.log(1000.0) > found["c"].log
    assert found["a"].log - math.log(1000.0) == pytest.approx(math.log(1000.0) - found["c"].log, abs=0.1)
    alike = {name: {"config": {}, "batch_size": 32} for name in "ab"}
    assert estimated_levels(alike, {"a": 5e4})["b"].log == pytest.approx(math.log(5e4), abs=0.01)


def test_rates_tell_what_a_config_does_to_them() -> None:
    configs = {
        f"{kind}{units}": {"config": {"kind": kind, "units": units}, "batch_size": 32}
        for kind in ("mlp", "cnn")
        for units in (10, 20, 40, 80)
    }
    true = {
        name: {"mlp": 9e4, "cnn": 4e3}[of["config"]["kind"]] / of["config"]["units"]
        for name, of in configs.items()
    }
    known = {name: true[name] for name in ("mlp10", "mlp40", "cnn20", "cnn80")}
    found = estimated_levels(configs, known)
    assert found.keys() == configs.keys() - known.keys()
    for name, level in found.items():
        assert abs(level.log - math.log(true[name])) < 0.25
        assert level.spread < 0.7


RATES = st.floats(0.1, 1e6)


def epoch(number, rate, gpus=1, gpu_type=None, batch_size=32):
    return EpochResult(number, {}, 1.0, gpus, float(number), rate, batch_size, gpu_type)


def test_a_rate_is_the_median_of_the_last_three_epochs():
    epochs = [epoch(n, rate) for n, rate in enumerate([1.0, 500.0, 90.0, 100.0, 110.0], 1)]
    epochs += [epoch(6, 180.0, gpus=2), epoch(7, None, gpus=2)]
    assert seen_rates(epochs, 32) == {"": {1: 100.0, 2: 180.0}}


def test_epochs_of_another_batch_size_or_type_do_not_mix():
    epochs = [epoch(1, 10.0, batch_size=64), epoch(2, 20.0, gpu_type="a"), epoch(3, 30.0, gpu_type="b")]
    assert seen_rates(epochs, 32) == {"a": {1: 20.0}, "b": {1: 30.0}}


def test_unseen_rates_are_scaled_by_the_nearest_seen_one():
    profiled = {1: 100.0, 2: 180.0, 4: 320.0, 8: 500.0}
    assert corrected(profiled, {2: 90.0, 8: 500.0}) == {1: 50.0, 2: 90.0, 4: 160.0, 8: 500.0}


def test_a_rate_profiled_too_low_makes_no_other_superlinear():
    assert corrected({1: 593.0, 2: 1801.0}, {1: 1300.0}) == {1: 1300.0, 2: 2600.0}
    assert corrected({1: 100.0, 2: 250.0}, {2: 100.0}) == {1: 50.0, 2: 100.0}


def test_measured_superlinear_rate_stays():
    assert corrected({1: 100.0, 2: 250.0}, {1: 110.0}) == {1: 110.0, 2: 250.0}


@given(st.dictionaries(st.integers(1, 16), RATES, min_size=1), st.dictionaries(st.integers(1, 16), RATES))
def test_seen_rates_stand_and_others_stay_positive(profiled, seen):
    rates = corrected(profiled, seen)
    assert rates.keys() == profiled.keys() | seen.keys()
    assert all(rates[gpus] == rate for gpus, rate in seen.items())
    assert all(rate > 0 for rate in rates.values())
    assert seen or rates == profiled


def test_epochs_of_this_run_come_before_those_of_earlier_ones():
    profile = MemberProfile("m", {1: 100.0, 2: 200.0}, seen_rates={"": {1: 80.0, 2: 150.0}})
    assert known_rates(profile).rates == {1: 80.0, 2: 150.0}
    assert known_rates(profile, [epoch(1, 70.0)], 32).rates == {1: 70.0, 2: 150.0}
    assert known_rates(MemberProfile("m", {1: 100.0})) == MemberProfile("m", {1: 100.0})


def test_each_type_of_gpu_has_its_own_seen_rates():
    by_type = {"a": {1: 100.0}, "b": {1: 50.0}}
    profile = MemberProfile("m", by_type["a"], gpu_type="a", rates_by_type=by_type)
    known = known_rates(profile, [epoch(1, 40.0, gpu_type="b"), epoch(2, 90.0, gpu_type="a")], 32)
    assert (known.rates, known.rates_by_type) == ({1: 90.0}, {"a": {1: 90.0}, "b": {1: 40.0}})


def test_rates_on_several_types_at_once_are_those_of_none():
    by_type = {"a": {1: 100.0, 2: 200.0}, "b": {1: 50.0, 2: 100.0}}
    profile = MemberProfile("m", by_type["b"], gpu_type="b", rates_by_type=by_type)
    known = known_rates(profile, [epoch(2, 150.0), epoch(4, 300.0)], 32)
    assert (known.rates, known.rates_by_type) == (by_type["b"], by_type)


def test_the_pace_of_lockstep_bounds_rates_from_below():
    by_type = {"a": {1: 100.0, 2: 160.0}, "b": {1: 50.0, 2: 90.0}}
    profile = MemberProfile("m", by_type["a"], gpu_type="a", rates_by_type=by_type)
    slower = [epoch(1, 40.0, gpu_type="a"), epoch(2, 30.0, gpu_type="b")]
    known = known_rates(profile, slower, 32, in_lockstep=True)
    assert (known.rates, known.rates_by_type) == (by_type["a"], by_type)
    faster = known_rates(profile, [*slower, epoch(3, 99.0, gpus=2, gpu_type="b")], 32, in_lockstep=True)
    assert faster.rates_by_type == {"a": by_type["a"], "b": {1: pytest.approx(55.0), 2: 99.0}}


def test_lockstep_does_not_raise_rates_seen_before():
    profile = MemberProfile("m", {1: 100.0}, seen_rates={"": {1: 60.0}})
    assert known_rates(profile, [epoch(1, 50.0)], 32, in_lockstep=True).rates == {1: 60.0}
    assert known_rates(profile, [epoch(1, 80.0)], 32, in_lockstep=True).rates == {1: 80.0}


@pytest.mark.parametrize(("planned", "noteworthy"), [(100, False), (119, False), (121, True), (79, True)])
def test_more_than_a_fifth_is_noteworthy(planned, noteworthy):
    assert is_noteworthy(planned, 100.0) is noteworthy


def test_a_member_without_a_profile_has_the_rates_of_the_types_it_trained_on():
    nothing = MemberProfile("a", {})
    one = replace(nothing, seen_rates={"V100": {1: 50.0}})
    assert (known_rates(one).rates, known_rates(one).rates_by_type) == ({1: 50.0}, {})
    two = replace(nothing, seen_rates={"V100": {1: 50.0}, "A100": {2: 90.0}})
    assert known_rates(two).rates_by_type == {"V100": {1: 50.0}, "A100": {2: 90.0}}
