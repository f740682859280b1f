from __future__ import annotations

import pytest

from hetctl.scheduling.round_scheduler import should_stop

ROOM = {"a": 8, "b": 8}


@pytest.mark.parametrize(
    ("active", "stops"),
    [({"a": 4, "b": 4}, False), ({"a": 5, "b": 3}, False), ({"a": 4, "b": 3}, True), ({"a": 1}, True)],
)
def test_stops_below_alpha_of_the_rounds_gpus(active: dict[str, int], stops: bool) -> None:
    assert should_stop(active, 10, 0.8, waiting=True, max_gpus=ROOM) is stops


def test_a_round_that_is_over_need_not_stop() -> None:
    assert not should_stop({}, 10, 0.8, waiting=True, max_gpus={})


def test_m_is_the_gpus_of_the_round_not_of_the_cluster() -> None:
    assert not should_stop({"a": 1}, 1, 0.8, waiting=True, max_gpus={"a": 1})


def test_a_round_continues_if_a_new_plan_would_change_nothing() -> None:
    active = {"a": 2, "b": 1}
    assert not should_stop(active, 10, 0.8, waiting=False, max_gpus={"a": 2, "b": 1})
    assert should_stop(active, 10, 0.8, waiting=False, max_gpus={"a": 2, "b": 2})
    assert should_stop(active, 10, 0.8, waiting=True, max_gpus={"a": 2, "b": 1})


def test_alpha_0_never_stops_and_alpha_1_stops_at_first_release() -> None:
    assert not should_stop({"a": 1}, 10, 0.0, waiting=True, max_gpus=ROOM)
    assert should_stop({"a": 9}, 10, 1.0, waiting=True, max_gpus=ROOM)
