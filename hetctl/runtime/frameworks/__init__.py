"""Deep learning frameworks behind one small interface: build, train, evaluate, save, restore."""

from __future__ import annotations

import importlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt

from hetctl.model.ensemble import Member
from hetctl.model.errors import TransientInputError
from hetctl.model.interpreter import without_collections
from hetctl.model.training_settings import FRAMEWORKS, FrameworkEntry
from hetctl.runtime.data.batches import Arrays, Batches, TrainingData
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.frameworks.stage_network import Chain, SavedNetwork, StatefulNetwork, TensorMemory
from hetctl.runtime.worker.group import CollectiveBackend, Group
from hetctl.runtime.worker.step_clock import StepTimer
from hetctl.runtime.worker.user_functions import (
    Batch,
    Predictions,
    TrainingContext,
    UserFunctions,
    joined,
    lone_array,
    takes_context,
    training_loss,
    whole_metrics,
)

if TYPE_CHECKING:
    from hetctl.runtime.worker.hardware import MemoryGauge

NCCL, GLOO = "nccl", "gloo"
"""Libraries that exchange gradients: NCCL between GPUs directly, Gloo through the nodes' memory."""

Result = TypeVar("Result")


def finished(steps: Generator[Any, Any, Result]) -> Result:
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class TrainableNetwork(StatefulNetwork):
    """A built network with its optimizer, on this rank.

    Parameters
    ----------
    model, optimizer : Any
        Objects of the framework, as a ``train_fn`` gets them.
    default_train_fn : callable
        Training of members without a ``train_fn``.
    device : Any
        Device of the model, as the framework names it.
    convert : callable
        Function called with the arrays of each batch just before it is trained.
    of_context : Any
        Further objects for the context of a ``train_fn``.

    Attributes
    ----------
    timer : StepTimer or None
        Timer of this rank's steps; None for a group of one rank.
    reuses_outputs : bool
        True if an evaluation's batch may overwrite the outputs of the one before.
    """

    timer: StepTimer | None = None
    reuses_outputs = False

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        member: Member,
        functions: UserFunctions,
        group: Group,
        default_train_fn: Callable[..., Any],
        device: Any = None,
        convert: Callable[[Arrays], Any] = lambda arrays: arrays,
        *of_context: Any,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._member, self._group = member, group
        self._convert = convert
        self._train_fn = functions.train_fn or default_train_fn
        self._evaluate_fn = functions.evaluate_fn
        self._predictions = Predictions(
            self.arrays_of, at_once=self.reuses_outputs or bool(self._evaluate_fn)
        )
        self._predictions.most_bytes = math.inf if self._evaluate_fn else 0
        self._whole: Batch | None = None
        self._most_kept = 0
        self._context: TrainingContext | None = None
        self._accumulation: Any = None
        if takes_context(self._train_fn):
            self._context = TrainingContext(group.rank, group.size, device, *of_context)

    def train(self, batches: Batches) -> float:
        """Train on the batches; return the mean training loss over them, equal on every rank.

        Gradients, losses and statistics of the ranks are weighted by their samples (LB-BSP, Equation 7). With
        a global batch size, a rank may have several batches in a step: their gradients, weighted by
        `batches.weight`, are added up until `batches.ends_step`.
        """
        if self._accumulation is not None:
            self._accumulation.begin()
        data = self._data(batches)
        arguments = [data, self._model, self._optimizer, dict(self._member.config)]
        if self._context is not None:
            self._context.begin(batches.epoch)
            arguments.append(self._context)
        loss = self._synchronized(training_loss(self._train_fn(*arguments)), batches)
        if self._context is not None and batches.ends_epoch:
            self._context.end_epoch()
        return loss

    def take_reported(self) -> dict[str, float]:
        """Return the metrics that the ``train_fn`` has reported since the last call."""
        if self._context is None:
            return {}
        reported, self._context.reported = self._context.reported, {}
        return reported

    def training(self, batches: Batches) -> Generator[Any, Any, float]:
        """Do as `train`; of a fused member, yield each batch for `FusedSteps`, and get its result."""
        yield from ()
        return self.train(batches)

    def evaluating(self, batches: Iterable[tuple[Samples, int]]) -> Generator[Any, Any, dict[str, float]]:
        """Do as `evaluate`; of a fused member, yield as in `training`."""
        yield from ()
        return self.evaluate(batches)

    def _data(self, batches: Batches) -> TrainingData:
        """Return the batches in the types of the framework."""
        rows = self._member.largest_train_batch(self._group.size)
        return TrainingData(batches, rows, self._convert, partial(self._on_batch, batches))

    def _on_batch(self, _batches: Batches, _samples: int) -> None:
        """Prepare for the next batch, which has so many samples."""
        if self._context is not None:
            self._context.step += 1

    def _synchronized(self, loss: float, _batches: Batches) -> float:
        """Agree with the other ranks on loss and statistics after training on batches; return the loss."""
        return loss

    @abstractmethod
    def evaluate(self, batches: Iterable[tuple[Samples, int]]) -> dict[str, float]:
        """Return ``val_*`` metrics over all ranks' batches, equal on every rank.

        Parameters
        ----------
        batches : iterable of (Samples, int)
            Batches of this rank, each with its number of samples; batches with 0 do not count.
        """

    def metric_names(self) -> Collection[str]:
        """Return the names of all metrics of an evaluation; none if only an evaluation tells."""
        return ()

    def _with_whole(self, found: dict[str, float]) -> dict[str, float]:
        """Add the metrics, if any, that rank 0 computes from all ranks' predictions."""
        if self._evaluate_fn is None:
            return found
        shares, of_all = self._shares(), None
        if self._group.rank == 0:
            of_all, self._whole = whole_metrics(self._evaluate_fn, shares, self._member.config, found)
        return {**found, **self._group.broadcast(of_all)}

    def _shares(self) -> list[Any]:
        """Return, on rank 0, the predictions of all ranks; all ranks call it."""
        own = self._predictions.taken()
        return [own] if self._group.size == 1 else self.gather(own)

    def keep_predictions(self, samples: int, most_bytes: int) -> None:
        """Keep the predictions of each evaluation if they and their targets are no larger.

        Parameters
        ----------
        samples : int
            Validation samples of the group, which its ranks get in their order.
        """
        self._most_kept, self._predictions.samples = most_bytes, samples
        if self._evaluate_fn is None:
            self._predictions.most_bytes = most_bytes

    def predictions(self) -> dict[str, npt.NDArray[Any]]:
        """Return, on rank 0, ``outputs`` and ``targets`` of the last evaluation in the order of the samples.

        All ranks call it, once after an evaluation. Empty: they are not kept, too large, of several shapes,
        or of a network with several outputs.
        """
        if self._most_kept and self._evaluate_fn is None:
            shares = self._shares()
            with suppress(ValueError):
                self._whole = joined(shares) if shares and None not in shares else None
        whole, self._whole = self._whole, None
        found = {} if whole is None else {"outputs": lone_array(whole[0]), "targets": whole[1]}
        fits = all(array is not None and array.dtype.kind in "biuf" for array in found.values())
        return found if fits and sum(array.nbytes for array in found.values()) <= self._most_kept else {}

    def arrays_of(self, outputs: Any) -> Any:
        """Return outputs as arrays in the node's memory."""
        raise NotImplementedError

    def metric_sums(self) -> dict[str, npt.NDArray[Any]]:
        """Return the sums over samples from which the last evaluation's metrics are computed.

        Adding the sums of two evaluations merges them exactly. Empty: the metrics are means over the samples.
        """
        return {}

    def metrics_of(self, sums: Mapping[str, npt.NDArray[Any]]) -> dict[str, float]:
        """Return ``val_*`` metrics of sums; evaluate the network before."""
        raise NotImplementedError

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Note an epoch's results, equal on every rank; call it before saving the state."""
        if self._context is not None:
            self._context.metrics = metrics

    def write_shards(self, folder: Path) -> None:
        """Write this rank's part of a divided network, which `save` leaves out; all ranks call it.

        Raises
        ------
        OSError
            If a disk is full or read-only.
        """

    def open_shards(self, folder: Path) -> None:
        """Set the folder from which `restore` and `adopt` read parts."""

    def generators(self) -> Any:
        """Return the states of this rank's random generators, as a JSON value; None if it has none.

        They include the framework's and its layers'; `save` has those of rank 0, too.
        """

    def set_generators(self, states: Any) -> None:
        """Set this rank's generators to states that `generators` returned; call it after `restore`."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on rank 0; all ranks of a group of several call it."""
        raise NotImplementedError


