from __future__ import annotations

from typing import Any

import pytest

from hetctl.model.profile import MemberProfile
from hetctl.perf.rate_prediction import nearest_config, predicted_profile


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


def test_a_prediction_has_the_rates_seen_but_not_the_work() -> None:
    nearest = MemberProfile(
        "near", {1: 10.0, 2: 20.0}, samples=500.0, samples_per_epoch=100, seen_rates={"": {1: 5.0}}
    )
    found = predicted_profile("new", nearest)
    assert (found.member, found.predicted_from) == ("new", "near")
    assert (found.rates, found.seen_rates) == ({1: 5.0, 2: 10.0}, {})
    assert (found.samples, found.samples_per_epoch) == (None, 100)
