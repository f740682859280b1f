"""Predictions in checkpoints: those of the epoch, in the order of the samples, whole or not at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from resumed_ranks import TO_THE_END, train_in_parts
from tiny_networks import ENSEMBLES, functions_of

from hetctl.model.ensemble import Ensemble, Member, StopRule
from hetctl.model.training_settings import KeepSettings
from hetctl.runtime.worker.member_trainer import PREDICTIONS, own_arrays
from hetctl.runtime.worker.predictions import Predictions, joined, lone_array
from hetctl.runtime.worker.user_functions import load_functions


def trained(folder, framework, gpus, rows, functions=None, **keep):
    stop = StopRule("val_accuracy", "max", 9, max_epochs=2)
    member = Member(
        "m", {"optimizer": "sgd"}, 32, 5, stop, validation_batch_size=rows, keep=KeepSettings(**keep)
    )
    how = functions or functions_of(framework)
    arrays, metrics = train_in_parts(folder, framework, how, member, gpus, (TO_THE_END,))
    found = {n.removeprefix(PREDICTIONS): a for n, a in arrays.items() if n.startswith(PREDICTIONS)}
    assert not any(name.startswith(PREDICTIONS) for name in own_arrays(arrays))
    return found, metrics[0][-1]


@pytest.mark.training
@pytest.mark.parametrize(
    ("framework", "gpus", "rows"), [("pytorch", 1, 64), ("pytorch", 2, 33), ("tensorflow", 2, 33)]
)
def test_a_checkpoint_has_the_predictions_of_its_epoch(tmp_path, framework, gpus, rows):
    functions = replace(functions_of(framework), evaluate_fn="handwriting:evaluate_fn")
    for folder, of in (("plain", None), ("whole", functions)):
        found, metrics = trained(tmp_path / folder, framework, gpus, rows, of)
        ensemble = Ensemble("t", framework, functions_of(framework), (), str(ENSEMBLES))
        _, (_, targets) = load_functions(ensemble).input_fn(None)
        assert np.array_equal(found["targets"].ravel(), np.asarray(targets).ravel())
        right = found["outputs"].argmax(axis=1) == found["targets"].ravel()
        assert right.mean() == pytest.approx(metrics["val_accuracy"], abs=1e-6)


@pytest.mark.training
@pytest.mark.parametrize("most", [None, 100])
def test_predictions_that_are_too_large_or_not_wanted_are_left_out(tmp_path, most):
    found, _ = trained(tmp_path / "few", "pytorch", 1, 64, predictions=most)
    assert found == {}
    functions = replace(functions_of("pytorch"), evaluate_fn="handwriting:evaluate_fn")
    found, metrics = trained(tmp_path / "whole", "pytorch", 1, 64, functions, predictions=most)
    assert found == {}
    assert "val_auc" in metrics


def collected(most_bytes, samples=4):
    own = Predictions(lambda outputs: outputs, at_once=False)
    own.samples, own.most_bytes = samples, most_bytes
    own.begin()
    own.skip()
    own.add(np.zeros((2, 3)), np.zeros(2))
    own.add(np.ones((2, 3)), np.ones(2))
    return own.taken()


def test_the_first_batch_tells_whether_all_will_fit():
    size = 4 * (3 + 1) * 8
    outputs, targets = joined([collected(size)])
    assert targets.tolist() == [0, 0, 1, 1]
    assert outputs[:, 0].tolist() == [0, 0, 1, 1]
    assert collected(size - 1) is None
    assert collected(0) is None


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        (1, 1),
        ({"logits": 1, "loss": 2}, 1),
        ((1,), 1),
        ({"a": [1]}, 1),
        ((1, 2), None),
        ({"a": 1, "b": 2}, None),
    ],
)
def test_the_only_array_of_outputs_is_found(outputs, found):
    assert lone_array(outputs) == found
