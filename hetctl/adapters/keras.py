"""Callback for scripts in Keras, on one GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras

from hetctl import script
from hetctl.adapters.checkpoint_place import checkpoint_folder, flush_to_disk, replace_durably

NAMES = "keras.json"
"""File that names the weights of the last checkpoint, with their epoch."""


class HetctlKerasCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Write a checkpoint after each epoch, report it, and stop with a checkpoint when hetctl says so.

    It has to be the first of the callbacks of `fit`. An interrupted epoch gets the steps that it lacks, with
    samples from its beginning.

    Parameters
    ----------
    samples : int or None
        Training samples of an epoch. None: no rate is derived.
    """

    def __init__(self, samples: int | None = None) -> None:
        super().__init__()
        self._samples = samples
        names = checkpoint_folder() / NAMES
        self._saved: dict[str, Any] = json.loads(names.read_text()) if names.exists() else {}
        self._steps_before = int(self._saved.get("steps", 0))
        self._stop_requested = False
        self._left = False
        self._cut = False

    @property
    def initial_epoch(self) -> int:
        """Finished epochs, for the argument of `fit`."""
        return int(self._saved.get("epochs", 0))

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Restore the checkpoint and repeat its report, which a kill of the script may have lost."""
        if not self._saved:
            return
        self.model.optimizer.build(self.model.trainable_variables)
        self.model.load_weights(checkpoint_folder() / self._saved["weights"])
        self._report()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Leave the epoch if told to stop, or once it has the steps that it lacked."""
        steps, last = self._steps_before + batch + 1, self.params["steps"]
        self._stop_requested = self._stop_requested or script.should_stop()
        if last and steps >= last:
            self._cut = self.model.stop_training = batch + 1 < last
        elif self._stop_requested:
            self._save(self.initial_epoch, steps, self._saved.get("metrics", {}))
            self._left = self.model.stop_training = True

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """End the validation of an interrupted epoch."""
        self.model.stop_evaluating = self._left

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Write the checkpoint of a whole epoch and report it."""
        if self._left:
            return
        self._steps_before = 0
        self._save(epoch + 1, 0, {name: float(value) for name, value in (logs or {}).items()})
        self._report()
        if self._cut or self._stop_requested:
            self.model.stop_training = self._stop_requested
            self._cut = False

    def _save(self, epochs: int, steps: int, metrics: dict[str, float]) -> None:
        """Write the weights to a new file, and name that in `NAMES` when it is whole."""
        folder = checkpoint_folder()
        weights = f"keras-{epochs}-{steps}.weights.h5"
        self.model.save_weights(folder / weights, overwrite=True)
        flush_to_disk(folder / weights)
        before = self._saved.get("weights", weights)
        self._saved = {"epochs": epochs, "steps": steps, "weights": weights, "metrics": metrics}
        _replace(folder / NAMES, json.dumps(self._saved))
        if before != weights:
            (folder / before).unlink(missing_ok=True)

    def _report(self) -> None:
        if self.initial_epoch:
            # Within an epoch the weights are not those of the metrics.
            weights = None if self._saved["steps"] else checkpoint_folder() / self._saved["weights"]
            metrics = self._saved["metrics"]
            script.report(epoch=self.initial_epoch, samples=self._samples, checkpoint=weights, **metrics)


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    replace_durably(new, path)
