"""When the next checkpoint of a member is due, and the generators that it has."""

from __future__ import annotations

import json
import signal
from functools import partial

import numpy as np
import pytest
from resumed_ranks import TO_THE_END, kill_in_part, train_in_parts
from tiny_networks import MODULES, functions_of

from hetctl.model.ensemble import Member, StopRule
from hetctl.model.training_settings import EPOCHS, SECONDS, STEPS, CheckpointInterval
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.runtime.worker.member_trainer import GENERATORS, SaveClock


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


pytestmark = pytest.mark.training
MEMBER = Member(
    "m", {"dropout": 0.3}, 16, 5, StopRule("val_accuracy", "max", 9, max_epochs=2),
    global_batch_size=33, checkpoint=CheckpointInterval(8, STEPS),
)  # fmt: skip
"""The ranks train 17 and 16 samples of a step, in two batches and in one."""


def states_of(arrays):
    return {name: json.loads(arrays[name].tobytes()) for name in arrays if name.startswith(GENERATORS)}


@pytest.mark.parametrize("framework", MODULES)
def test_a_killed_group_goes_on_with_the_generators_of_each_rank(tmp_path, framework):
    how = (framework, functions_of(framework, "noisy_train_fn"), MEMBER)
    whole, metrics = train_in_parts(tmp_path / "whole", *how, 2, (TO_THE_END,))
    parts = tmp_path / "parts"
    assert kill_in_part(parts, *how, 2, 30) == [-signal.SIGKILL] * 2
    killed = CheckpointFolder(parts / "checkpoints").newest_state()
    assert (len(killed.epochs), killed.part_samples > 0) == (1, True)
    resumed, again = train_in_parts(parts, *how, 2, (TO_THE_END,))
    assert resumed.keys() == whole.keys()
    assert [name for name in whole if not np.array_equal(whole[name], resumed[name])] == []
    assert again == metrics


def test_other_numbers_of_ranks_begin_with_the_states_there_are(tmp_path):
    how = ("pytorch", functions_of("pytorch", "noisy_train_fn"), MEMBER)
    train = partial(train_in_parts, tmp_path / "group", *how)
    two, _ = train(2, (12,))
    of_two = states_of(two)
    folder = CheckpointFolder(tmp_path / "group" / "checkpoints")
    state = folder.newest_state()
    assert of_two.keys() == {f"{GENERATORS}1"}
    assert of_two[f"{GENERATORS}1"][0] != state.random_state
    three, _ = train(3, (0,))
    of_three = states_of(three)
    assert of_three[f"{GENERATORS}1"] == of_two[f"{GENERATORS}1"]
    assert of_three[f"{GENERATORS}2"][0] == state.random_state
    one, _ = train(1, (0,))
    assert states_of(one) == {}
    assert folder.newest_state().random_state == state.random_state
