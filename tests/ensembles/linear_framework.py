"""A framework in one file, for CONTRIBUTING.md: linear classifiers in NumPy, each on one rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.data.batches import TrainingData
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.frameworks import GLOO, Framework, TrainableNetwork
from hetctl.runtime.frameworks.stage_network import Chain, SavedNetwork
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.hardware import MemoryGauge
from hetctl.runtime.worker.user_functions import UserFunctions

Array = npt.NDArray[Any]


class Classifier:
    """Softmax regression, as a ``model_fn`` returns it.

    Parameters
    ----------
    inputs, classes : int
        Number of values of a sample of which the first are used, and of classes.
    """

    def __init__(self, inputs: int, classes: int, learning_rate: float) -> None:
        self.weights = 0.01 * np.random.standard_normal((inputs, classes))
        self.learning_rate = learning_rate

    def step(self, x: Array, y: Array) -> float:
        """Descend along the gradient of one batch; return the mean loss before the step."""
        rows, shares = self.rows(x), self.shares(x)
        loss = self.loss(x, y)
        shares[np.arange(len(y)), y] -= 1
        self.weights -= self.learning_rate * rows.T @ shares / len(y)
        return loss

    def loss(self, x: Array, y: Array) -> float:
        """Return the mean cross-entropy."""
        return float(-np.log(self.shares(x)[np.arange(len(y)), y]).mean())

    def shares(self, x: Array) -> Array:
        """Return the probability of each class, of shape (samples, classes)."""
        scores = self.rows(x) @ self.weights
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def rows(self, x: Array) -> Array:
        """Return the values that are used, of shape (samples, inputs)."""
        return x.reshape(len(x), -1)[:, : len(self.weights)]


class LinearNetwork(TrainableNetwork):
    """A classifier in training."""

    def __init__(
        self, classifier: Classifier, member: Member, functions: UserFunctions, group: Group
    ) -> None:
        super().__init__(classifier, None, member, functions, group, default_train_fn)
        self._classifier = classifier

    def evaluate(self, batches: Iterable[tuple[Samples, int]]) -> dict[str, float]:
        """Return the means over samples of loss and accuracy."""
        sums = np.zeros(3)
        for (x, y), count in batches:
            if count:
                hits = self._classifier.shares(x).argmax(axis=1) == y
                sums += count * np.array([self._classifier.loss(x, y), hits.mean(), 1.0])
        return {"val_loss": float(sums[0] / sums[2]), "val_accuracy": float(sums[1] / sums[2])}

    def metric_names(self) -> Collection[str]:
        """Return the names of what `evaluate` returns."""
        return "val_loss", "val_accuracy"

    def save(self) -> dict[str, Array]:
        """Return the weights and the learning rate."""
        return {
            "model/weights": self._classifier.weights,
            "learning_rate": np.array(self._classifier.learning_rate),
        }

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore what `save` returned; BadInputError if the network has another shape."""
        weights = arrays["model/weights"]
        if weights.shape != self._classifier.weights.shape:
            raise BadInputError(
                f"the checkpoint has other variables than the network of model_fn: {weights.shape}"
            )
        self._classifier.weights[:] = weights
        self._classifier.learning_rate = float(arrays["learning_rate"])

    def adopt(self, arrays: Mapping[str, Array]) -> None:
        """Restore the weights of another network."""
        self.restore({**arrays, "learning_rate": np.array(self._classifier.learning_rate)})

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate."""
        self._classifier.learning_rate *= factor


class Linear(Framework):
    """Linear classifiers, which need one rank."""

    needs = "another framework"

    def version(self) -> str:
        """Return NumPy's version, which determines the results."""
        return f"numpy {np.__version__}"

    def prepare(
        self,
        cores: tuple[int, ...],  # noqa: ARG002
        device: int | None,  # noqa: ARG002
        seed: int,
        *,
        deterministic: bool = False,  # noqa: ARG002
    ) -> None:
        """Seed the generator of the first weights; all algorithms are deterministic."""
        np.random.seed(seed % 2**32)

    def build(
        self, member: Member, functions: UserFunctions, group: Group, _sample: Samples
    ) -> LinearNetwork:
        """Call ``model_fn``."""
        return LinearNetwork(functions.model_fn(dict(member.config)), member, functions, group)

    def chain(self, member: Member, _functions: UserFunctions) -> Chain:
        """Refuse to cut the network."""
        raise BadInputError(f"linear classifiers have one layer: {member.name} cannot be cut into stages")

    def write_weights(self, saved: SavedNetwork, _file: Path) -> str:
        """Refuse to write a file."""
        raise BadInputError(f"linear classifiers have no files of their own: {saved.member.name}")

    def clear(self) -> None:
        """Do nothing: a network goes with the last reference to it."""

    def load(self) -> None:
        """Refuse groups of several ranks."""
        raise ImportError("linear classifiers train on one rank")

    def backend(self) -> str:
        """Return the library of a group, which there is none of."""
        return GLOO

    def all_reduce(self, count: int) -> Callable[[], None]:
        """Return a function that sums zeros of one rank."""
        values = np.zeros(count, np.float32)
        return lambda: values.__iadd__(0)

    def gpu_memory(self) -> int:
        """Return 0: no GPU is used."""
        return 0

    def peak_gpu_memory(self) -> int:
        """Return 0: no GPU is used."""
        return 0

    def reset_peak_memory(self) -> None:
        """Do nothing: no GPU is used."""

    def memory_gauge(self, device: int | None) -> MemoryGauge:  # noqa: ARG002
        """Return a gauge of the process."""
        return MemoryGauge()


FRAMEWORK = Linear()


def default_train_fn(
    data: TrainingData, classifier: Classifier, _optimizer: None, _config: dict[str, Any]
) -> float:
    """Take one step for each batch; return the mean loss."""
    losses = [classifier.step(x, y) for x, y in data]
    return float(np.mean(losses)) if losses else 0.0
