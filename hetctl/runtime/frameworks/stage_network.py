"""Interface of frameworks for networks that are cut into stages of a pipeline (HetPipe, section 4)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.model.values import dataclass
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.worker.user_functions import UserFunctions

Tensor = npt.NDArray[Any]
"""Activations, gradients or weights in the memory of the node; the first axis of activations are samples.

Arguments may be read-only, and are not used after the return. Returned activations and gradients may share
memory with the network: send or copy them before the next call, and do not change them.
"""


LAYER = "layer-{}/"
"""Prefix of the names of a layer's arrays in the checkpoint of a pipeline, from the layer's number."""


@dataclass(frozen=True)
class SavedNetwork:
    """A member's network in a checkpoint, to be written as a file of its framework.

    Parameters
    ----------
    shards : Path or None
        Folder of the parts of a sharded network.
    build : callable
        Function that calls ``model_fn`` with the member's config.
    sample : callable
        Function that returns a batch of one sample, for networks that take their shapes from inputs.
    """

    member: Member
    arrays: Mapping[str, Tensor]
    shards: Path | None
    build: Callable[[], Any]
    sample: Callable[[], Samples]

    @property
    def is_pipeline(self) -> bool:
        """True if stages have written it layer by layer."""
        return any(name.startswith(LAYER.format(0)) for name in self.arrays)


PassedTensor = Any
"""Activations or gradients on their way between stages: a `Tensor`, or a framework's tensor on a GPU.

The GPU's tensor is computed, and stays in memory while anybody refers to it. Both have `nbytes`.
"""


class TensorMemory:
    """Memory of the tensors that stages pass to each other: on this rank's GPU or, by default, the node's.

    Slots use the node's memory, and so do frameworks whose tensors other processes cannot open.
    """

    def filled(self, value: float, size: int) -> PassedTensor | None:
        """Return a tensor of `size` equal 32-bit numbers on the GPU; None for a slot."""

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Tensor:
        """Return an array in the memory from which tensors reach the device fastest."""
        return np.empty(shape, dtype)

    def array(self, tensor: PassedTensor) -> Tensor:
        """Return a tensor in the node's memory, without a copy if it is there."""
        return np.asarray(tensor)

    def exported(self, tensor: PassedTensor) -> str | None:
        """Return a handle by which other processes of the node open a tensor where it is.

        None: other processes cannot open it, such as an array. The tensor stays in memory until the other
        process has opened and dropped it, even if nobody here refers to it.
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
        """Return another rank's tensor in this rank's memory, once it is complete."""
        return tensor


class ComputeTime(NamedTuple):
    """Time of passes or updates on a GPU.

    Parameters
    ----------
    compute_s : float
        Seconds for which the GPU computes if it never waits for a launch.
    launch_s : float
        Seconds in which the host launches the kernels; 0 on a slot.
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
    """Learning rate of an optimizer, constant or set by a scheduler."""

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

        Call it before the network trains, and before its learning rate is scaled.
        """
        with self._rate.kept():
            self.restore(arrays)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate."""
        self._rate.scale(factor)


