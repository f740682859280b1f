"""Networks that are cut into stages of a pipeline: interface of frameworks (HetPipe, section 4)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hetctl.runtime.data.loaders import Samples

Tensor = npt.NDArray[Any]
"""Activations, gradients or weights in the memory of the node; the first axis of activations are samples.

Given arrays may be read-only, and are not used after the return. Returned activations and gradients may share
memory with the network: send or copy them before the next call, and do not change them.
"""


PassedTensor = Any
"""Activations or gradients on their way between stages: a `Tensor`, or a tensor of the framework on a GPU.

The latter is computed, and kept in memory while anybody refers to it. Both have `nbytes`.
"""


class TensorMemory:
    """Memory of the tensors that stages pass to each other: of this rank's GPU or, by default, of the node.

    The node's is that of slots, and of frameworks whose tensors no other process can open.
    """

    def filled(self, value: float, size: int) -> PassedTensor | None:
        """Return a tensor of 32-bit numbers on the GPU, `size` times a value; None for a slot."""

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Tensor:
        """Return an array in the memory from which tensors reach the device fastest."""
        return np.empty(shape, dtype)

    def array(self, tensor: PassedTensor) -> Tensor:
        """Return a tensor in the node's memory; one that is there already without a copy."""
        return np.asarray(tensor)

    def exported(self, tensor: PassedTensor) -> str | None:
        """Return a handle by which other processes of the node open a tensor where it is.

        None: it cannot be opened elsewhere, as arrays cannot. The tensor stays in memory, also if nobody here
        refers to it any more, until the other process has opened it and refers to it no more.
        """

    def opened(self, handle: str) -> PassedTensor:
        """Return the tensor of another process of the node; do not change it.

        Raises
        ------
        RuntimeError
            If this process cannot open it.
        """
        raise RuntimeError(f"no tensor of another process can be opened here, such as {handle[:20]}")

    def received(self, tensor: PassedTensor) -> PassedTensor:
        """Return a tensor of another rank in this rank's memory, when it is there."""
        return tensor


class ComputeTime(NamedTuple):
    """Time of passes or updates on a GPU.

    Parameters
    ----------
    compute_s : float
        Seconds for which the GPU computes if it never waits for a kernel to be launched.
    launch_s : float
        Seconds in which the host launches the kernels; 0 on a slot, which does both.
    """

    compute_s: float
    launch_s: float = 0.0


@dataclass(frozen=True)
class RecomputedPass:
    """A minibatch whose forward pass is computed again before its backward pass.

    Parameters
    ----------
    version : Any
        Version of the weights, as `StageNetwork.version` returned it.
    state : Any
        Statistics and random numbers as they were before the first forward pass.
    """

    version: Any
    inputs: PassedTensor
    state: Any


class LearningRate(Protocol):
    """Learning rate of an optimizer, whether it is constant or a scheduler sets it."""

    def scale(self, factor: float) -> None:
        """Multiply the rate of all later steps."""

    def kept(self) -> AbstractContextManager[None]:
        """Keep the rate, and the optimizer's other hyper-parameters, while another state is restored."""


class StatefulNetwork(ABC):
    """A network with its optimizer, whole or a stage, whose state is arrays."""

    _rate: LearningRate

    @abstractmethod
    def save(self) -> dict[str, Tensor]:
        """Return all state: weights, optimizer, random generators of the layers.

        The arrays may be the network's own, which change with the next step.
        """

    @abstractmethod
    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Restore the state that `save` returned, also of a network that has trained since.

        The arrays may be read-only, and are not used after the return.

        Raises
        ------
        BadInputError
            If ``model_fn`` now builds a network with other variables.
        """

    def adopt(self, arrays: Mapping[str, Tensor]) -> None:
        """Restore the state of another network, but keep the hyper-parameters of this one's optimizer.

        To be called before the network has trained or its learning rate was scaled.
        """
        with self._rate.kept():
            self.restore(arrays)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate."""
        self._rate.scale(factor)


