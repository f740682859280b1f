"""When the next checkpoint of a member is due."""

import pytest

from hetctl.model.training_settings import EPOCHS, SECONDS, STEPS, CheckpointInterval
from hetctl.runtime.worker.member_trainer import SaveClock


@pytest.mark.parametrize(("unit", "other"), [(STEPS, EPOCHS), (EPOCHS, STEPS)])
def test_a_checkpoint_is_due_after_so_many_units(unit, other):
    clock = SaveClock(CheckpointInterval(2, unit))
    clock.count(other)
    clock.count(other)
    clock.count(unit)
    assert not clock.is_due()
    clock.count(unit)
    assert clock.is_due()
    clock.restart()
    assert not clock.is_due()


def test_a_checkpoint_is_due_after_a_time_without_a_step():
    now = [100.0]
    clock = SaveClock(CheckpointInterval(600, SECONDS), lambda: now[0])
    clock.count(STEPS)
    now[0] += 599
    assert not clock.is_due()
    now[0] += 1
    assert clock.is_due()
    clock.restart()
    assert not clock.is_due()
