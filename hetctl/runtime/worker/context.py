"""State of a rank that lasts from one member to the next: device, framework, and samples."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.site import ANY_INTERFACES, HEARTBEAT_EVERY_S, USUAL_TIMEOUTS, NetworkInterfaces, Timeouts
from hetctl.model.values import dataclass
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data.input_pipeline import OpenLoader, Sharing, open_pipeline
from hetctl.runtime.data.loaders import Loader, Samples
from hetctl.runtime.data.partitioned_data import PartitionedData, load_partitions
from hetctl.runtime.data.round_inputs import InputShare
from hetctl.runtime.data.sampler import streams_of
from hetctl.runtime.data.sources import as_sources
from hetctl.runtime.frameworks import Framework, TrainableNetwork, load_framework
from hetctl.runtime.frameworks.stage_network import Chain
from hetctl.runtime.worker.group import (
    CollectiveBackend,
    Group,
    RankInfo,
    join_group,
)
from hetctl.runtime.worker.user_functions import UserFunctions, load_functions
from hetctl.storage.event_files import EventWriter, Fields
from hetctl.storage.lease import LeaseMark
from hetctl.storage.patience import Patience

if TYPE_CHECKING:
    from hetctl.runtime.worker.hop_resources import HopResources
    from hetctl.runtime.worker.messages import Assignment, TaskMessage

DATA_SEED = 0
"""Seed while ``input_fn`` runs: its random choices are the same for every member, rank and job."""


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

    def open(self, rank_info: RankInfo, member: Member, share: InputShare) -> tuple[Loader, Loader]:
        """Return loaders of the training and of the validation samples of a member."""
        stream, held_out = streams_of(member, self.samples, self.held_out, rank_info.rank, rank_info.size)
        # In lockstep a rank may have no preprocessor for training samples, but it needs one to evaluate.
        preprocessors = None if share.preprocessors is None else max(1, share.preprocessors)
        return (
            self.open_loader(stream, share.preprocessors, share.lockstep),
            self.open_validation(held_out, preprocessors),
        )


class SilentWriter:
    """Writer of ranks other than 0, which report nothing."""

    def write(self, kind: str, **data: Any) -> None:
        """Discard an event."""

    def write_all(self, *events: Fields) -> None:
        """Discard events."""


class WorkerContext:
    """State of a rank that trains one member after another, all of one ensemble.

    Parameters
    ----------
    binding : Binding
        GPU and cores of the rank.
    keep : ExitStack
        Stack that releases the node's resources.
    send : callable
        Function that sends the driver values by the name of the message, also in other threads.
    stop_reason : callable
        Function that returns why the group with this key has to stop; None if it continues.
    joined : collection of str
        Keys of groups to whose GPU another one has come since they began; it grows.
    on_unsaved : callable
        Function called, in another thread, after a state could not be written.
    arrived : callable
        Function that returns the next assignment if it has arrived, or None; for members that join others.

    Attributes
    ----------
    lease : LeaseMark or None
        Lease under which the present task writes; None if it needs none.
    data : WholeData or PartitionedData, or None
        Samples of all members; None until they are loaded.
    kept : HopResources or None
        Resources that last from one visit to the next; None until the first visit.
    """

    def __init__(
        self,
        binding: Binding,
        keep: ExitStack,
        send: Callable[..., None] = lambda **_: None,
        stop_reason: Callable[[str], str | None] = lambda _: None,
        joined: Collection[str] = (),
        on_unsaved: Callable[[], None] = lambda: None,
        arrived: Callable[[], Assignment | None] = lambda: None,
    ) -> None:
        self.group: Group = Group()
        self.binding, self.keep = binding, keep
        self.send, self.stop_reason, self.on_unsaved = send, stop_reason, on_unsaved
        self.arrived, self.joined = arrived, joined
        self._next_heartbeat = 0.0
        self._code: tuple[Framework, UserFunctions] | None = None
        self.data: WholeData | PartitionedData | None = None
        self.lease: LeaseMark | None = None
        self.kept: HopResources | None = None

    def load_data(self, ensemble: Ensemble, sharing: Sharing) -> WholeData | PartitionedData:
        """Return the ensemble's samples that this node can read; load them at the first call."""
        if self.data is None:
            _, functions = self.load_code(ensemble)
            if ensemble.partitions and ensemble.reads_partitions:
                self.data = load_partitions(ensemble.partitions, ensemble.data, functions.input_fn)
            else:
                training, validation = as_sources(functions.input_fn(ensemble.data))
                self.data = WholeData(
                    len(training),
                    open_pipeline(training, sharing, self.keep, heartbeat=self.heartbeat),
                    len(validation),
                    open_pipeline(validation, sharing, self.keep, "validation", self.heartbeat),
                )
            # Garbage collections need not scan objects that stay.
            gc.collect()
            gc.freeze()
        self.heartbeat()
        return self.data

    def build(
        self,
        ensemble: Ensemble,
        rank_info: RankInfo,
        sharing: Sharing,
        share: InputShare,
        stack: ExitStack,
        interfaces: NetworkInterfaces = ANY_INTERFACES,
        timeouts: Timeouts = USUAL_TIMEOUTS,
        *,
        partial: bool = False,
        fused: bool = False,
    ) -> BuiltMember:
        """Load the samples, join the group, and build the network of the ensemble's only member.

        Parameters
        ----------
        stack : ExitStack
            Stack that ends the resources of this member alone.
        interfaces : NetworkInterfaces
            Interfaces over which the group connects.
        timeouts : Timeouts
            Time limits of the group.
        partial : bool
            Train on the partitions of the group's nodes, even if others are missing.
        fused : bool
            Build a network for `Framework.fused_steps`.
        """
        (member,) = ensemble.members
        self._release_kept()
        data = self.load_data(ensemble, sharing)
        self.join(rank_info, interfaces, timeouts)
        # Joining the group uses random numbers, too.
        self.prepare(member)
        training, validation = self._open(
            data, member, rank_info, share, stack, interfaces, timeouts, partial=partial
        )
        framework, functions = self._loaded_code
        build = framework.build_fused if fused else framework.build
        network = build(member, functions, self.group, training.sample)
        self.heartbeat()
        return BuiltMember(self.group, framework, network, training, validation)

    def open_alone(self, ensemble: Ensemble, sharing: Sharing, stack: ExitStack) -> Loader:
        """Load the samples; return a loader of the training samples on this node."""
        data = self.load_data(ensemble, sharing)
        (member,) = ensemble.members
        training, _ = self._open(data, member, RankInfo(0, 1), InputShare(), stack, partial=True)
        return training

    def _release_kept(self) -> None:
        """Release the networks of visits: a task of another kind needs the memory."""
        if self.kept is not None:
            self.kept.networks.clear()
            self.clear()

    def join(
        self,
        rank_info: RankInfo,
        interfaces: NetworkInterfaces,
        timeouts: Timeouts,
        backend: CollectiveBackend | None = None,
    ) -> Group:
        """Connect to the other ranks of a group.

        Parameters
        ----------
        backend : CollectiveBackend or None
            Collective operations of the group; None: those of the framework.
        """
        # An error while the group forms must not be blamed on the last group's ranks.
        self.group = Group()
        backend = backend or self._loaded_code[0]
        self.group = join_group(
            rank_info, backend, lambda address: self.send(master=address), interfaces, timeouts
        )
        self.heartbeat()
        return self.group

    def build_network(self, member: Member, sample: Samples) -> TrainableNetwork:
        """Return a fresh network of a member for the present group, with weights from its seed."""
        framework, functions = self._loaded_code
        # Other networks have left names and states of global generators.
        self.start_layer(member)
        network = framework.build(member, functions, self.group, sample)
        self.heartbeat()
        return network

    def chain(self, ensemble: Ensemble) -> tuple[Framework, Chain]:
        """Return the framework, and a member's network as a chain of layers; load no samples.

        Raises
        ------
        BadInputError
            If the network is not a chain.
        """
        self._release_kept()
        framework, functions = self._code or self.load_code(ensemble)
        self.group = Group()
        (member,) = ensemble.members
        self.prepare(member)
        chain = framework.chain(member, functions)
        self.heartbeat()
        return framework, chain

    def start_layer(self, member: Member) -> None:
        """Release the last layer, and seed all generators for a member's next one."""
        self._loaded_code[0].clear()
        self.prepare(member)

    def prepare(self, member: Member) -> None:
        """Choose the device, limit threads, choose algorithms and seed all generators for a member."""
        place = self.binding.cores, self.binding.device
        self._loaded_code[0].prepare(*place, member.seed, deterministic=member.deterministic)

    def prepare_data(self) -> None:
        """Seed all generators for ``input_fn``."""
        self._loaded_code[0].prepare(self.binding.cores, self.binding.device, DATA_SEED)

    @property
    def patience(self) -> Patience:
        """Patience with a file system that does not answer; it sends heartbeats, and checks the lease."""
        return Patience(
            on_pause=self.heartbeat, before_attempt=self.lease.check if self.lease else lambda: None
        )

    def writer(self, task: TaskMessage) -> EventWriter:
        """Return the writer of a task's events, which tells the driver the file's length after each."""

        def announce(length: int) -> None:
            with suppress(ConnectionError):
                self.send(written=length)

        return EventWriter(task.events, task.name, task.round, announce, self.patience)

    def reporter(self, task: TaskMessage) -> Any:
        """Return rank 0's writer of events; on other ranks one that discards them."""
        return self.writer(task) if self.group.rank == 0 else SilentWriter()

    def heartbeat(self) -> None:
        """Send a heartbeat, at most one every `HEARTBEAT_EVERY_S`."""
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_EVERY_S
            self.send()

    def clear(self) -> None:
        """Release the resources of the last member, unless networks are kept for later tasks."""
        if self._code is not None and not (self.kept and self.kept.networks):
            self._code[0].clear()

    def remove_temporary_files(self) -> None:
        """Remove files that the framework has left in the node's temporary folder."""
        if self._code is not None:
            self._code[0].remove_temporary_files()

    def _open(
        self,
        data: WholeData | PartitionedData,
        member: Member,
        rank_info: RankInfo,
        share: InputShare,
        stack: ExitStack,
        interfaces: NetworkInterfaces = ANY_INTERFACES,
        timeouts: Timeouts = USUAL_TIMEOUTS,
        *,
        partial: bool,
    ) -> tuple[Loader, Loader]:
        """Return loaders of the training and of the validation samples, which the stack closes."""
        if isinstance(data, PartitionedData):
            loaders = data.open(self.group, rank_info, member, interfaces, timeouts, partial=partial)
        else:
            loaders = data.open(rank_info, member, share)
        for loader in loaders:
            stack.callback(loader.close)
        return loaders

    def load_code(self, ensemble: Ensemble) -> tuple[Framework, UserFunctions]:
        """Load the framework, and the user's functions."""
        framework = load_framework(ensemble.framework)
        # Before the import of the user's modules, which may draw random data.
        framework.prepare(self.binding.cores, self.binding.device, DATA_SEED)
        self._code = framework, load_functions(ensemble)
        return self._code

    @property
    def _loaded_code(self) -> tuple[Framework, UserFunctions]:
        assert self._code is not None
        return self._code
