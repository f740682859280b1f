"""Parallel coordinates of the trials of a search."""

from __future__ import annotations

import re

import pytest

from hetctl.model.searches import SearchStatus, TrialStatus
from hetctl.reports.run_charts import Scale, configs_svg, configured


def search(*configs, losses=None):
    trials = [
        TrialStatus(n, f"trial-{n:03d}", "stopped", config, 4, 4, loss, loss)
        for n, (config, loss) in enumerate(zip(configs, losses or range(len(configs)), strict=True))
    ]
    return SearchStatus("r", "asha", "val_loss", "min", len(trials), None, tuple(trials))


def search_svg(found):
    return configs_svg(*configured(None, found))


def test_a_line_for_each_trial_says_what_it_is():
    found = search({"rate": 0.1, "units": 8}, {"rate": 0.001, "units": 16}, {"rate": 0.01, "units": 8})
    tips = re.findall("<title>(.*?)</title>", search_svg(found))
    # The best is drawn last, on top.
    assert [tip.split(" · ")[0] for tip in tips] == ["trial-002", "trial-001", "trial-000"]
    assert "rate=0.001" in tips[1]
    assert search_svg(found) == search_svg(found)


def test_only_keys_that_differ_have_an_axis():
    drawn = search_svg(search({"rate": 0.1, "units": 8}, {"rate": 0.2, "units": 8}))
    assert ">rate<" in drawn
    assert ">units<" not in drawn


def test_members_with_other_keys_have_a_gap():
    configs = ({"kind": "mlp", "units": 8}, {"kind": "cnn", "filters": 4}, {"kind": "cnn", "filters": 9})
    drawn = search_svg(search(*configs))
    assert all(f">{key}<" in drawn for key in ("kind", "units", "filters"))
    assert len(re.findall("<title>", drawn)) == 3


@pytest.mark.parametrize(
    "nothing",
    [
        search(),
        search({"rate": 0.1}),
        search({"rate": 0.1}, {"rate": 0.1}),
        search({"rate": 0.1}, {"rate": 0.2}, losses=[None, 1.0]),
        search({"rate": 0.1}, {"rate": 0.2}, losses=[float("nan"), 1.0]),
    ],
)
def test_what_cannot_be_compared_is_not_drawn(nothing):
    assert search_svg(nothing) is None


@pytest.mark.parametrize(
    ("values", "heights"),
    [
        ([1, 2, 3], [0, 0.5, 1]),
        ([0.001, 0.01, 0.1], [0, 0.5, 1]),
        (["a", "c", "b"], [0, 1, 0.5]),
        ([True, False, True], [1, 0, 1]),
        ([None, 4, None], [1, 0, 1]),
        ([3, 3, 3], [0.5, 0.5, 0.5]),
    ],
)
def test_values_have_heights_by_size_logarithm_or_order(values, heights):
    scale = Scale("key", values)
    assert [scale.height(value) for value in values] == pytest.approx(heights)
