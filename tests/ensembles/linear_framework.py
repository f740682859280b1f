"""A framework in one file, for CONTRIBUTING.md: linear classifiers in NumPy, each on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.data.batches import Batches, TrainingData
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.frameworks import GLOO
from hetctl.runtime.frameworks.stage_network import Chain, NodeMemory
from hetctl.runtime.worker.group import CollectiveGroup, Group
from hetctl.runtime.worker.measuring.layer_memory import ProcessMemory
from hetctl.runtime.worker.user_functions import UserFunctions, loss_of

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


class LinearNetwork:
    """A classifier in training; a `TrainableNetwork`."""

    timer = None  # Only ranks of a group report the times of their steps.

    def __init__(self, classifier: Classifier, member: Member, train_fn: Any) -> None:
        self._classifier = classifier
        self._member = member
        self._train_fn = train_fn or default_train_fn

    def train(self, batches: Batches) -> float:
        """Run ``train_fn``; return the mean loss."""
        data = TrainingData(batches, self._member.batch_size)
        return loss_of(self._train_fn(data, self._classifier, None, dict(self._member.config)))

    def evaluate(self, batches: Iterable[tuple[Samples, int]]) -> dict[str, float]:
        """Return the means over samples of loss and accuracy."""
        sums = np.zeros(3)
        for (x, y), count in batches:
            if count:
                hits = self._classifier.shares(x).argmax(axis=1) == y
                sums += count * np.array([self._classifier.loss(x, y), hits.mean(), 1.0])
        return {"val_loss": float(sums[0] / sums[2]), "val_accuracy": float(sums[1] / sums[2])}

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Do nothing: the learning rate is constant."""

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

    def generators(self) -> Any:
        """Return nothing: it has no random generators."""

    def set_generators(self, states: Any) -> None:
        """Do nothing: it has no random generators."""

    def gather(self, value: Any) -> list[Any]:
        """Return the value: it trains on one rank alone."""
        return [value]

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate."""
        self._classifier.learning_rate *= factor


class Linear:
    """Linear classifiers, which need one rank; a `Framework`."""

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
        self, member: Member, functions: UserFunctions, _group: Group, _sample: Samples
    ) -> LinearNetwork:
        """Call ``model_fn``."""
        return LinearNetwork(functions.model_fn(dict(member.config)), member, functions.train_fn)

    def chain(self, member: Member, _functions: UserFunctions) -> Chain:
        """Refuse to cut the network."""
        raise BadInputError(f"linear classifiers have one layer: {member.name} cannot be cut into stages")

    def remove_temporary_files(self) -> None:
        """Do nothing: there are none."""

    def clear(self) -> None:
        """Do nothing: a network goes with the last reference to it."""

    def load(self) -> None:
        """Refuse groups of several ranks."""
        raise ImportError("linear classifiers train on one rank")

    def initialize(self, group: CollectiveGroup) -> None:
        """Do nothing: `load` has refused the group."""

    def shutdown(self) -> None:
        """Do nothing: there is no group."""

    def backend(self) -> str:
        """Return the library of a group, which there is none of."""
        return GLOO

    def all_reduce(self, count: int) -> Callable[[], None]:
        """Return a function that sums zeros of one rank."""
        values = np.zeros(count, np.float32)
        return lambda: values.__iadd__(0)

    def unreached(self, device: int, devices: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return no devices: none is used."""
        return ()

    def gpu_memory(self) -> int:
        """Return 0: no GPU is used."""
        return 0

    def peak_gpu_memory(self) -> int:
        """Return 0: no GPU is used."""
        return 0

    def reset_peak_memory(self) -> None:
        """Do nothing: no GPU is used."""

    def tensor_memory(self) -> NodeMemory:
        """Return the node's memory."""
        return NodeMemory()

    def memory_gauge(self, device: int | None) -> ProcessMemory:  # noqa: ARG002
        """Return a gauge of the process."""
        return ProcessMemory()


FRAMEWORK = Linear()


def default_train_fn(
    data: TrainingData, classifier: Classifier, _optimizer: None, _config: dict[str, Any]
) -> float:
    """Take one step for each batch; return the mean loss."""
    losses = [classifier.step(x, y) for x, y in data]
    return float(np.mean(losses)) if losses else 0.0