class FusedSteps(ABC):
    """Computation of members that train together on this rank.

    Their networks are those of `Framework.build_fused`, whose `training` and `evaluating` yield works.

    Parameters
    ----------
    known : mapping of int to float, or None
        Samples/s of all members together by the number that are one computation, if measured before.

    Attributes
    ----------
    refused : dict of str to str
        Members that have to train alone, with the reason; meanwhile they do, beside the others.
    measured : dict of int to float
        What this process has measured of that; empty: nothing yet.
    """

    def __init__(self, known: Mapping[int, float] | None = None) -> None:
        self._known = known or {}
        self.refused: dict[str, str] = {}
        self.measured: dict[int, float] = {}

    @abstractmethod
    def join(self, name: str, network: Any) -> None:
        """Let a member take part; if its parts do not fit, it is refused."""

    @abstractmethod
    def run(self, works: Mapping[str, Any]) -> dict[str, Any]:
        """Do the present work of each member; return results or errors. Both are by member."""

    @abstractmethod
    def leave(self, name: str, network: Any) -> None:
        """Let a member go; its network is then as any other."""


class Framework(CollectiveBackend, ABC):
    """Class of the object ``FRAMEWORK`` in a module of this package."""

    @abstractmethod
    def version(self) -> str:
        """Return name and version, as recorded in profiles."""

    @abstractmethod
    def prepare(
        self, cores: tuple[int, ...], device: int | None, seed: int, *, deterministic: bool = False
    ) -> None:
        """Limit threads to the cores, choose the GPU, and seed the generators.

        Parameters
        ----------
        cores : tuple of int
            Numbers of the cores, the same in every call.
        device : int or None
            Index of the rank's GPU among the visible ones, the same in every call; None without a GPU.
        deterministic : bool
            Use deterministic algorithms only, until the next call.
        """

    @abstractmethod
    def clear(self) -> None:
        """Release the memory of the last member before the next one is built."""

    @abstractmethod
    def backend(self) -> str:
        """Return the library that exchanges gradients in the group of this rank: `NCCL` or `GLOO`."""

    @abstractmethod
    def all_reduce(self, count: int) -> Callable[[], None]:
        """Return a function that sums `count` 32-bit numbers over all ranks, and waits for the sums.

        The numbers are stored where gradients are: on the GPU, if the framework sees one.
        """

    def without_peer_access(self, device: int, devices: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return the devices of this node that the rank's GPU cannot access directly, as far as known.

        Parameters
        ----------
        device : int
            Index of the rank's device, as in `prepare`.
        devices : int
            Number of devices of the node.
        """
        return ()

    @abstractmethod
    def gpu_memory(self) -> int:
        """Return the bytes of the rank's GPU; 0 if it uses none."""

    @abstractmethod
    def peak_gpu_memory(self) -> int:
        """Return the peak of the bytes on the rank's GPU since `reset_peak_memory`; 0 without a GPU."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Restart the measurement of that peak."""

    def tensor_memory(self) -> TensorMemory:
        """Return the memory for tensors that stages pass to each other; call it after `prepare`."""
        return TensorMemory()

    @abstractmethod
    def memory_gauge(self, device: int | None) -> MemoryGauge:
        """Return the gauge of layers' memory on the rank's device.

        Parameters
        ----------
        device : int or None
            Index of the rank's GPU among the visible ones; None for a slot.
        """

    def remove_temporary_files(self) -> None:
        """Remove files of this process that the framework removes only at a regular exit of Python."""

    @abstractmethod
    def build(
        self, member: Member, functions: UserFunctions, group: Group, sample: Samples
    ) -> TrainableNetwork:
        """Build a member's network; `sample` is one batch, for layers that take their shapes from inputs."""

    def build_fused(
        self, member: Member, functions: UserFunctions, group: Group, sample: Samples
    ) -> TrainableNetwork:
        """Build a network as `build` does, for `fused_steps`."""
        raise NotImplementedError

    def fused_steps(self, known: Mapping[int, float] | None = None) -> FusedSteps:
        """Return what computes the steps of such networks, as `FusedSteps`; only PyTorch has it."""
        raise NotImplementedError

    @abstractmethod
    def write_weights(self, saved: SavedNetwork, file: Path) -> str:
        """Write the weights of a checkpoint into a file that the framework itself loads.

        Parameters
        ----------
        file : Path
            File with one of the endings in `FrameworkEntry.endings`.

        Returns
        -------
        str
            What has to be known to load it; empty if nothing has.

        Raises
        ------
        BadInputError
            If the file cannot hold the network.
        """

    @abstractmethod
    def chain(self, member: Member, functions: UserFunctions) -> Chain:
        """Return a member's network as a chain that can be cut into stages.

        Call `prepare` with the member's seed just before. ``model_fn`` is called here and for each stage.

        Raises
        ------
        BadInputError
            If the network cannot be cut.
        """


def load_framework(name: str) -> Framework:
    """Import a framework; only this call takes its start-up time.

    Raises
    ------
    BadInputError
        If it is not installed.
    """
    try:
        framework: Framework = _imported(FRAMEWORKS[name]).FRAMEWORK
    except ModuleNotFoundError as error:
        raise TransientInputError(
            f"framework {name} cannot be imported: {error}", "install it as docs/install.md says"
        ) from None
    return framework


def framework_of_groups() -> str | None:
    """Return the first framework whose packages for groups are all installed, or None."""
    # find_spec() finds a package without importing it, which would take seconds.
    return next((entry.name for entry in FRAMEWORKS.values() if all(map(find_spec, entry.packages))), None)


def preload_framework(name: str | None) -> None:
    """Import modules that ranks share; each rank's `load_framework` reports missing ones."""
    if name is None:
        return
    entry = FRAMEWORKS[name]
    # Packages also fail with errors of their own, such as protobuf's for versions that do not fit.
    with suppress(Exception):
        _imported(entry)
        for module in entry.preloaded:
            importlib.import_module(module)


def _imported(entry: FrameworkEntry) -> ModuleType:
    """Import a framework without packages that no rank needs."""
    withheld = [name for name in entry.withheld if name not in sys.modules]
    # Python takes a module that is None here for one that is not installed.
    sys.modules.update(dict.fromkeys(withheld))  # type: ignore[arg-type]
    try:
        with without_collections():
            return importlib.import_module(entry.module)
    finally:
        for name in withheld:
            sys.modules.pop(name, None)
