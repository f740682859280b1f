"""State of a rank that lasts from one member to the next: device, framework, and samples."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.site import ANY_INTERFACES, SIGN_EVERY_S, USUAL_TIMEOUTS, NetworkInterfaces, Timeouts
from hetctl.model.training_progress import Heartbeat
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data.input_pipeline import OpenLoader, Sharing, open_pipeline, open_validation
from hetctl.runtime.data.loaders import Loader, Lockstep
from hetctl.runtime.data.part_folder import path_on_node
from hetctl.runtime.data.partitions import PartitionedData, load_partitions, read_partition
from hetctl.runtime.data.sampler import streams_of
from hetctl.runtime.data.sharing.node_folder import node_folder, state_folder
from hetctl.runtime.data.sources import ArraySource, as_sources
from hetctl.runtime.frameworks import Framework, TrainableNetwork, load_framework
from hetctl.runtime.transport import Address
from hetctl.runtime.worker.checkpoint import BackgroundSaver
from hetctl.runtime.worker.group import Group, RankInfo, SingleRank, join_group
from hetctl.runtime.worker.user_functions import UserFunctions, load_functions

if TYPE_CHECKING:
    from hetctl.runtime.worker.messages import StateSaved, VisitReport

DATA_SEED = 0
"""Seed while ``input_fn`` runs: its random choices are the same for every member, rank and job."""


@dataclass(frozen=True)
class InputShare:
    """Source of a member's batches on this rank.

    Parameters
    ----------
    preprocessors : int or None
        Number of the rank's preprocessors that work for the member; None: all.
    """

    preprocessors: int | None = None
    lockstep: Lockstep | None = None


@dataclass(frozen=True)
class BuiltMember:
    """A member on this rank, ready for training."""

    group: Group
    framework: Framework
    network: TrainableNetwork
    training: Loader
    validation: Loader


@dataclass(frozen=True)
class WholeData:
    """Samples that every node can read.

    Parameters
    ----------
    samples, held_out : int
        Numbers of training and of validation samples.
    """

    samples: int
    open_loader: OpenLoader
    held_out: int
    open_validation: OpenLoader

    def open(self, place: RankInfo, member: Member, share: InputShare) -> tuple[Loader, Loader]:
        """Return loaders of the training and of the validation samples of a member."""
        stream, held_out = streams_of(member, self.samples, self.held_out, place.rank, place.size)
        # In lockstep a rank may have no preprocessor for training samples, but it needs one to evaluate.
        preprocessors = None if share.preprocessors is None else max(1, share.preprocessors)
        return (
            self.open_loader(stream, share.preprocessors, share.lockstep),
            self.open_validation(held_out, preprocessors),
        )


@dataclass(frozen=True)
class WorkerResources:
    """Data and functions that all members of an ensemble use.

    Parameters
    ----------
    data : WholeData or PartitionedData
        Training and validation samples that this node can read.
    """

    framework: Framework
    functions: UserFunctions
    data: WholeData | PartitionedData


class VisitResources:
    """Data and functions of a rank for visits of any member.

    Attributes
    ----------
    store : Path
        Folder of states, which all ranks of the node and its agent share.
    saver : BackgroundSaver
        Writer of checkpoints.
    """

    def __init__(
        self, framework: Framework, functions: UserFunctions, ensemble: Ensemble, store: Path
    ) -> None:
        self.framework, self.functions, self.store = framework, functions, store
        self.saver = BackgroundSaver()
        self._ensemble = ensemble
        self._open: dict[int, tuple[ArraySource, ArraySource]] = {}

    def partition(self, number: int) -> tuple[ArraySource, ArraySource]:
        """Return the training and the validation samples of a partition that is on this node.

        Raises
        ------
        BadInputError
            If it does not consist of arrays.
        """
        if number not in self._open:
            settings = self._ensemble.partitions
            assert settings is not None
            path = path_on_node(settings.paths()[number], number)
            self._open[number] = read_partition(self.functions.input_fn, self._ensemble.data, str(path))
        return self._open[number]


class WorkerContext:
    """State of a rank that trains one member after another, all of one ensemble.

    Parameters
    ----------
    binding : Binding
        GPU and cores of the rank.
    keep : ExitStack
        Stack that releases the node's resources.
    stop_reason : callable
        Function that returns why the group with a key has to stop; None if it continues.
    announce : callable
        Function called with the address at which this rank, if it leads, waits for the others of its group.
    send_sign : callable
        Function called every few seconds while there is progress.
    send_heartbeat : callable
        Function called with the live metrics of the member in training.
    send_written : callable
        Function called with the length of the task's event file, in bytes, after each event.
    send_visited, send_saved : callable
        Functions called with the result of a visit, and with each checkpoint that is complete.
    """

    def __init__(
        self,
        binding: Binding,
        keep: ExitStack,
        stop_reason: Callable[[str], str | None] = lambda _: None,
        announce: Callable[[Address], None] = lambda _: None,
        send_sign: Callable[[], None] = lambda: None,
        send_heartbeat: Callable[[Heartbeat], None] = lambda _: None,
        send_written: Callable[[int], None] = lambda _: None,
        send_visited: Callable[[VisitReport], None] = lambda _: None,
        send_saved: Callable[[StateSaved], None] = lambda _: None,
    ) -> None:
        self.group: Group = SingleRank()
        self.binding = binding
        self._keep = keep
        self.announce = announce
        self._send_sign = send_sign
        self.send_heartbeat = send_heartbeat
        self.send_written = send_written
        self.send_visited, self.send_saved = send_visited, send_saved
        self.stop_reason = stop_reason
        self._next_sign = 0.0
        self._resources: WorkerResources | None = None
        self._visits: VisitResources | None = None

    @property
    def has_resources(self) -> bool:
        """True if the resources of all members are loaded."""
        return self._resources is not None

    def load_resources(self, ensemble: Ensemble, sharing: Sharing) -> WorkerResources:
        """Return the resources of all members of the ensemble; load them at the first call."""
        self._resources = self._resources or self._load_resources(ensemble, sharing)
        self.sign()
        return self._resources

    def load_visit_resources(self, ensemble: Ensemble, run: str) -> VisitResources:
        """Return the resources of all visits; load them at the first call."""
        if self._visits is None:
            framework = load_framework(ensemble.framework)
            self.prepare(framework, DATA_SEED)
            store = self._keep.enter_context(node_folder(state_folder(run, self.binding.node)))
            self._visits = VisitResources(framework, load_functions(ensemble), ensemble, store)
            self._keep.callback(self._visits.saver.close)
            _freeze()
        self.sign()
        return self._visits

    def build(
        self,
        ensemble: Ensemble,
        member: Member,
        place: RankInfo,
        sharing: Sharing,
        share: InputShare,
        stack: ExitStack,
        interfaces: NetworkInterfaces = ANY_INTERFACES,
        timeouts: Timeouts = USUAL_TIMEOUTS,
        *,
        partial: bool = False,
    ) -> BuiltMember:
        """Load resources, join the group, and build the network.

        Parameters
        ----------
        stack : ExitStack
            Stack that ends the resources of this member alone.
        interfaces : NetworkInterfaces
            Interfaces over which the group connects.
        timeouts : Timeouts
            Time limits of the group.
        partial : bool
            Train on the partitions that the group's nodes have, even if others are missing.
        """
        resources = self.load_resources(ensemble, sharing)
        # An error while the group forms must not be blamed on the ranks of the last one.
        self.group = SingleRank()
        self.group = join_group(place, resources.framework, self.announce, interfaces, timeouts)
        self.sign()
        # Joining the group uses random numbers, too.
        self.prepare(resources.framework, member.seed)
        data = resources.data
        if isinstance(data, PartitionedData):
            training, validation = data.open(self.group, place, member, interfaces, timeouts, partial=partial)
        else:
            training, validation = data.open(place, member, share)
        stack.callback(training.close)
        stack.callback(validation.close)
        network = resources.framework.build(member, resources.functions, self.group, training.sample)
        self.sign()
        return BuiltMember(self.group, resources.framework, network, training, validation)

    def sign(self) -> None:
        """Send a sign of life if the last one was sent `SIGN_EVERY_S` ago or earlier."""
        now = time.monotonic()
        if now >= self._next_sign:
            self._next_sign = now + SIGN_EVERY_S
            self._send_sign()

    def clear(self) -> None:
        """Release the resources of the last member."""
        if resources := self._resources or self._visits:
            resources.framework.clear()

    def prepare(self, framework: Framework, seed: int) -> None:
        """Prepare the framework on this rank's cores and GPU, and seed all generators."""
        framework.prepare(self.binding.cores, self.binding.device, seed)

    def _load_resources(self, ensemble: Ensemble, sharing: Sharing) -> WorkerResources:
        framework = load_framework(ensemble.framework)
        self.prepare(framework, DATA_SEED)
        functions = load_functions(ensemble)
        data = self._load_data(ensemble, functions, sharing)
        _freeze()
        return WorkerResources(framework, functions, data)

    def _load_data(
        self, ensemble: Ensemble, functions: UserFunctions, sharing: Sharing
    ) -> WholeData | PartitionedData:
        if ensemble.partitions and ensemble.reads_partitions:
            return load_partitions(ensemble.partitions, ensemble.data, functions.input_fn)
        training, validation = as_sources(functions.input_fn(ensemble.data))
        return WholeData(
            len(training),
            open_pipeline(training, sharing, self._keep),
            len(validation),
            open_validation(validation, sharing, self._keep),
        )


def _freeze() -> None:
    """Exempt the objects that stay from being scanned each time that garbage of a member is collected."""
    gc.collect()
    gc.freeze()