class StageNetwork(StatefulNetwork):
    """Consecutive layers of a network with their optimizer, on this rank; the other layers do not exist here.

    Minibatches are numbered. Several may be between their forward and backward passes, each with a version
    of the weights of its own, which both passes use. A minibatch goes through `forward`, `backward` and
    `update`, in the last stage through `both` and `update`.

    State that no optimizer changes, such as batch-norm means, has no versions: every forward pass in training
    uses and changes the present one. Random numbers, as of dropout, are drawn on each rank by itself.

    Names in `save` begin with ``layer-<number>/`` for what belongs to a layer, with its optimizer slots; what
    belongs to the optimizer as a whole has names without a layer, and is equal in all stages. PyTorch's
    random generators belong to the first layer of a stage. No minibatch may have begun and not ended.
    `restore` takes what stages saved, and ignores arrays of other layers.

    Attributes
    ----------
    layers : range
        Numbers of its layers in the chain, counted from 0.
    weight_names, statistic_names : tuple of str
        Names in `save` of each of `weights` and of `statistics`.
    """

    layers: range
    weight_names: tuple[str, ...]
    statistic_names: tuple[str, ...]
    _sent: list[Tensor]

    @abstractmethod
    def version(self) -> Any:
        """Return the present weights; later updates do not change them.

        They are copied only if an update comes while the version, or a minibatch that has begun with it, is
        in use: drop it when no other minibatch is to begin with it.
        """

    @abstractmethod
    def forward(self, minibatch: int, version: Any, inputs: PassedTensor) -> PassedTensor:
        """Return the activations after the last layer; what the backward pass needs is kept."""

    @abstractmethod
    def backward(self, minibatch: int, gradient: PassedTensor) -> PassedTensor | None:
        """Compute the gradients of the weights, and return that of the inputs; None for the first layer.

        Parameters
        ----------
        gradient : array
            Gradient of the loss by the activations that `forward` returned.
        """

    @abstractmethod
    def both(
        self, minibatch: int, version: Any, inputs: PassedTensor, targets: Tensor
    ) -> tuple[float, PassedTensor | None]:
        """Return the mean loss over the samples, and the gradient of the inputs; for the last stage.

        The gradient is None if the stage has the first layer, too. The loss includes what layers of this
        stage add to it, as Keras' regularizers do; those of other stages only get its gradients.
        """

    @abstractmethod
    def update(self, minibatch: int) -> None:
        """Have the optimizer change the present weights by the gradients of a minibatch, and forget it."""

    @abstractmethod
    def slot_bytes(self) -> int:
        """Return the bytes of the optimizer's state for the weights, once it has updated them."""

    @abstractmethod
    def statistics(self) -> list[Tensor]:
        """Return copies of the floating-point state that no optimizer changes, such as batch-norm means."""

    @abstractmethod
    def set_statistics(self, statistics: Sequence[Tensor]) -> None:
        """Replace what `statistics` returns."""

    @abstractmethod
    def infer(self, inputs: PassedTensor) -> PassedTensor:
        """Return the activations of validation samples, without padding, as in `evaluate` of a network."""

    @abstractmethod
    def score(self, inputs: PassedTensor, targets: Tensor) -> None:
        """Add validation samples to the scores; for the last stage."""

    @abstractmethod
    def scores(self) -> tuple[dict[str, float], int]:
        """Return the ``val_*`` metrics of the samples since the last call, and their number.

        Without samples the metrics are 0.
        """

    def computed(self) -> ComputeTime | None:
        """Return the time of the passes and updates since the last call; the first call returns zeros.

        The copies before and after are left out. None: there is no GPU, or it is not known.
        """
        return None

    def end_epoch(self) -> None:
        """Advance schedulers of the learning rate that step once an epoch."""

    def weights(self) -> list[Tensor]:
        """Return copies of the present trainable weights, in an order that only the layers determine."""
        return list(self._copies())

    def updates(self) -> list[Tensor]:
        """Return the sum of all updates since the last call, in the order of `weights`: those of a wave.

        The first call counts from the first weights, or from those of `restore`.
        """
        updates = []
        for at, now in enumerate(self._copies()):
            then, self._sent[at] = self._sent[at], now
            # In the memory of the weights before, which nothing else uses.
            updates.append(np.subtract(now, then, out=then))
        return updates

    def rebase(self, weights: Iterable[Tensor]) -> None:
        """Set the weights to these plus the sum of the updates since the last call of `updates`.

        They are taken one by one, so that those that are computed need not be in memory at once.
        """
        for at, (now, new) in enumerate(zip(self._copies(), weights, strict=True)):
            np.subtract(now, self._sent[at], out=now)
            self._sent[at] = np.array(new, now.dtype)
            self._set_weight(at, np.add(now, self._sent[at], out=now))

    @abstractmethod
    def _copies(self) -> Iterator[Tensor]:
        """Yield copies of the present trainable weights."""

    @abstractmethod
    def _set_weight(self, at: int, values: Tensor) -> None:
        """Replace one of the present trainable weights; versions keep the old one."""


class Chain(Protocol):
    """A network whose layers follow one another: only one tensor passes from each to the next.

    Attributes
    ----------
    layers : tuple of str
        Names of the layers, in order of computation; layers between which no cut is possible count as one.
    """

    layers: tuple[str, ...]

    def build(self, layers: range, sample: Samples, *, recomputes: bool = False) -> StageNetwork:
        """Build consecutive layers alone; weights begin as they would in the whole network of that seed.

        It may be called repeatedly; each call builds a network of its own.

        Parameters
        ----------
        layers : range
            Numbers of the layers, with step 1.
        sample : tuple of array
            A batch of the whole network with one sample, for shapes.
        recomputes : bool
            Between the passes of a minibatch keep its inputs alone, and compute the forward pass again before
            the backward pass: with its version of the weights, and with the statistics and random numbers of
            the first time, so that all has the same bits.
        """
