"""Pipelines under a virtual clock: the three conditions, memory, waves, and how near to the bottleneck."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.pipeline.pipeline_plan import POLICIES, PipelineOptions
from hetctl.methods.pipeline.pipeline_plan import plan as made
from hetctl.methods.pipeline.stage_costs import Layer, LayerProfile, Links, PipelineCluster
from hetctl.methods.pipeline.throughput import (
    Pipeline,
    PipelineRun,
    StageTask,
    bottleneck_s,
    held,
    simulate_pipelines,
)
from hetctl.methods.pipeline.transfers import IN, OUT, Leg, Receiving, Traffic, Waves
from hetctl.methods.pipeline.wsp import Bounds, GlobalClock, WspClock
from hetctl.model.plan import PS_PLACEMENTS

LAYERS = LayerProfile(tuple(Layer(f"l{i}", {"a": 1.0}, {"a": 2.0}, 50, 100) for i in range(4)))
CLUSTER = PipelineCluster(
    nodes=(("a", "a"), ("a", "a")),
    memory_bytes={"a": 10**9},
    links=Links(intra_bytes_per_s=1000.0, intra_scaling=0.5, inter_latency_s=0.1, inter_s_per_byte=0.01),
)


def pipeline(*times: tuple[float, float], sync_s: float = 0.0) -> Pipeline:
    lanes = ((Leg(None, sync_s),),) if sync_s else ()
    return Pipeline(times, Traffic(push=lanes, pull=lanes))


TIMES = st.tuples(st.integers(1, 9), st.integers(1, 9)).map(lambda pair: (pair[0] / 4, pair[1] / 4))
PIPELINES = st.builds(
    lambda times, sync_s: pipeline(*times, sync_s=sync_s),
    st.lists(TIMES, min_size=1, max_size=5),
    st.sampled_from((0.0, 0.5, 7.0)),
)
BOUNDS = st.builds(Bounds, st.integers(1, 6), st.integers(0, 2))


def by_gpu(run: PipelineRun) -> list[list[StageTask]]:
    gpus = defaultdict(list)
    for number, worker in enumerate(run.workers):
        for task in worker.tasks:
            gpus[number, task.stage].append(task)
    return list(gpus.values())


def test_a_single_minibatch_passes_all_stages_alone() -> None:
    run = simulate_pipelines([pipeline((1, 2), (3, 4), (5, 6))], Bounds(1), 4)
    assert run.throughput == pytest.approx(1 / 21)
    assert run.completed_s == [[21.0, 42.0, 63.0, 84.0]]
    assert run.busy_fractions(0) == pytest.approx([3 / 21, 7 / 21, 11 / 21])


def test_passes_of_a_minibatch_follow_each_other() -> None:
    run = simulate_pipelines([pipeline((1, 2), (3, 4))], Bounds(1), 2)
    first = [(t.stage, t.backward, t.start_s, t.end_s) for t in run.workers[0].tasks if t.minibatch == 1]
    assert first == [(0, False, 0, 1), (1, False, 1, 8), (0, True, 8, 10)]


def test_one_gpu_is_never_idle() -> None:
    run = simulate_pipelines([pipeline((1, 2))], Bounds(2), 6)
    assert run.throughput == pytest.approx(1 / 3)
    assert run.busy_fractions(0) == pytest.approx([1.0])


def test_equal_virtual_workers_add_up() -> None:
    run = simulate_pipelines([pipeline((1, 2), (2, 1))] * 3, Bounds(4), 8)
    assert run.throughput == pytest.approx(3 * run.rates[0])
    assert run.throughput >= 0.95 * 3 / 3


def test_unequal_virtual_workers_run_at_the_slowest_ones_rate() -> None:
    slow, fast = pipeline((2, 2), (2, 2)), pipeline((1, 1), (1, 1))
    run = simulate_pipelines([slow, fast], Bounds(4, distance=1), 40)
    alone = simulate_pipelines([slow], Bounds(4), 40)
    assert run.rates == pytest.approx([alone.throughput] * 2, rel=0.02)
    assert run.throughput == pytest.approx(2 * alone.throughput, rel=0.02)


def test_a_wave_that_takes_long_to_send_stops_the_next_but_one() -> None:
    stages = ((1.0, 2.0), (1.0, 2.0))
    free = simulate_pipelines([pipeline(*stages)], Bounds(4), 20)
    slow = simulate_pipelines([pipeline(*stages, sync_s=20.0)], Bounds(4), 20)
    far = simulate_pipelines([pipeline(*stages, sync_s=20.0)], Bounds(4, distance=4), 40)
    assert slow.throughput < 0.5 * free.throughput
    assert slow.throughput < far.throughput <= free.throughput * (1 + 1e-9)


def test_waiting_and_idle_times_are_told_apart() -> None:
    """A wave of two minibatches on one GPU takes 6 s; its weights are there 7 s and 7 s after its end."""
    run = simulate_pipelines([pipeline((1.0, 2.0), sync_s=7.0)], Bounds(2), 3)
    assert run.completed_s == [[3.0, 6.0, 9.0, 23.0, 26.0, 40.0]]
    assert run.workers[0].waits_s == [(6.0, 20.0), (23.0, 37.0)]
    assert (run.waiting_s(0), run.idle_s(0)) == (28.0, 22.0)


def test_virtual_workers_take_turns_on_a_link() -> None:
    """The activations of both take the link from node 0 to node 1 for 2 s, in each of 3 s."""
    lines = ((OUT, 0), (IN, 1))
    receiving = Traffic((Receiving((), 0.0), Receiving(lines, 2.0)), (Receiving((), 0.0),) * 2)
    one = pipeline((0.5, 0.5), (2.5, 0.5))
    alone = simulate_pipelines([one._replace(traffic=receiving)], Bounds(3), 20)
    both = simulate_pipelines([one._replace(traffic=receiving)] * 2, Bounds(3), 20)
    assert alone.throughput == pytest.approx(1 / 3)
    assert both.throughput == pytest.approx(2 / 4, rel=0.02)


def test_too_few_waves_are_refused() -> None:
    with pytest.raises(ValueError, match="1 waves are too few"):
        simulate_pipelines([pipeline((1, 1))], Bounds(1), 1)


@given(st.lists(PIPELINES, min_size=1, max_size=3), BOUNDS)
@settings(max_examples=40, deadline=None)
def test_passes_obey_the_conditions_of_partition_scheduling(
    pipelines: list[Pipeline], bounds: Bounds
) -> None:
    run = simulate_pipelines(pipelines, bounds, 3)
    for tasks in by_gpu(run):
        assert all(one.end_s <= other.start_s for one, other in pairwise(tasks))
        for backward in (False, True):
            order = [task.minibatch for task in tasks if task.backward == backward]
            assert order == list(range(1, len(order) + 1))
    for worker in run.workers:
        ends = {(task.stage, task.minibatch, task.backward): task.end_s for task in worker.tasks}
        for task in worker.tasks:
            assert task.start_s >= task.ready_s
            if task.backward:
                assert task.ready_s >= ends[task.stage, task.minibatch, False]
            elif task.stage:
                assert task.ready_s == ends[task.stage - 1, task.minibatch, False]


# With more stages, memory lets backward passes overtake.
@given(st.lists(TIMES, min_size=1, max_size=2), BOUNDS)
@settings(max_examples=40, deadline=None)
def test_tasks_start_in_the_order_in_which_they_became_ready(
    times: list[tuple[float, float]], bounds: Bounds
) -> None:
    for tasks in by_gpu(simulate_pipelines([pipeline(*times)], bounds, 3)):
        assert [task.ready_s for task in tasks] == sorted(task.ready_s for task in tasks)


@given(PIPELINES, BOUNDS)
@settings(max_examples=40, deadline=None)
def test_memory_and_both_limits_are_kept(one: Pipeline, bounds: Bounds) -> None:
    run = simulate_pipelines([one], bounds, 4)
    capacities = held(one.passes, bounds.in_flight)
    for tasks in by_gpu(run):
        inside = 0
        for task in tasks:
            is_both = task.stage == len(one.passes) - 1
            inside += (not task.backward) - (task.backward or is_both)
            assert inside <= capacities[task.stage]
    assert len(run.completed_s[0]) <= run.end_s / bottleneck_s(one.passes) * (1 + 1e-9)
    injected = [task.start_s for task in run.workers[0].tasks if task.stage == 0 and not task.backward]
    for start_s, completed_s in zip(injected[bounds.in_flight :], run.completed_s[0], strict=False):
        assert start_s >= completed_s


@given(st.lists(TIMES, min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_enough_minibatches_in_flight_keep_the_slowest_gpu_busy(times: list[tuple[float, float]]) -> None:
    one = pipeline(*times)
    run = simulate_pipelines([one], Bounds(6 * len(times) + 1), 32)
    assert run.throughput >= 0.95 / bottleneck_s(one.passes)


@given(st.lists(PIPELINES, min_size=1, max_size=3), BOUNDS)
@settings(max_examples=40, deadline=None)
def test_minibatches_enter_as_soon_as_the_rules_of_wsp_let_them(
    pipelines: list[Pipeline], bounds: Bounds
) -> None:
    """Replay by `hetctl.methods.pipeline.wsp` of minibatches completed and sent at the time of each entry.

    A minibatch enters at the start, when another one leaves, or at the end of a pull without unnecessary
    delay. Times are quarters of seconds and sums of these, so that they are exact.
    """
    run = simulate_pipelines(pipelines, bounds, 5)
    waves_s = [times[bounds.in_flight - 1 :: bounds.in_flight] for times in run.completed_s]
    sent_s = [
        list(accumulate(ends_s, later_by(one.traffic.push_s), initial=0.0))
        for one, ends_s in zip(pipelines, waves_s, strict=True)
    ]
    for number, one in enumerate(pipelines):
        worker = run.workers[number]
        entries_s = [task.ready_s for task in worker.tasks if task.stage == 0 and not task.backward]
        pulls = {end_s: asked_s for asked_s, end_s in reversed(worker.waits_s)}
        for minibatch, entry_s in enumerate(entries_s, start=1):
            completed = sum(at_s <= entry_s for at_s in run.completed_s[number])
            sent = GlobalClock(
                tuple(sum(at_s <= entry_s - one.traffic.pull_s for at_s in those) - 1 for those in sent_s)
            )
            clock = WspClock(bounds, minibatch - 1, completed, max(sent.now, 0))
            assert clock.may_start
            before = sum(at_s < entry_s for at_s in run.completed_s[number])
            full = not WspClock(bounds, minibatch - 1, before, minibatch).may_start
            if (asked_s := pulls.pop(entry_s, None)) is not None:
                there_s = max(those[bounds.waves_needed(minibatch)] for those in sent_s)
                assert entry_s == max(asked_s, there_s) + one.traffic.pull_s
            elif minibatch > 1 and entry_s > entries_s[minibatch - 2]:
                assert full


def later_by(push_s: float) -> Callable[[float, float], float]:
    """Return when a wave has been sent: after the one before it."""
    return lambda before_s, end_s: max(before_s, end_s) + push_s


@pytest.mark.parametrize("placement", PS_PLACEMENTS)
@pytest.mark.parametrize("distance", [0, 2])
def test_a_plan_with_waves_reaches_its_predicted_throughput(placement: str, distance: int) -> None:
    waves = Waves(distance, placement)
    for policy in POLICIES:
        planned = made(LAYERS, CLUSTER, policy, PipelineOptions(waves=waves))
        run = planned.simulated(40)
        assert run.throughput == pytest.approx(planned.throughput, rel=0.02)
