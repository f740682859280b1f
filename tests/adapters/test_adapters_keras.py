"""The adapter of Keras: epochs that are left and continued."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.training

STEPS, EPOCHS = 8, 3


def trained(told_at: int | None, ends) -> tuple[int, int]:
    """Train, and be told to stop after a step; return the steps of this start and those of the optimizer."""
    import keras

    from hetctl.adapters.keras import HetctlKerasCallback

    class Teller(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.steps = 0

        def on_train_batch_begin(self, _batch, logs=None):  # noqa: ARG002
            self.steps += 1
            if self.steps == told_at:
                ends.tell_to_stop()

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    x = np.linspace(0, 1, STEPS, dtype="float32")[:, None]
    adapter, teller = HetctlKerasCallback(samples=STEPS), Teller()
    model.fit(
        x, x + 1, batch_size=1, validation_data=(x, x + 1), verbose=0,
        initial_epoch=adapter.initial_epoch, epochs=EPOCHS, callbacks=[adapter, teller],
    )  # fmt: skip
    return teller.steps, int(model.optimizer.iterations)


@pytest.mark.parametrize(("told_at", "reported"), [(STEPS + 3, [1]), (STEPS, [1])])
def test_a_stopped_fit_gets_the_steps_it_lacks(start_script, tmp_path, told_at, reported):
    ends = start_script()
    assert trained(told_at, ends) == (told_at, told_at)
    before = ends.reports()
    assert [report["epoch"] for report in before] == reported
    assert set(before[0]) == {"epoch", "samples", "loss", "val_loss", "checkpoint"}
    assert Path(before[0]["checkpoint"]).name == "keras-1-0.weights.h5"
    ends = start_script()
    assert trained(None, ends) == (EPOCHS * STEPS - told_at, EPOCHS * STEPS)
    after = ends.reports()
    # The weights within an epoch are not those of its report.
    within = told_at > STEPS
    assert ("checkpoint" in after[0]) is not within
    assert {**after[0], "checkpoint": None} == {**before[-1], "checkpoint": None}
    assert [report["epoch"] for report in after[1:]] == [2, 3]
    assert before[0]["val_loss"] > after[1]["val_loss"] > after[2]["val_loss"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keras-3-0.weights.h5", "keras.json"]
