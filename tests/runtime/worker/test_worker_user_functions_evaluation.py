"""``evaluate_fn``, whose metrics do not depend on the number of ranks, and predictions in checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from resumed_ranks import TO_THE_END, train_in_parts
from tiny_networks import ENSEMBLES, MODULES, functions_of

from hetctl.model.ensemble import Ensemble, Member, StopRule
from hetctl.model.errors import BadInputError
from hetctl.model.training_settings import KeepSettings
from hetctl.runtime.worker.member_trainer import PREDICTIONS, own_arrays
from hetctl.runtime.worker.user_functions import (
    Predictions,
    joined,
    load_functions,
    lone_array,
    whole_metrics,
)


@pytest.mark.training
@pytest.mark.parametrize("framework", MODULES)
def test_the_area_under_a_curve_is_that_of_one_rank(tmp_path, framework):
    """With a rate of 0, all have the same weights; two ranks share 200 samples in chunks of 66."""
    functions = replace(functions_of(framework), evaluate_fn="handwriting:evaluate_fn")
    stop = StopRule("val_auc", "max", 9, max_epochs=1)
    found = []
    for gpus, rows in ((1, 64), (2, 33)):
        member = Member("m", {"learning_rate": 0.0}, 32, 5, stop, validation_batch_size=rows)
        how = framework, functions, member, gpus, (TO_THE_END,)
        _, metrics = train_in_parts(tmp_path / f"{gpus}", *how)
        assert all(own == metrics[0] for own in metrics)
        found.append(metrics[0][0])
    assert [one["val_in_order"] for one in found] == [1.0, 1.0]
    assert 0.0 < found[0]["val_auc"] < 1.0
    assert found[1]["val_auc"] == pytest.approx(found[0]["val_auc"], rel=1e-9)
    assert found[1]["val_loss"] == pytest.approx(found[0]["val_loss"], rel=1e-5)


def evaluated(returned, outputs=lambda y: y):
    """Return the metrics if two ranks have rows 0 and 1, 2; the first has one more in a last chunk."""
    ranks = []
    for rows in (([0], [3]), ([1, 2], None)):
        own = Predictions(lambda arrays: arrays, at_once=True)
        own.most_bytes = math.inf
        own.begin()
        for y in rows:
            own.skip() if y is None else own.add(outputs(np.array(y)), y)
        ranks.append(own.taken())
        assert own.taken() is None
    found, (_, targets) = whole_metrics(returned, ranks, {}, {"val_loss"})
    assert targets.tolist() == [0, 1, 2, 3]
    return found


def test_rows_of_all_ranks_come_in_order():
    def check(outputs, targets, _config):
        assert targets.tolist() == [0, 1, 2, 3]
        assert outputs["pair"][1].tolist() == [0, 2, 4, 6]
        return {"rows": len(outputs["plain"])}

    assert evaluated(check, lambda y: {"plain": y, "pair": [y, 2 * y]}) == {"val_rows": 4.0}


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (0.5, "float instead of a mapping"),
        ({"auc": "high"}, "could not convert"),
        ({"loss": 1.0}, "val_loss, which model_fn has as well"),
    ],
)
def test_the_result_of_evaluate_fn_is_checked(returned, problem):
    with pytest.raises(BadInputError, match=f"evaluate_fn returned .*{problem}"):
        evaluated(lambda *_: returned)


def test_outputs_of_several_shapes_are_refused():
    with pytest.raises(BadInputError, match="outputs or targets of several shapes"):
        evaluated(lambda *_: {}, lambda y: np.zeros((len(y), 1 + y.max())))


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
