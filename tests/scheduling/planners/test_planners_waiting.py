from __future__ import annotations

from hetctl.model.workload import Workload
from hetctl.scheduling.planners.waiting import WaitingQueue


def member(name: str, samples_left: float, rate: float = 10.0) -> Workload:
    return Workload(name, {1: rate}, samples_left)


def test_a_returning_member_precedes_those_that_arrived_later() -> None:
    queue = WaitingQueue(lambda _: 0, [member(name, 100) for name in "abc"])
    queue.take("a")
    assert [c.name for c in queue] == ["b", "c"]
    queue.add(member("a", 50))
    assert [(c.name, c.samples_left) for c in queue] == [("a", 50), ("b", 100), ("c", 100)]
    assert [c.name for c in queue.without({"b"})] == ["a", "c"]


def test_a_member_wider_than_the_backlog_joins_the_queue() -> None:
    queue = WaitingQueue(lambda _: 0, [member("a", 100)])
    assert queue.backlog(2).least_s == 10
    queue.add(Workload("wide", {4: 40.0}, 400.0))
    assert queue.widest == 4
    queue.take("wide")
    assert queue.backlog(2).least_s == 10
