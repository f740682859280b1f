"""Wave Synchronous Parallel: clocks, bounds, and the order of passes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.pipeline.wsp import (
    Bounds,
    GlobalClock,
    StageQueue,
    WspClock,
    staleness,
    violations,
)
from hetctl.model.pipelines import WaveRecord

FIGURE_1 = Bounds(in_flight=4, distance=0)


def c_local(clock: WspClock) -> int:
    """Return the local clock: a complete wave counts when the next one may continue."""
    return min(clock.waves, clock.pulled + clock.bounds.distance)


def started(clock: WspClock, count: int) -> WspClock:
    """Start so many minibatches, completing others as the local bound needs it."""
    for _ in range(count):
        if clock.started - clock.completed == clock.bounds.in_flight:
            clock = clock.complete()
        clock = clock.start()
    return clock


def test_the_bounds_of_the_worked_example() -> None:
    assert (FIGURE_1.local_staleness, FIGURE_1.global_staleness) == (3, 6)
    assert [FIGURE_1.waves_needed(minibatch) for minibatch in (7, 8, 11, 12)] == [0, 1, 1, 2]


def test_after_minibatch_4_only_5_to_7_start_without_a_pull() -> None:
    clock = started(WspClock(FIGURE_1), 7).complete()
    assert (clock.started, clock.completed, clock.waves, c_local(clock)) == (7, 4, 1, 0)
    assert clock.must_pull
    assert clock.waves_wanted == 1
    assert not clock.may_start
    with pytest.raises(ValueError, match="minibatch 8 may not start"):
        clock.start()
    pulled = clock.pull(1)
    assert (c_local(pulled), pulled.must_pull, pulled.may_start) == (1, False, True)


def test_minibatch_11_needs_wave_0_and_misses_wave_1_9_and_10() -> None:
    clock = started(started(WspClock(FIGURE_1), 7).complete().pull(1), 3)
    assert clock.started == 10
    assert (clock.complete().completed, clock.pulled) == (7, 1)
    assert clock.complete().start().started == 11
    assert not WspClock(FIGURE_1, started=10, completed=8, pulled=0).may_start


def test_the_global_clock_is_the_slowest_ones() -> None:
    servers = GlobalClock((0, 0, 0)).push(0, 0).push(0, 1).push(2, 0)
    assert servers.now == 0
    assert servers.push(1, 0).now == 1
    assert servers.push(0, 1) == servers
    with pytest.raises(ValueError, match="pushes wave 2 after 0 waves"):
        servers.push(1, 2)


def test_weights_never_get_older() -> None:
    assert WspClock(FIGURE_1, 8, 8, 2).pull(1).pulled == 2


def test_nothing_completes_before_it_starts() -> None:
    with pytest.raises(ValueError, match="no minibatch is in flight"):
        WspClock(FIGURE_1).complete()


@pytest.mark.parametrize(("in_flight", "distance"), [(0, 0), (1, -1)])
def test_wrong_bounds_are_refused(in_flight: int, distance: int) -> None:
    with pytest.raises(ValueError, match="no bounds"):
        Bounds(in_flight, distance)


def test_one_in_flight_is_naive_model_parallelism() -> None:
    bounds = Bounds(1)
    assert bounds.local_staleness == 0
    clock = WspClock(bounds).start()
    assert not clock.may_start
    assert not clock.complete().may_start
    assert clock.complete().pull(1).may_start


class Run:
    """Virtual workers whose passes, pushes and pulls happen in any order."""

    def __init__(self, bounds: Bounds, workers: int) -> None:
        self.bounds = bounds
        self.clocks = [WspClock(bounds)] * workers
        self.servers = GlobalClock((0,) * workers)
        self.underway: list[list[int]] = [[] for _ in range(workers)]
        self.used: list[WspClock] = []

    def possible(self) -> list[tuple[str, int]]:
        return [
            (move, i)
            for i, clock in enumerate(self.clocks)
            for move, can in (
                ("start", clock.may_start),
                ("complete", clock.completed < clock.started),
                ("push", bool(self.underway[i])),
                ("pull", clock.must_pull and self.servers.now >= clock.waves_wanted),
            )
            if can
        ]

    def make(self, move: str, i: int) -> None:
        clock = self.clocks[i]
        if move == "start":
            self.clocks[i] = clock.start()
            self.used.append(clock)
        elif move == "complete":
            self.clocks[i] = clock.complete()
            self.underway[i] += range(clock.waves, self.clocks[i].waves)
        elif move == "push":
            self.servers = self.servers.push(i, self.underway[i].pop(0))
        else:
            self.clocks[i] = clock.pull(self.servers.now)

    def missing(self) -> list[tuple[int, int]]:
        """Return how many of the most recent local and global updates each minibatch misses."""
        return [
            (clock.started - clock.completed, clock.started - clock.pulled * self.bounds.in_flight)
            for clock in self.used
        ]


BOUNDS = st.builds(Bounds, st.integers(1, 5), st.integers(0, 3))


@given(BOUNDS, st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_staleness_and_distance_are_bounded_in_any_order(
    bounds: Bounds, workers: int, draw: random.Random
) -> None:
    run = Run(bounds, workers)
    for _ in range(60 * workers):
        run.make(*draw.choice(run.possible()))
        assert max(map(c_local, run.clocks)) - run.servers.now <= bounds.distance
        assert max(run.servers.pushed) - run.servers.now <= bounds.distance + 1
    local, other = zip(*run.missing(), strict=True)
    assert max(local) <= bounds.local_staleness
    assert max(other) <= bounds.global_staleness


@given(BOUNDS, st.integers(2, 4))
def test_the_bounds_are_reached_where_one_waits_for_the_others(bounds: Bounds, workers: int) -> None:
    run = Run(bounds, workers)
    while first := [move for move in run.possible() if move[1] == 0]:
        run.make(*min(first, key=lambda move: move[0] != "start"))
    local, other = zip(*run.missing(), strict=True)
    assert max(local) == bounds.local_staleness
    assert max(other) == bounds.global_staleness
    assert run.clocks[0].started == bounds.global_staleness + 1
    assert run.servers.pushed[0] == bounds.distance + 1


@given(BOUNDS, st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_virtual_workers_never_deadlock(bounds: Bounds, workers: int, draw: random.Random) -> None:
    run = Run(bounds, workers)
    for _ in range(2000):
        if run.servers.now >= 4:
            return
        run.make(*draw.choice(run.possible()))
    raise AssertionError(f"stuck at {run.servers}")


def record(completed, pulled, first=9):
    return WaveRecord(1, 0, 0, 1, first, completed, pulled)


def test_minibatches_at_the_bounds_violate_nothing():
    records = [record((5, 6, 7), (1, 1, 1))]
    assert violations(records, FIGURE_1) == []
    assert staleness(records, FIGURE_1) == (FIGURE_1.local_staleness, FIGURE_1.global_staleness)


def test_older_weights_are_named_with_their_minibatch():
    assert violations([record((4, 6), (1, 1))], FIGURE_1) == [
        "epoch 1, virtual worker 0, stage 1: minibatch 9 has only 4 updates of its own"
    ]
    assert violations([record((8,), (1,), first=12)], FIGURE_1) == [
        "epoch 1, virtual worker 0, stage 1: minibatch 12 has only 1 waves of all"
    ]


def queue_of(capacity, *items):
    queue = StageQueue(capacity)
    for item in items:
        queue.add(item, backward=item.startswith("b"))
    return queue


def test_passes_start_in_the_order_in_which_they_became_ready():
    queue = queue_of(3, "f2", "b1", "f3")
    assert [queue.take() for _ in range(4)] == [(False, "f2"), (True, "b1"), (False, "f3"), None]


def test_backward_passes_overtake_when_memory_is_full():
    queue = queue_of(1, "f1", "f2", "b0", "f3")
    assert queue.take() == (False, "f1")
    assert queue.take() == (True, "b0")
    assert queue.take() is None
    queue.release()
    assert queue.take() == (False, "f2")


def test_a_wait_for_weights_holds_up_later_forward_passes():
    queue = queue_of(2, "f1", "f2", "b0")
    assert queue.take(lambda item: item != "f1") == (True, "b0")
    assert queue.take(lambda item: item != "f1") is None
    assert queue.take() == (False, "f1")
