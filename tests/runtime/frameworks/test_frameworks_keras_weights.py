"""Weights of pipelines, and losses of one's own, as files for plain Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from hetctl.model.ensemble import Member
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.frameworks.stage_network import SavedNetwork
from hetctl.runtime.worker.user_functions import UserFunctions

pytestmark = pytest.mark.training
MEMBER = Member("m", seed=5)
X, Y = np.ones((1, 4), "float32"), np.zeros(1, int)


def own_loss(y, outputs):
    return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


def nested(loss="sparse_categorical_crossentropy"):
    inner = keras.Sequential([keras.layers.Dense(5, activation="tanh")])
    layers = [keras.layers.Dense(6), keras.layers.BatchNormalization(), inner, keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", loss)
    return model


def written(arrays, file, build=nested):
    saved = SavedNetwork(MEMBER, arrays, None, build, lambda: (X, Y))
    return load_framework("tensorflow").write_weights(saved, file)


def arrays_of(model):
    holders = {"model": model, "optimizer": model.optimizer}
    return {
        f"{owner}/{index:04d}": np.array(variable)
        for owner, holder in holders.items()
        for index, variable in enumerate(holder.variables)
    }


def test_the_stages_of_a_pipeline_become_one_model(tmp_path):
    chain = load_framework("tensorflow").chain(MEMBER, UserFunctions(None, lambda _config: nested(), None))
    arrays = {}
    for layers in (range(2), range(2, len(chain.layers))):
        arrays |= chain.build(layers, (X, Y)).save()
    assert written(arrays, tmp_path / "m.keras") == ""
    keras.utils.set_random_seed(MEMBER.seed)
    expected = nested()
    found = keras.models.load_model(tmp_path / "m.keras")
    for one, other in zip(expected.variables, found.variables, strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(expected(X), found(X))


def test_a_model_with_a_loss_of_ones_own_loads_uncompiled(tmp_path):
    model = nested(own_loss)
    model.optimizer.build(model.trainable_variables)
    model.fit(X, Y, verbose=0)
    note = written(arrays_of(model), tmp_path / "m.keras", lambda: nested(own_loss))
    assert "compile=False" in note
    assert "own_loss" in note
    found = keras.models.load_model(tmp_path / "m.keras", compile=False)
    assert np.array_equal(model(X), found(X))


def test_the_optimizer_is_restored(tmp_path):
    model = nested()
    model.fit(X, Y, verbose=0)
    assert written(arrays_of(model), tmp_path / "m.keras") == ""
    found = keras.models.load_model(tmp_path / "m.keras")
    for one, other in zip(model.optimizer.variables, found.optimizer.variables, strict=True):
        assert np.array_equal(one, other)
