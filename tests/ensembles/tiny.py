"""Networks for tests: seconds to build, real data, real convergence."""

import random
import time
from functools import partial

import keras
import numpy as np
from handwriting import failing, input_fn, note  # noqa: F401


def model_fn(config):
    if config.get("broken"):
        raise ValueError("no such network")
    layers = [keras.layers.Flatten(), keras.layers.Dense(config.get("units", 32), activation="relu")]
    if config.get("dropout"):
        layers.append(keras.layers.Dropout(config["dropout"]))
    if config.get("batch_norm"):
        layers.append(keras.layers.BatchNormalization())
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(10)])
    momentum = partial(keras.optimizers.SGD, momentum=0.9)
    optimizers = {"sgd": keras.optimizers.SGD, "momentum": momentum, "adam": keras.optimizers.Adam}
    rate = config.get("learning_rate", 0.01)
    if config.get("decay"):
        rate = keras.optimizers.schedules.ExponentialDecay(rate, 10, 0.9)
    model.compile(
        optimizer=optimizers[config.get("optimizer", "adam")](rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", *(overlap() for _ in range(config.get("overlaps", 0)))],
    )
    return model


def overlap():
    """A metric that is no mean over samples."""
    return keras.metrics.MeanIoU(10, name="overlap", sparse_y_true=True, sparse_y_pred=False)


def fit_train_fn(data, model, optimizer, config):
    """A train_fn that uses Keras' own training step, and rests for `pause_s` after each."""
    losses = []
    for x, y in data:
        losses.append(float(model.train_on_batch(x, y)[0]))
        time.sleep(config.get("pause_s", 0.0))
    return {"loss": float(np.mean(losses)) if losses else 0.0}


def mixed_train_fn(data, model, optimizer, config, context):
    """A train_fn with an average of the weights, which lowers the learning rate when val_loss stagnates."""
    state = context.state
    average = state.setdefault("average", [np.array(weight) for weight in model.get_weights()])
    if context.metrics and state.get("judged", 0) < context.epoch - 1:
        state["judged"] = context.epoch - 1
        if context.metrics["val_loss"] > 0.9 * state.get("best", np.inf):
            optimizer.learning_rate = optimizer.learning_rate * 0.5
        state["best"] = min(state.get("best", np.inf), context.metrics["val_loss"])
    losses = []
    for x, y in data:
        losses.append(float(model.train_on_batch(x, y)[0]))
        for mean, weight in zip(average, model.get_weights(), strict=True):
            mean += 0.1 * (weight - mean)
        state["seen"] = state.get("seen", np.zeros(2, int)) + np.array([1, data.samples])
    context.on_epoch_end(lambda: state.setdefault("ended", []).append([context.epoch, context.step]))
    return {"loss": float(np.mean(losses)) if losses else 0.0}


def noisy_train_fn(data, model, optimizer, config, context):
    """A train_fn with noise from Python and NumPy, of which each rank uses other numbers."""
    losses = []
    if context.step == 0:
        draws = [(random.random(), np.random.rand()) for _ in range(context.rank)]
        assert len(draws) == context.rank
    for x, y in data:
        noise = random.random() + np.random.rand(*x.shape)
        losses.append(float(model.train_on_batch(x + noise.astype(x.dtype), y)[0]))
    return float(np.mean(losses)) if losses else 0.0


def hungry_train_fn(data, model, optimizer, config):
    """A train_fn for which batches of more than `most` samples are too large."""

    def small_enough():
        for x, y in data:
            if len(x) > config["most"]:
                np.ones(2**50)
            yield x, y

    return fit_train_fn(small_enough(), model, optimizer, config)


def doomed_train_fn(data, model, optimizer, config):
    """A train_fn that rests for `pause_s` after each step, and in which a lone rank fails, the first time."""
    return fit_train_fn(failing(data, config["rank"], config), model, optimizer, config)


def fragile_train_fn(data, model, optimizer, config):
    """A train_fn in which one rank fails after some batches, the first time."""
    import horovod.tensorflow as hvd

    return fit_train_fn(failing(data, hvd.rank(), config), model, optimizer, config)


def noted_train_fn(data, model, optimizer, config):
    """A train_fn after which each rank notes a checksum of its weights in the file `noted` with its GPU."""
    result = fit_train_fn(data, model, optimizer, config)
    note([*model.get_weights(), *(np.asarray(variable) for variable in optimizer.variables)], config)
    return result