class StageNetwork(StatefulNetwork):
    """Consecutive layers of a network with their optimizer, on this rank; the other layers do not exist here.

    Minibatches are numbered. Several may be between their forward and backward passes; both passes of one use
    the same version of the weights. A minibatch goes through `forward`, `backward` and `update`, in the last
    stage through `both` and `update`.

    State that no optimizer changes, such as batch-norm means, has no versions: every forward pass in training
    uses and changes the present one. Each rank draws its own random numbers, such as dropout's.

    In `save`, names of a layer's state and optimizer slots begin with ``layer-<number>/``. State of the
    optimizer as a whole has no such prefix, and is equal in all stages. PyTorch's random generators belong to
    the first layer of a stage. Save only while no minibatch is in progress. `restore` takes what stages
    saved, and ignores arrays of other layers.

    Attributes
    ----------
    layers : range
        Numbers of its layers in the chain, counted from 0.
    weight_names, statistic_names : tuple of str
        Names in `save` of the arrays of `weights` and of `statistics`.
    """

    layers: range
    weight_names: tuple[str, ...]
    statistic_names: tuple[str, ...]
    _sent: list[Tensor]

    @abstractmethod
    def version(self) -> Any:
        """Return the present weights; later updates do not change them.

        They are copied only if an update comes while the version, or a minibatch begun with it, is in use:
        drop it when no other minibatch will begin with it.
        """

    @abstractmethod
    def forward(self, minibatch: int, version: Any, inputs: PassedTensor) -> PassedTensor:
        """Return the activations after the last layer; keep what the backward pass needs."""

    @abstractmethod
    def backward(self, minibatch: int, gradient: PassedTensor) -> PassedTensor | None:
        """Compute the gradients of the weights; return the gradient of the inputs, None for the first layer.

        Parameters
        ----------
        gradient : array
            Gradient of the loss with respect to the activations that `forward` returned.
        """

    @abstractmethod
    def forward_backward(
        self, minibatch: int, version: Any, inputs: PassedTensor, targets: Tensor
    ) -> tuple[float, PassedTensor | None]:
        """Return the mean loss over the samples, and the gradient of the inputs; for the last stage.

        The gradient is None if the stage has the first layer, too. The loss includes losses that layers of
        this stage add, such as Keras' regularizers; losses of other stages only affect gradients.
        """

    @abstractmethod
    def update(self, minibatch: int) -> None:
        """Update the present weights by the gradients of a minibatch, and forget it."""

    @abstractmethod
    def slot_bytes(self) -> int:
        """Return the bytes of the optimizer's state for the weights; call it after an update."""

    @abstractmethod
    def statistics(self) -> list[Tensor]:
        """Return copies of the floating-point state that no optimizer changes, such as batch-norm means."""

    @abstractmethod
    def set_statistics(self, statistics: Sequence[Tensor]) -> None:
        """Replace what `statistics` returns."""

    @abstractmethod
    def infer(self, inputs: PassedTensor) -> PassedTensor:
        """Return the activations of validation samples in evaluation mode, without padding."""

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

        Copies before and after do not count. None: there is no GPU, or the time is unknown.
        """
        return None

    def end_epoch(self) -> None:
        """Advance learning-rate schedulers that step once an epoch."""

    def weights(self) -> list[Tensor]:
        """Return copies of the present trainable weights, in an order that depends only on the layers."""
        return list(self._copies())

    def updates(self) -> list[Tensor]:
        """Return the sum of all updates since the last call, in the order of `weights`: a wave's.

        The first call counts from the initial or restored weights.
        """
        updates = []
        for at, now in enumerate(self._copies()):
            then, self._sent[at] = self._sent[at], now
            # In the memory of the old weights, which nothing else uses.
            updates.append(np.subtract(now, then, out=then))
        return updates

    def set_global_weights(self, weights: Iterable[Tensor]) -> None:
        """Set the weights to the given ones plus the updates since the last call of `updates`.

        They are taken one by one, and need not be in memory at once.
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


class Chain(ABC):
    """A network whose layers follow one another, with a single tensor between two layers.

    Parameters
    ----------
    functions : UserFunctions
        Its ``model_fn`` is called here and in each `build`.

    Attributes
    ----------
    layers : tuple of str
        Names of the layers, in order of computation; layers that cannot be cut apart count as one.
    hint : str
        What ``model_fn`` should return.

    Raises
    ------
    BadInputError
        If the network, or its optimizer, cannot be divided.
    """

    layers: tuple[str, ...]
    hint: str

    def __init__(self, member: Member, functions: UserFunctions) -> None:
        self._member, self._functions = member, functions
        self.layers = tuple(self._names())
        if len(self.layers) < 2:
            raise self._uncut(f"one layer alone, {', '.join(self.layers)},")

    @abstractmethod
    def _names(self) -> Iterable[str]:
        """Call ``model_fn``, check that its network can be divided, and return the names of the layers."""

    def _uncut(self, problem: str, hint: str = "") -> BadInputError:
        """Return the error for what ``model_fn`` has returned."""
        return BadInputError(
            f"model_fn returned {problem} for {self._member.name}: it cannot be cut into stages",
            hint or self.hint,
        )

    def _refuse_shared(self, tensors: Iterable[tuple[str, Iterable[Any]]]) -> None:
        """Refuse weights that two layers share, given the name and the weights of each."""
        owners: dict[int, tuple[int, str]] = {}
        for number, (layer, own) in enumerate(tensors):
            for tensor in own:
                first, owner = owners.setdefault(id(tensor), (number, layer))
                if first != number:
                    raise self._uncut(
                        f"weights that layers {owner} and {layer} share",
                        "put them and the layers between them into one layer of your own",
                    )

    @abstractmethod
    def build(self, layers: range, sample: Samples, *, recomputes: bool = False) -> StageNetwork:
        """Build consecutive layers alone, with the initial weights that they have in the whole network.

        Each call builds a new network.

        Parameters
        ----------
        layers : range
            Numbers of the layers, with step 1.
        sample : tuple of array
            A batch of the whole network with one sample, for shapes.
        recomputes : bool
            Keep only a minibatch's inputs between its passes, and repeat the forward pass before the backward
            pass: with the same weights, statistics and random numbers, so that all bits are the same.
        """
