"""Course and gain of a real run's balancing."""

from __future__ import annotations

import pytest

from hetctl.methods.balance.manager import Observation
from hetctl.methods.balance.managers import manager_of
from hetctl.methods.balance.observation_log import logged
from hetctl.methods.balance.progress import POINTS, course_of
from hetctl.model.training_settings import ON, BalanceSettings

PER_SAMPLE_S = (0.001, 0.002, 0.004)
T_STAR_S = 0.005 + 96 / sum(1 / s for s in PER_SAMPLE_S)
WORKERS = ("a:0", "b:0", "c:0")


def trained(count):
    manager = manager_of(BalanceSettings(ON, "curve"), (32, 32, 32))
    for number in range(count):
        pairs = zip(manager.batches, PER_SAMPLE_S, strict=True)
        seen = [Observation(batch, 0.005 + s * batch) for batch, s in pairs]
        yield logged(float(number), seen, manager.update(seen))


@pytest.mark.parametrize("count", [1, 60, 1000])
def test_a_course_has_few_points_and_the_last_iteration(count):
    course = course_of("m", WORKERS, list(trained(count)))
    assert len(course.points) == min(count, POINTS)
    assert course.points[-1].time == count - 1
    assert all(point.iteration_s > 0 for point in course.points)


def test_the_gain_is_that_over_equal_batches():
    course = course_of("m", WORKERS, list(trained(100)))
    assert course.points[-1].t_star_s == pytest.approx(T_STAR_S, rel=0.02)
    assert course.points[-1].iteration_s == pytest.approx(T_STAR_S, rel=0.05)
    assert course.equal_batches_s == pytest.approx(0.005 + 32 * 0.004, rel=0.05)
    assert course.gain == pytest.approx(course.equal_batches_s / T_STAR_S, rel=0.1)
