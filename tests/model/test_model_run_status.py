"""Of many members those are chosen that need to be seen."""

from __future__ import annotations

import pytest

from hetctl.model.run_status import foremost

STATES = {
    **{"m0": "converged", "m1": "converged", "m2": "waiting", "m3": "waiting"},
    **{"m4": "training", "m5": "failed", "m6": "converged"},
}


@pytest.mark.parametrize(
    ("most", "chosen"),
    [
        (0, []),
        (1, ["m5"]),
        (2, ["m4", "m5"]),
        (3, ["m2", "m4", "m5"]),
        (5, ["m0", "m2", "m3", "m4", "m5"]),
        (7, list(STATES)),
        (99, list(STATES)),
    ],
)
def test_those_who_failed_come_first_then_those_in_training(most, chosen):
    found = foremost(STATES, most)
    assert list(found) == chosen
    assert found == {name: STATES[name] for name in chosen}
