"""The median rule within epochs."""

from __future__ import annotations

import pytest

from hetctl.methods.automl.trials import is_behind

AT = (2, 100)


@pytest.mark.parametrize(
    ("others", "least", "behind"),
    [
        ([[(AT, 0.4)], [(AT, 0.6)]], 2, False),
        ([[(AT, 0.3)], [(AT, 0.6)]], 2, True),
        ([[(AT, 0.3)], [(AT, 0.6)]], 3, False),
        ([[((2, 50), 0.1), ((3, 0), 0.9)]], 1, True),
        ([[((2, 50), 0.1)]], 1, False),
        ([[((2, 101), 0.1)]], 1, False),
        ([[], [((1, 900), 0.9), ((2, 100), 0.1), ((2, 900), 0.9)]], 1, True),
    ],
    ids=["at the median", "above it", "too few", "the last", "not there", "none before", "at it"],
)  # fmt: skip
def test_the_last_losses_up_to_the_point_decide(others, least, behind):
    own = [((1, 100), 0.9), (AT, 0.5)]
    assert is_behind(own, others, least) is behind
