"""Training with a constant global batch: the same results on any number of GPUs."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_networks import train_on

pytestmark = pytest.mark.training
PLAIN = {"optimizer": "momentum", "learning_rate": 0.05, "float64": True}


def assert_equal(state, wanted, where=""):
    for name, array in wanted.items():
        np.testing.assert_allclose(state[name], array, rtol=1e-7, atol=1e-9, err_msg=f"{where} {name}")


@pytest.mark.parametrize(("framework", "numbers"), [("pytorch", (1, 2, 4)), ("tensorflow", (2,))])
def test_a_global_batch_trains_alike_on_any_number_of_gpus(tmp_path, framework, numbers):
    """Equal shares of 50, 25, and 13 and 12 samples in batches of at most 8; the last chunk has 1 sample.

    Unequal ones (LB-BSP, Equation 7) of 38 and 12 samples, then of 4 and 46, in batches of at most 16. The
    shares are those of either framework, in which a rank of TensorFlow takes 3 s.
    """
    (one,), (alone,) = train_on(framework, 1, 50, PLAIN, tmp_path, samples=201)
    equal = [(gpus, 8, {"train_fn": fn}) for fn in (None, "fit_train_fn") for gpus in numbers]
    for number, (gpus, batch, how) in enumerate((*equal, (2, 16, {"sizes": [[38, 12], [4, 46]]}))):
        (folder := tmp_path / str(number)).mkdir()
        states, results = train_on(framework, gpus, batch, PLAIN, folder, samples=201, chunk=50, **how)
        assert all(result == results[0] for result in results)
        if not how.get("train_fn"):
            assert results[0][0] == pytest.approx(alone[0], rel=1e-9)
        assert results[0][1] == pytest.approx(alone[1], rel=1e-5)
        for state in states:
            assert_equal(state, one, f"{gpus} {how}")


def test_batch_norm_sees_equal_batches_where_shares_divide(tmp_path):
    """Batches of 16 of a global batch of 64: the losses are equal, the running moments are not."""
    config = PLAIN | {"batch_norm": True}
    (one,), (alone,) = train_on("pytorch", 1, 16, config, tmp_path, samples=192, chunk=64)
    (four, *_), (group, *_) = train_on("pytorch", 4, 16, config, tmp_path, samples=192, chunk=64)
    running = {name for name in one if "running" in name or "num_batches" in name}
    assert len(running) == 3
    assert group[0] == pytest.approx(alone[0], rel=1e-9)
    assert_equal(four, {name: array for name, array in one.items() if name not in running})
    assert not all(np.allclose(four[name], one[name]) for name in running)
