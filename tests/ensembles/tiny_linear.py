"""The networks of `tiny`, as linear classifiers; their framework is that of the recipe in CONTRIBUTING.md."""

from handwriting import input_fn  # noqa: F401
from hetctl.runtime.frameworks.linear import Classifier, default_train_fn


def model_fn(config):
    return Classifier(config.get("units", 64), 10, config.get("learning_rate", 0.01))


fit_train_fn = default_train_fn
