"""A chain of dense layers in NumPy and float64, for stages without a framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hetctl.runtime.frameworks.stage_network import Tensor


class DenseChain:
    """Layers ``tanh(x W + b)``, with the mean squared error of the last one as loss.

    Parameters
    ----------
    sizes : sequence of int
        Values of a sample before the first layer, and after each.
    momentum : float
        Momentum of SGD with a learning rate of 0.1.
    """

    def __init__(self, sizes: Sequence[int], momentum: float = 0.9, seed: int = 1) -> None:
        self.sizes = tuple(sizes)
        self.layers = tuple(f"dense{number}" for number in range(len(sizes) - 1))
        self.momentum, self.seed = momentum, seed

    def build(self, layers: range, sample: Any = None, *, recomputes: bool = False) -> DenseStage:  # noqa: ARG002
        """Return consecutive layers; each has a generator of its own, so that others need not exist."""
        return DenseStage(self, layers)


class DenseStage:
    """Consecutive layers with their optimizer; a `StageNetwork`."""

    def __init__(self, chain: DenseChain, layers: range) -> None:
        self.layers = layers
        self.chain = chain
        self.weight_names = tuple(f"layer-{n}/{kind}" for n in layers for kind in ("W", "b"))
        self.statistic_names = tuple(f"layer-{n}/mean" for n in layers)
        self.values: list[Tensor] = []
        for number in layers:
            rng = np.random.default_rng([chain.seed, number])
            shape = chain.sizes[number], chain.sizes[number + 1]
            self.values += [rng.standard_normal(shape) / np.sqrt(shape[0]), np.zeros(shape[1])]
        self.slots = [np.zeros_like(value) for value in self.values]
        self.means = [np.zeros(chain.sizes[number]) for number in layers]
        self.rate = 0.1
        self._base = [value.copy() for value in self.values]
        self._kept: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._gradients: dict[int, list[Tensor]] = {}
        self._errors: list[Tensor] = []

    def version(self) -> list[Tensor]:
        return list(self.values)

    def forward(self, minibatch: int, version: Any, inputs: Tensor) -> Tensor:
        outputs = [inputs]
        for at in range(len(self.layers)):
            self.means[at] = 0.9 * self.means[at] + 0.1 * outputs[-1].mean(axis=0)
            outputs.append(np.tanh(outputs[-1] @ version[2 * at] + version[2 * at + 1]))
        self._kept[minibatch] = version, outputs
        return outputs[-1]

    def backward(self, minibatch: int, gradient: Tensor) -> Tensor | None:
        version, outputs = self._kept.pop(minibatch)
        found: list[Tensor] = []
        for at in reversed(range(len(self.layers))):
            inner = gradient * (1 - outputs[at + 1] ** 2)
            found = [outputs[at].T @ inner, inner.sum(axis=0), *found]
            gradient = inner @ version[2 * at].T
        self._gradients[minibatch] = found
        return None if self.layers[0] == 0 else gradient

    def forward_backward(
        self, minibatch: int, version: Any, inputs: Tensor, targets: Tensor
    ) -> tuple[float, Tensor | None]:
        outputs = self.forward(minibatch, version, inputs)
        error = outputs - targets
        return float((error**2).mean()), self.backward(minibatch, 2 * error / error.size)

    def update(self, minibatch: int) -> None:
        for at, gradient in enumerate(self._gradients.pop(minibatch)):
            self.slots[at] = self.chain.momentum * self.slots[at] + gradient
            self.values[at] = self.values[at] - self.rate * self.slots[at]

    def weights(self) -> list[Tensor]:
        return [value.copy() for value in self.values]

    def slot_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def updates(self) -> list[Tensor]:
        found = [value - base for value, base in zip(self.values, self._base, strict=True)]
        self._base = self.weights()
        return found

    def set_global_weights(self, weights: Sequence[Tensor]) -> None:
        since = [value - base for value, base in zip(self.values, self._base, strict=True)]
        self._base = [weight.copy() for weight in weights]
        self.values = [base + own for base, own in zip(self._base, since, strict=True)]

    def statistics(self) -> list[Tensor]:
        return [mean.copy() for mean in self.means]

    def set_statistics(self, statistics: Sequence[Tensor]) -> None:
        self.means = [mean.copy() for mean in statistics]

    def infer(self, inputs: Tensor) -> Tensor:
        for at in range(len(self.layers)):
            inputs = np.tanh(inputs @ self.values[2 * at] + self.values[2 * at + 1])
        return inputs

    def score(self, inputs: Tensor, targets: Tensor) -> None:
        self._errors += list(((self.infer(inputs) - targets) ** 2).mean(axis=1))

    def scores(self) -> tuple[dict[str, float], int]:
        errors, self._errors = self._errors, []
        return ({"val_loss": float(np.mean(errors))} if errors else {}), len(errors)

    def computed(self) -> None:
        pass

    def end_epoch(self) -> None:
        pass

    def scale_learning_rate(self, factor: float) -> None:
        self.rate *= factor

    def save(self) -> dict[str, Tensor]:
        slots = {f"{name}/slot": slot for name, slot in zip(self.weight_names, self.slots, strict=True)}
        values = dict(zip(self.weight_names, self.values, strict=True))
        means = dict(zip(self.statistic_names, self.means, strict=True))
        return {**values, **means, **slots, "rate": np.array(self.rate)}

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        self.values = [arrays[name].copy() for name in self.weight_names]
        self.slots = [arrays[f"{name}/slot"].copy() for name in self.weight_names]
        self.means = [arrays[name].copy() for name in self.statistic_names]
        self.rate = float(arrays["rate"])
        self._base = self.weights()
