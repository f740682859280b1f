"""Memory of layers by TensorFlow's own count."""

from __future__ import annotations

import numpy as np
import pytest
import ranks

pytestmark = pytest.mark.training


def test_a_pool_does_not_hide_what_a_pass_needs():
    tf = pytest.importorskip("tensorflow")
    from hetctl.runtime.frameworks.tensorflow_memory import PoolMemory, has_pool

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

    from hetctl.runtime.frameworks.tensorflow_memory import PoolMemory

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
