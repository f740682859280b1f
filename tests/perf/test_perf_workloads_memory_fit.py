from __future__ import annotations

import pytest

from hetctl.perf.workloads import gpus_left


@pytest.mark.parametrize(
    ("unfit", "fitting", "left"),
    [
        ((), (), (1, 8)),
        ((1,), (), (2, 8)),
        ((1, 2), (), (4, 8)),
        ((1, 2, 4), (), (8, 8)),
        ((1, 2, 4, 8), (), None),
        # Memory was enough on fewer GPUs: half of those on which it was not.
        ((8,), (1,), (1, 4)),
        ((8, 4), (1,), (1, 2)),
        ((8,), (1, 6), (1, 6)),
        # And on more: as few as are known to be enough.
        ((2,), (3,), (3, 8)),
        ((1, 8), (2,), (2, 4)),
        ((2,), (2,), (1, 8)),
    ],
)
def test_numbers_of_gpus_that_are_left(unfit, fitting, left) -> None:
    assert gpus_left(1, 8, unfit, fitting) == left


def test_the_largest_number_is_tried_before_a_member_fails() -> None:
    assert gpus_left(1, 6, (1, 2, 4), ()) == (6, 6)
    assert gpus_left(3, 6, (3,), ()) == (6, 6)
    assert gpus_left(3, 6, (3, 6), ()) is None
