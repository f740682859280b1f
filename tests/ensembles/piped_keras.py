"""The chain of `piped_torch` in Keras."""

import keras
from handwriting import digits


def input_fn(_data):
    x, y = digits()
    x = x.astype("float64").reshape(len(x), 64)
    return (x[:640], y[:640]), (x[640:800], y[640:800])


def model_fn(config):
    kinds = ((keras.layers.Reshape, (64,)), (keras.layers.Dense, 24), (keras.layers.Activation, "tanh"))
    kinds += ((keras.layers.Dense, 16), (keras.layers.Activation, "tanh"), (keras.layers.Dense, 10))
    layers = [kind(argument, dtype="float64") for kind, argument in kinds]
    model = keras.Sequential([keras.Input((64,), dtype="float64"), *layers])
    optimizer = keras.optimizers.SGD(config["learning_rate"], momentum=0.5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model
