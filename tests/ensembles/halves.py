"""Digits whose upper and lower halves are inputs of their own, with networks that put them together again."""

import numpy as np
from handwriting import digits


class HalfDigits:
    """A dataset of single digits."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        return halves(self.x[number : number + 1], first=0), self.y[number]


def halves(x, first=slice(None)):
    return {"upper": x[:, :4].astype(np.float64)[first], "lower": x[:, 4:].astype(np.float32)[first]}


def input_fn(kind):
    x, y = digits()
    forms = {
        "whole": lambda x, y: (x, y),
        "arrays": lambda x, y: (halves(x), y),
        "dataset": HalfDigits,
    }
    return forms[kind](x[:333], y[:333]), forms[kind](x[640:740], y[640:740])


def keras_model_fn(config):
    import keras

    if config["named"]:
        inputs = {name: keras.Input((4, 8, 1), name=name) for name in ("lower", "upper")}
        whole = keras.layers.Concatenate(1)([inputs["upper"], inputs["lower"]])
    else:
        inputs = whole = keras.Input((8, 8, 1))
    hidden = keras.layers.Dense(16, "relu")(keras.layers.Flatten()(whole))
    model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.BatchNormalization()(hidden)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def torch_model_fn(config):
    import torch

    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 10)
            )

        def forward(self, x):
            return self.layers(torch.cat([x["upper"], x["lower"]], 1) if config["named"] else x)

    model = Halves()
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "loss": torch.nn.CrossEntropyLoss(),
    }


def keras_train_fn(data, model, optimizer, config):
    return float(np.mean([model.train_on_batch(x, y)[0] for x, y in data]))


def torch_train_fn(data, model, optimizer, config):
    import torch

    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))
