from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.balance.curve_manager import CurveManager
from hetctl.methods.balance.manager import Observation, equal_batches
from hetctl.methods.balance.managers import CpuManager, GpuManager
from hetctl.methods.balance.predictors import learner
from hetctl.methods.balance.predictors.learner import PREDICTORS
from hetctl.methods.balance.simulate import Conditions, iterate, phases
from hetctl.methods.balance.step_time import TimeCurve

EQUAL, BALANCED = (16, 16), (24, 8)
FAST, SLOW = TimeCurve(((10, 0.5),)), TimeCurve(((10, 1.5),))


class Recorder:
    """Manager that balances after a number of iterations and records its observations."""

    warnings = ()
    learner = None

    def __init__(self, balanced_after: int) -> None:
        self.told: list[list[Observation]] = []
        self.balanced_after = balanced_after

    @property
    def batches(self):
        return EQUAL if len(self.told) < self.balanced_after else BALANCED

    def update(self, observations):
        self.told.append(list(observations))
        return self.batches


def test_an_iteration_takes_as_long_as_the_slowest_worker():
    found = list(iterate(Recorder(2), [Conditions(0, (FAST, SLOW))], 4))
    assert [one.batches for one in found] == [EQUAL, EQUAL, BALANCED, BALANCED]
    assert [one.duration_s for one in found] == pytest.approx([2.4, 2.4, 1.2, 1.2])
    assert [one.start_s for one in found] == pytest.approx([0, 2.4, 4.8, 6.0])
    assert found[0].worker_s == pytest.approx((0.8, 2.4))


def test_networks_are_trained_between_two_iterations(monkeypatch):
    monkeypatch.setattr(learner, "LEARNS_FROM", 20)
    manager = CpuManager(EQUAL, PREDICTORS["narx"](2, 0))
    before = manager.learner.models
    for _ in iterate(manager, [Conditions(0, (FAST, SLOW))], 22):
        assert manager.learner.training is None
    assert (manager.learner.models.weights != before.weights).all()


def test_observations_have_times_and_the_share_of_memory():
    capped = TimeCurve(SLOW.points, cap=20)
    manager = Recorder(9)
    list(iterate(manager, [Conditions(0, (FAST, capped))], 1))
    ((fast, slow),) = manager.told
    assert (fast.batch, fast.memory, slow.batch, slow.memory) == (16, 0.0, 16, pytest.approx(0.76))
    assert (fast.seconds, slow.seconds) == pytest.approx((0.8, 2.4))


def test_conditions_hold_from_their_iteration_on():
    conditions = [Conditions(0, (FAST, SLOW)), Conditions(2, (SLOW, FAST)), Conditions(3, (FAST, FAST))]
    found = list(iterate(Recorder(0), conditions, 5))
    assert [one.duration_s for one in found] == pytest.approx([1.2, 1.2, 3.6, 1.2, 1.2])
    assert [(one.first, one.last) for one in phases(found, conditions)] == [(0, 1), (2, 2), (3, 4)]


def test_a_phase_is_held_against_its_limit():
    conditions = [Conditions(0, (FAST, SLOW))]
    (phase,) = phases(list(iterate(Recorder(3), conditions, 20)), conditions)
    assert (phase.first, phase.last, phase.reached_at) == (0, 19, 3)
    assert phase.best_batches == BALANCED
    assert (phase.t_star_s, phase.best_s, phase.equal_s) == pytest.approx((1.2, 1.2, 2.4))
    assert (phase.steady_s, phase.ratio) == pytest.approx((1.2, 1.0))


def test_steady_is_the_last_quarter_and_may_never_be_near():
    conditions = [Conditions(0, (FAST, SLOW))]
    (late,) = phases(list(iterate(Recorder(3), conditions, 4)), conditions)
    assert (late.ratio, late.reached_at) == (pytest.approx(1.0), 3)
    (never,) = phases(list(iterate(Recorder(9), conditions, 4)), conditions)
    assert (never.ratio, never.reached_at) == (pytest.approx(2.0), None)


def test_jitter_is_drawn_from_the_seed_and_left_out_of_the_ratio():
    conditions = [Conditions(0, (FAST, SLOW))]
    once, again, other = (list(iterate(Recorder(0), conditions, 50, 0.1, seed)) for seed in (1, 1, 2))
    assert once == again != other
    assert len({one.duration_s for one in once}) == 50
    assert [one.expected_s for one in once] == pytest.approx([1.2] * 50)
    (phase,) = phases(once, conditions)
    assert (phase.ratio, phase.reached_at) == (pytest.approx(1.0), 0)


def managers(batches, caps):
    yield CpuManager(batches, PREDICTORS["narx"](len(caps), 0), caps)
    yield GpuManager(batches, caps)
    yield CurveManager(batches, caps)


@settings(max_examples=15, deadline=None)
@given(
    workers=st.lists(
        st.tuples(st.floats(0, 1), st.floats(1, 100), st.none() | st.integers(16, 64)), min_size=1, max_size=6
    ),
    jitter=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 9),
)
def test_no_algorithm_loses_a_sample_or_takes_more_than_fits(workers, jitter, seed):
    caps = [cap for *_, cap in workers]
    curves = tuple(
        TimeCurve(((1, launch + 1 / rate), (64, launch + 64 / rate)), cap) for launch, rate, cap in workers
    )
    total = 16 * len(workers)
    for manager in managers(equal_batches(total, caps), caps):
        conditions = [Conditions(0, curves), Conditions(15, curves[::-1])] if set(caps) == {None} else []
        conditions = conditions or [Conditions(0, curves)]
        found = list(iterate(manager, conditions, 30, jitter, seed))
        assert {sum(one.batches) for one in found} == {total}
        for one in found:
            assert all(1 <= x <= (cap or total) for x, cap in zip(one.batches, caps, strict=True))
        for phase in phases(found, conditions):
            assert phase.t_star_s <= phase.best_s * (1 + 1e-9)
            assert phase.best_s <= phase.steady_s * (1 + 1e-9)
