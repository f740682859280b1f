"""TensorFlow in a rank, and the memory of layers by its allocators."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
import ranks

pytestmark = pytest.mark.training


def test_converted_functions_leave_no_files_after_a_task(tmp_path, monkeypatch):
    tf = pytest.importorskip("tensorflow")
    from hetctl.runtime.frameworks.tensorflow import FRAMEWORK

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    @tf.function
    def halved(number):
        while number > 1:
            number = number / 2
        return number

    assert halved(tf.constant(8.0)) == 1
    assert list(tmp_path.glob("*.py"))
    FRAMEWORK.remove_temporary_files()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert halved(tf.constant([16.0])[0]) == 1


def test_a_pool_does_not_hide_what_a_pass_needs():
    tf = pytest.importorskip("tensorflow")
    from hetctl.runtime.frameworks.tensorflow import PoolMemory, has_pool

    def run():
        return tf.reduce_sum(tf.random.uniform((2**24,))).numpy()

    gauge = PoolMemory()
    run()
    before = gauge.used()
    gauge.reset_peak()
    run()
    assert gauge.peak() - before >= 2**26
    assert gauge.used() - before < 2**26
    assert has_pool()


SIZE = 2**20
"""Numbers of a tensor."""


def write_kept(path):
    """Measure a pass in a process of its own: in this one, tensors of other tests come and go."""
    import tensorflow as tf

    from hetctl.runtime.frameworks.tensorflow import PoolMemory

    inputs, kept = np.ones(SIZE, np.float32), []

    def forward():
        kept.append(tf.convert_to_tensor(inputs + 1))
        kept.append(kept[0] * 2)
        kept.append(kept[1] * 2)
        return kept[2].numpy()

    path.write_text(str(PoolMemory().kept_by(forward, inputs)))


def test_a_pool_tells_what_a_pass_keeps(tmp_path):
    pytest.importorskip("tensorflow")
    process = ranks.fork(write_kept, tmp_path / "kept", log=tmp_path / "log")
    process.join(ranks.PATIENCE_S)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    # Tensors may be in holes of the pool that are up to twice as large.
    assert 2 * 4 * SIZE <= int((tmp_path / "kept").read_text()) <= 5 * 4 * SIZE


WIDTH = 1024
"""Weights of 4 MiB, and as many bytes of momentum."""
WEIGHT_BYTES = 4 * WIDTH**2


def compiled_training():
    """Return a compiled step of a member, which holds its weights and the optimizer's state."""
    import keras

    from hetctl.runtime.frameworks.keras_model import compiled_step

    # silu is a function with a gradient of its own.
    layers = [keras.layers.Dense(WIDTH, activation="silu"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(keras.optimizers.SGD(1e-5, momentum=0.9), "mse", jit_compile=False)
    return compiled_step(lambda x, y: model.train_step((x, y)))


def write_left(path):
    """Train members one after another; write the memory that is left after each."""
    import tensorflow as tf

    from hetctl.runtime.frameworks.tensorflow import FRAMEWORK, PoolMemory

    x, y = tf.ones((8, WIDTH)), tf.ones((8, 2))
    gauge = PoolMemory()
    for _ in range(3):
        compiled_training()(x, y)
        in_use = gauge.used()
        FRAMEWORK.clear()
        with path.open("a") as file:
            file.write(f"{in_use} {gauge.used()}\n")


def test_nothing_is_left_of_members_that_have_trained(tmp_path):
    pytest.importorskip("tensorflow")
    process = ranks.fork(write_left, tmp_path / "left", log=tmp_path / "log")
    process.join(ranks.PATIENCE_S)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    sizes = [[int(size) for size in line.split()] for line in (tmp_path / "left").read_text().splitlines()]
    assert len(sizes) == 3
    for in_use, left in sizes:
        assert in_use >= 2 * WEIGHT_BYTES
        assert left < WEIGHT_BYTES / 2


def test_a_network_that_is_kept_trains_on_with_another_batch():
    tf = pytest.importorskip("tensorflow")
    from hetctl.runtime.frameworks.tensorflow import FRAMEWORK

    step = compiled_training()
    losses = [float(step(tf.ones((8, WIDTH)), tf.ones((8, 2)))["loss"])]
    FRAMEWORK.clear()
    losses += [float(step(tf.ones((rows, WIDTH)), tf.ones((rows, 2)))["loss"]) for rows in (8, 3)]
    assert losses[2] < losses[1] < losses[0]


def test_a_function_that_was_only_called_gets_its_gradient_later():
    tf = pytest.importorskip("tensorflow")
    from hetctl.runtime.frameworks.tensorflow import FRAMEWORK

    @tf.function(autograph=False)
    def squashed(x):
        return tf.nn.silu(x)

    x = tf.zeros((3,))
    squashed(x)
    for _ in range(2):
        FRAMEWORK.clear()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = squashed(x)
    assert tape.gradient(y, x).numpy().tolist() == [0.5, 0.5, 0.5]
