"""Contexts of ``train_fn``: kept state, and training that goes on as if it had not been stopped."""

from __future__ import annotations

from functools import partial
from itertools import compress

import numpy as np
import pytest
from resumed_ranks import TO_THE_END, train_in_parts
from tiny_networks import context_in, functions_of

from hetctl.model.ensemble import Member, StopRule
from hetctl.model.errors import BadInputError
from hetctl.runtime.frameworks.packed_state import pack, unpack
from hetctl.runtime.worker.user_functions import KeptState, TrainingContext, takes_context

BATCHES = 20
"""Batches of an epoch."""


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_the_saved_state_of_an_object_waits_for_it():
    saved = {"objects": {"counter": {"count": 3}}, "values": {"best": 0.5}}
    state = KeptState()
    state.restore(saved)
    assert (dict(state), state.save()) == ({"best": 0.5}, saved)
    counter = state.setdefault("counter", Counter())
    assert counter.count == 3
    counter.count += 1
    assert state.save()["objects"] == {"counter": {"count": 4}}


def test_objects_and_values_return_to_what_was_saved():
    state = KeptState()
    kept = state["counter"] = Counter()
    saved = state.save()
    kept.count, state["later"], state["another"] = 9, [1], Counter()
    state.restore(saved)
    assert (kept.count, dict(state)) == (0, {"counter": kept})
    del state["counter"]
    assert state.save() == {"objects": {}, "values": {}}


def test_a_value_cannot_take_over_the_state_of_an_object():
    state = KeptState()
    state.restore({"objects": {"average": {}}, "values": {}})
    with pytest.raises(BadInputError, match=r"context.state\['average'\] is float, but the checkpoint has"):
        state["average"] = 0.5


def test_arrays_and_plain_values_are_packed():
    values = [np.arange(3), np.float32(0.5), np.int64(7), (None, "a", True)]
    again = unpack(pack({"values": values}))["values"]
    assert np.array_equal(again[0], values[0])
    assert again[1:] == [0.5, 7, (None, "a", True)]
    with pytest.raises(BadInputError, match="holds ndarray at objects"):
        pack({"objects": np.array([object()])})


def test_callbacks_are_those_of_the_last_call():
    context, called = TrainingContext(0, 1, "cpu"), []
    for epoch in (1, 1, 2):
        context.begin(epoch)
        context.on_epoch_end(lambda epoch=epoch: called.append(epoch))
    context.end_epoch()
    assert called == [2]


def four(data, model, optimizer, config): ...
def five(data, model, optimizer, config, context): ...
def with_default(data, model, optimizer, config, verbose=False): ...
def with_named_default(data, model, optimizer, config, context=None): ...
def open_ended(*_): ...
def six(data, model, optimizer, config, context, more): ...
def three(data, model, optimizer): ...


@pytest.mark.parametrize(
    ("train_fn", "takes"),
    [
        (four, False),
        (five, True),
        (with_default, False),
        (with_named_default, True),
        (open_ended, False),
        (partial(six, more=1), True),
    ],
)
def test_a_fifth_parameter_is_the_context(train_fn, takes):
    assert takes_context(train_fn) is takes


@pytest.mark.parametrize(("train_fn", "count"), [(six, 6), (three, 3)])
def test_other_numbers_of_arguments_are_refused_by_name(train_fn, count):
    with pytest.raises(BadInputError, match=f"{train_fn.__name__} takes {count} arguments") as caught:
        takes_context(train_fn)
    assert "(data, model, optimizer, config, context)" in caught.value.hint


def member_of(**config):
    return Member("m", config, 32, 5, StopRule("val_accuracy", "max", 9, max_epochs=2))


def without(loss, array):
    """Return the bytes of an array, without the mean loss of an epoch: that of its parts is rounded twice."""
    return array.tobytes().replace(repr(loss).encode(), b"")


@pytest.mark.training
@pytest.mark.parametrize(("framework", "gpus"), [("pytorch", 1), ("pytorch", 2), ("tensorflow", 2)])
def test_a_stop_within_an_accumulated_step_changes_no_bit(tmp_path, framework, gpus):
    """Mixed precision, scaled losses, gradients of three batches: the stop comes after the first of them."""
    functions = functions_of(framework, "mixed_train_fn")
    member = member_of(scaled=framework == "pytorch", plateau=True)
    stop = BATCHES // gpus + 8
    train = partial(train_in_parts, framework=framework, functions=functions, member=member, gpus=gpus)
    whole, metrics = train(tmp_path / "whole", parts=(TO_THE_END,))
    parts, again = train(tmp_path / "parts", parts=(stop, TO_THE_END))
    assert whole.keys() == parts.keys()
    losses = [context_in(arrays, framework)["metrics"]["loss"] for arrays in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    unlike = (without(losses[0], whole[name]) != without(losses[1], parts[name]) for name in whole)
    assert list(compress(whole, unlike)) == []
    assert all(found == metrics[0] for found in metrics)
    assert [epoch["val_loss"] for epoch in metrics[0]] == [epoch["val_loss"] for epoch in again[0]]
    if framework == "pytorch":
        # It imports PyTorch, which the processes of tests that do not train do without.
        from hetctl.runtime.frameworks.torch_parts import unpack as unpack_tensors

        state = unpack_tensors(whole)
        assert state["loss_scale"]["scale"] > 2.0**10
        assert state["gradients"]
        assert state["scheduler"]["best"] == metrics[0][0]["val_accuracy"]
        assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.001)
    kept = context_in(whole, framework)
    assert kept["step"] == 2 * BATCHES // gpus
    assert kept["metrics"] == metrics[0][-1]
    values = kept["state"]["values"]
    assert values["seen"].tolist() == [kept["step"], 2 * 640 // gpus]
    assert values["ended"] == [[1, BATCHES // gpus], [2, kept["step"]]]
