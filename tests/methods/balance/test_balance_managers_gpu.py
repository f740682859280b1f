import pytest
from bsp_iterations import FOUR_GPUS, M60, changes, longest, play

from hetctl.methods.balance.manager import Observation
from hetctl.methods.balance.managers import GpuManager
from hetctl.methods.balance.step_time import TimeCurve, balance_time


def seen(manager, seconds, memory=None):
    memory = memory or [0.0] * len(seconds)
    return manager.update(
        [
            Observation(batch, time, memory=used)
            for batch, time, used in zip(manager.batches, seconds, memory, strict=True)
        ]
    )


FULL, FREE = 0.99, 0.5
SLOWER = (1.0, 2.0)
CASES = {
    "a window that is not full": ((32, 32), (), [(4, SLOWER)], (32, 32)),
    "a full window": ((32, 32), (), [(5, SLOWER)], (37, 27)),
    "a window that stays full": ((32, 32), (), [(6, SLOWER)], (42, 22)),
    "a reversed iteration": ((32, 32), (), [(4, SLOWER), (1, (2.0, 1.0))], (32, 32)),
    "the fastest and the slowest": ((32, 32, 32), (), [(5, (1.5, 1.0, 2.0))], (32, 37, 27)),
    "a tie before": ((32, 32), (), [(1, (1.0, 1.0)), (5, SLOWER)], (37, 27)),
    "full memories before": ((32, 32), (), [(1, SLOWER, (FULL, FREE)), (4, SLOWER)], (37, 27)),
    "a full leader": ((32, 32, 32), (), [(5, (1.0, 1.5, 2.0), (0.96, 0.95, FREE))], (32, 37, 27)),
    "a leader at its cap": ((32, 32, 32), (36, None, None), [(5, (1.0, 1.5, 2.0))], (32, 37, 27)),
    "all memories full": ((32, 32), (), [(9, SLOWER, (FULL, FULL))], (32, 32)),
    "large batches": ((128, 128), (), [(5, SLOWER)], (148, 108)),
    "large batches that oscillate": ((128, 128), (), [(5, SLOWER), (5, (2.0, 1.0))], (143, 113)),
    "small batches that tie": ((4, 4), (), [(1, (1.0, 1.0))], (4, 4)),
    "a small share of a large batch": ((240, 16), (), [(1, SLOWER)], (240, 16)),
}


@pytest.mark.parametrize(("batches", "caps", "iterations", "moved"), CASES.values(), ids=CASES)
def test_samples_move_from_the_straggler_to_the_leader(batches, caps, iterations, moved):
    manager = GpuManager(batches, caps)
    for count, *observed in iterations:
        for _ in range(count):
            seen(manager, *observed)
    assert (manager.batches, manager.warnings) == (moved, ())


def test_after_an_oscillation_steps_are_fine():
    manager = GpuManager((32, 32))
    for _ in range(5):
        seen(manager, (1.0, 2.0))
    for _ in range(19):
        assert seen(manager, (2.0, 1.0)) == (37, 27)
    assert seen(manager, (2.0, 1.0)) == (36, 28)
    assert seen(manager, (2.0, 1.0)) == (35, 29)


def test_a_straggler_that_cannot_shrink_is_warned_of_once():
    manager = GpuManager((11, 11))
    for _ in range(9):
        seen(manager, (1.0, 9.0))
    assert manager.batches == (21, 1)
    ((worker, what),) = manager.warnings
    assert worker == 1
    assert what.startswith("is the slowest with 1 samples")


def test_the_paper_s_four_gpus():
    # Section 5.2: fine steps from about iteration 30, and (89, 21, 12, 6) in the end.
    taken = play(GpuManager((32, 32, 32, 32)), FOUR_GPUS, 150)
    assert all(abs(ours - paper) <= 2 for ours, paper in zip(taken[-1], (89, 21, 12, 6), strict=True))
    assert longest(FOUR_GPUS, taken[-1]) <= 1.08 * balance_time(FOUR_GPUS, 128)
    steps = [max(taken[at][worker] - taken[at - 1][worker] for worker in range(4)) for at in changes(taken)]
    assert set(steps) == {1, 5}
    assert 15 <= changes(taken)[steps.index(1)] <= 60


def test_a_drop_of_bandwidth_is_adapted_to():
    manager = GpuManager((32, 32, 32, 32))
    play(manager, FOUR_GPUS, 150)
    before = manager.batches
    slow_m60 = TimeCurve(tuple((batch, seconds + 0.4) for batch, seconds in M60.points))
    now = (FOUR_GPUS[0], slow_m60, *FOUR_GPUS[2:])
    taken = play(manager, now, 150)
    assert taken[-1][1] < before[1]
    assert longest(now, taken[-1]) < 0.9 * longest(now, before)


def slow(manager, *per_sample):
    return seen(manager, [s * batch for s, batch in zip(per_sample, manager.batches, strict=True)])


def test_a_slowdown_after_the_balance_makes_steps_coarse_again():
    manager = GpuManager((32, 32))
    for _ in range(60):
        slow(manager, 1.0, 1.0 + 1 / 3)
    near = manager.batches
    assert near[0] - near[1] < 12
    for _ in range(14):
        slow(manager, 3.0, 1.0 + 1 / 3)
    # One at a time, after a window of 20, none would have moved yet.
    assert manager.batches[0] <= 21


@pytest.mark.parametrize("seed", range(10))
def test_a_slowdown_amid_noise_makes_steps_coarse_again(seed):
    manager = GpuManager((192, 192))
    fast, behind = TimeCurve(((1, 1.0), (200, 200.0))), TimeCurve(((1, 1.8), (200, 360.0)))
    play(manager, (fast, fast), 80, noise=0.1, seed=seed)
    taken = play(manager, (fast, behind), 40, noise=0.1, seed=seed)
    assert longest((fast, behind), taken[-1]) <= 1.15 * balance_time((fast, behind), 384)


def test_coarse_steps_after_a_slowdown_respect_caps():
    manager = GpuManager((64, 64), (None, 69))
    for _ in range(20):
        slow(manager, 1.0, 1.0)
    slow(manager, 1.0, 1.1)
    slow(manager, 1.1, 1.0)
    for _ in range(60):
        slow(manager, 4.0, 1.0)
        assert manager.batches[1] <= 69
    assert manager.batches == (59, 69)
