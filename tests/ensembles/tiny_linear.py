"""The networks of `tiny`, as linear classifiers; their framework is that of the recipe in CONTRIBUTING.md."""

from handwriting import digits
from hetctl.runtime.frameworks.linear import Classifier, default_train_fn

SAMPLES = 640


def input_fn(path):
    x, y = digits()
    return (x[:SAMPLES], y[:SAMPLES]), (x[SAMPLES : SAMPLES + 200], y[SAMPLES : SAMPLES + 200])


def model_fn(config):
    return Classifier(config.get("units", 64), 10, config.get("learning_rate", 0.01))


fit_train_fn = default_train_fn
