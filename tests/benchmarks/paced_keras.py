"""The network of the paced workers in Keras."""

from __future__ import annotations

import time
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
from paced_digits import UNITS, sleep_as

Config = dict[str, Any]


def model_fn(config: Config) -> Any:
    """Return a perceptron with the initial weights of the config's seed."""
    keras.utils.set_random_seed(config["seed"])
    layers = [keras.layers.Flatten(), keras.layers.Dense(UNITS, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
    model.compile(
        optimizer=keras.optimizers.SGD(config["learning_rate"], config["momentum"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train_fn(data: Any, model: Any, _optimizer: Any, config: Config) -> dict[str, float]:
    """Train, paced."""
    losses = []
    for x, y, weights in data.padded():
        sleep_as(hvd.rank(), data.samples, time.monotonic(), config["pace"])
        losses.append(float(model.train_on_batch(x, y, sample_weight=weights)[0]))
    return {"loss": float(np.mean(losses)) if losses else 0.0}
