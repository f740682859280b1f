"""Tensors between the ranks of a group, directly from rank to rank, while they compute.

A thread for each other rank sends, and one receives: what a rank has handed over is on its way while it
computes, and what arrives is taken in at once. No rank waits for another one to take its tensors, so that no
circle of waiting ranks can form; memory is bounded since a virtual worker has N_m minibatches in flight.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hetctl.methods.pipeline.stages import SLOTS
from hetctl.model.serialization import decode, encode
from hetctl.model.site import NetworkInterfaces, Timeouts
from hetctl.runtime.frameworks.stage_network import DeviceTensor, PassedTensor, Tensor, TensorMemory
from hetctl.runtime.interfaces import control_address
from hetctl.runtime.transport import Address, Connection, Listener, connect
from hetctl.runtime.worker.group import Group, LostPeerError, RankInfo, all_gather

POLL_S = 0.2
"""Seconds between two checks of the accepting thread whether the transport was closed."""
LEAST_SHARED_BYTES = 4096
"""Size from which tensors go through shared memory: smaller ones fit into the message's packet."""
LOST = "lost"
"""Kind of the message that says that another rank has ended."""
Handles = tuple[str | None, ...]
"""For each tensor of a message its handle, with which the other rank opens it; None: it gets a copy."""
CLOSE: dict[str, Any] = {}
"""Last message over a connection: its end is not the loss of a rank."""


@dataclass(frozen=True)
class TensorMessage:
    """A message with tensors.

    Parameters
    ----------
    fields : mapping
        Values of JSON types.
    tensors : tuple of PassedTensor
        Activations and gradients may be tensors of a GPU; all others are arrays.
    """

    sender: int
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[Any, ...] = ()


@dataclass
class SentBytes:
    """Bytes of tensors that a rank has sent to other ranks.

    Parameters
    ----------
    within_node, between_nodes : dict of str to int
        Bytes by kind of message, to ranks of the same node and of others.
    """

    within_node: dict[str, int] = field(default_factory=dict)
    between_nodes: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, size: int, *, same_node: bool) -> None:
        """Add a message."""
        sizes = self.within_node if same_node else self.between_nodes
        sizes[kind] = sizes.get(kind, 0) + size


class P2PTransport:
    """Exchange of messages between the ranks of a group; messages of one sender arrive in their order.

    Parameters
    ----------
    nodes : sequence of str
        Node of each rank; ranks of one node exchange tensors through its memory, or open those on a GPU.
    queues : mapping of str to queue
        Queue for each kind of message; other kinds go into `inbox`.
    memory : TensorMemory
        Memory of activations and gradients on this rank.

    Attributes
    ----------
    inbox : queue of TensorMessage
        Messages in the order of their arrival. The kind `LOST` says that a rank has ended.
    """

    def __init__(
        self,
        group: Group,
        rank_info: RankInfo,
        nodes: Sequence[str],
        interfaces: NetworkInterfaces,
        timeouts: Timeouts,
        queues: Mapping[str, queue.SimpleQueue[TensorMessage]],
        memory: TensorMemory,
    ) -> None:
        self.rank, self._sent = group.rank, SentBytes()
        self._counting = threading.Lock()
        self.inbox: queue.SimpleQueue[TensorMessage] = queue.SimpleQueue()
        self._queues = dict(queues)
        self._nodes = tuple(nodes)
        self._memory = memory
        self._openers = openers(group, self._nodes, self._memory)
        self._timeouts = timeouts
        self._closed = threading.Event()
        self._identity = rank_info.identity
        self._listener = Listener(rank_info.key, control_address(interfaces.control), self._identity)
        addresses = all_gather(group, encode(self._listener.address))
        self._peers = [decode(Address, address) for address in addresses]
        self._senders: dict[int, _PeerSender] = {}
        self._connecting = threading.Lock()
        self._acceptor = threading.Thread(target=self._accept, name="p2p-in", daemon=True)
        self._acceptor.start()

    def send(self, target: int, kind: str, tensors: Sequence[PassedTensor] = (), /, **fields: Any) -> None:
        """Send a message in the background; its tensors must not change any more."""
        message = TensorMessage(self.rank, kind, fields, tuple(tensors))
        if target == self.rank:
            self._deliver(message)
            return
        same_node = self._nodes[target] == self._nodes[self.rank]
        with self._counting:
            self._sent.count(kind, sum(tensor.nbytes for tensor in tensors), same_node=same_node)
        # By the thread that computes: while a framework exports a tensor, nobody may use it.
        handles = tuple(self._handle(one, target) for one in message.tensors)
        self._sender_to(target, same_node=same_node).put((message, handles))

    def _handle(self, tensor: PassedTensor, target: int) -> str | None:
        """Return a handle for a large tensor that the target can open."""
        is_opened = target in self._openers and tensor.nbytes >= LEAST_BYTES
        return self._memory.exported(tensor) if is_opened else None

    def take_sent(self) -> SentBytes:
        """Return the bytes sent since the last call."""
        with self._counting:
            sent, self._sent = self._sent, SentBytes()
        return sent

    def close(self) -> None:
        """End all threads after everything is sent; call it only when no rank waits for another one."""
        for sender in self._senders.values():
            sender.close()
        self._closed.set()
        self._acceptor.join()
        self._listener.close()

    def _sender_to(self, target: int, *, same_node: bool) -> _PeerSender:
        # Stage and server of a rank send from threads of their own.
        with self._connecting:
            if target not in self._senders:
                self._senders[target] = _PeerSender(
                    self._connected(target), self.fail, self._memory, shares_memory=same_node
                )
            return self._senders[target]

    def _connected(self, target: int) -> Connection:
        try:
            return connect(self._peers[target], self.rank, self._timeouts.meeting_s, self._identity)
        except ConnectionError as error:
            raise LostPeerError(f"lost rank {target} of the group: {error}") from None

    def _deliver(self, message: TensorMessage) -> None:
        self._queues.get(message.kind, self.inbox).put(message)

    def fail(self, reason: str) -> None:
        """Have the rank's threads that receive messages raise LostPeerError."""
        lost = TensorMessage(self.rank, LOST, {"reason": reason})
        for each in {id(each): each for each in (self.inbox, *self._queues.values())}.values():
            each.put(lost)

    def _accept(self) -> None:
        while not self._closed.is_set():
            with suppress(TimeoutError):
                sender, connection = self._listener.wait(POLL_S)
                receiver = _Receiver(sender, connection, self._deliver, self.fail, self._memory)
                threading.Thread(target=receiver.run, name=f"p2p-from-{sender}", daemon=True).start()


def receive(
    messages: queue.SimpleQueue[TensorMessage], timeout_s: float | None = None
) -> TensorMessage | None:
    """Return the next message of a queue; None if none arrives in time.

    Raises
    ------
    LostPeerError
        If a rank has ended.
    """
    try:
        message = messages.get(timeout=timeout_s) if timeout_s != 0 else messages.get_nowait()
    except queue.Empty:
        return None
    if message.kind == LOST:
        raise LostPeerError(f"lost another rank of the group: {message.fields['reason']}")
    return message


class _PeerSender:
    """Sender to one other rank: a thread that sends messages in their order."""

    def __init__(
        self,
        connection: Connection,
        fail: Callable[[str], None],
        memory: TensorMemory,
        *,
        shares_memory: bool,
    ) -> None:
        self._connection, self._fail, self._memory = connection, fail, memory
        self._slots = SharedSlots() if shares_memory else None
        self._messages: queue.SimpleQueue[tuple[TensorMessage, Handles] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="p2p-out", daemon=True)
        self._thread.start()

    def put(self, message: tuple[TensorMessage, Handles]) -> None:
        self._messages.put(message)

    def close(self) -> None:
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._send_next():
                pass
            self._connection.send(CLOSE)
            self._await_end()
        except OSError as error:
            self._fail(str(error))
        finally:
            self._connection.close()
            if self._slots is not None:
                self._slots.close()

    def _send_next(self) -> bool:
        """Wait for a message and send it; false: there is none. Afterwards nobody refers to its tensors."""
        message = self._messages.get()
        if message is not None:
            self._send(*message)
        return message is not None

    def _send(self, message: TensorMessage, handles: Handles) -> None:
        described: list[Any] = list(handles)
        copied = [at for at, handle in enumerate(handles) if handle is None]
        tensors = tuple(np.ascontiguousarray(self._memory.array(message.tensors[at])) for at in copied)
        for at, tensor in zip(copied, tensors, strict=True):
            described[at] = [list(tensor.shape), tensor.dtype.str]
        header = {"kind": message.kind, "fields": dict(message.fields), "tensors": described}
        if self._slots is not None and sum(t.nbytes for t in tensors) >= LEAST_SHARED_BYTES:
            for descriptor in self._connection.arrived():
                self._slots.release(descriptor)
            # The other rank's thread takes what comes in at once, whatever that rank computes.
            while not self._slots.has_room:
                self._slots.release(self._connection.receive())
            self._connection.send({**header, "slot": encode(self._slots.fill(tensors))})
            return
        self._connection.send(header)
        for tensor in tensors:
            self._connection.send_bytes(_bytes_of(tensor))

    def _await_end(self) -> None:
        """Wait until the other rank has received everything: it closes the connection after `CLOSE`."""
        with suppress(ConnectionError):
            while True:
                self._connection.receive()


class _Receiver:
    """Thread that receives the messages of one other rank."""

    def __init__(
        self,
        sender: int,
        connection: Connection,
        deliver: Callable[[TensorMessage], None],
        fail: Callable[[str], None],
        memory: TensorMemory,
    ) -> None:
        self._sender, self._connection = sender, connection
        self._deliver, self._fail = deliver, fail
        self._memory = memory
        self._slots = SlotReader()

    def run(self) -> None:
        try:
            while (header := self._connection.receive()) != CLOSE:
                self._deliver(self._received(header))
        except (OSError, RuntimeError) as error:
            self._fail(f"rank {self._sender}: {error}")
        finally:
            self._connection.close()
            self._slots.close()

    def _received(self, header: Any) -> TensorMessage:
        tensors = tuple(map(self._tensor, header["tensors"]))
        copied = tuple(tensor for tensor in tensors if isinstance(tensor, np.ndarray))
        if "slot" in header:
            address = decode(SlotAddress, header["slot"])
            self._slots.read(address, copied)
            self._connection.send(address.descriptor)
        else:
            for tensor in copied:
                self._connection.receive_bytes(_bytes_of(tensor))
        return TensorMessage(self._sender, header["kind"], header["fields"], tensors)

    def _tensor(self, described: Any) -> PassedTensor:
        """Open a tensor where it is, or return an array for its values."""
        if isinstance(described, str):
            return self._memory.opened(described)
        shape, name = described
        return self._memory.empty(shape, np.dtype(name))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous array."""
    return tensor.reshape(-1).view(np.uint8).data


LEAST_BYTES = 1 << 20
"""Size from which a tensor is opened sooner than it is copied to the node's memory and from there."""


def openers(group: Group, nodes: Sequence[str], memory: TensorMemory) -> frozenset[int]:
    """Return the other ranks that can open tensors of this one: found by trying.

    Whether GPUs reach each other, see each other, and may share memory depends on links, drivers, containers
    and the step. All ranks of the group must call this.

    Parameters
    ----------
    nodes : sequence of str
        Node of each rank.
    """
    trial = memory.filled(group.rank, 1)
    handles = all_gather(group, _handle(memory, trial) or "")
    if not any(handles):
        return frozenset()
    of_node = {rank: handle for rank, handle in enumerate(handles) if nodes[rank] == nodes[group.rank]}
    opened = [
        rank
        for rank, handle in of_node.items()
        if handle and rank != group.rank and _opens(memory, handle, rank)
    ]
    # The trial stays in memory until all have tried.
    opened_by = all_gather(group, opened)
    return frozenset(rank for rank, others in enumerate(opened_by) if group.rank in others)


def _handle(memory: TensorMemory, trial: DeviceTensor | None) -> str | None:
    # Allocators with pools of the driver, which users can choose, share nothing.
    with suppress(RuntimeError):
        return None if trial is None else memory.exported(trial)
    return None


def _opens(memory: TensorMemory, handle: str, value: float) -> bool:
    try:
        found = memory.array(memory.opened(handle))
    except RuntimeError:
        return False
    return bool(np.all(found == value))


@dataclass(frozen=True)
class SlotAddress:
    """Place of a slot, as another process of the node finds it.

    Parameters
    ----------
    pid, descriptor : int
        Process that owns the slot, and its file descriptor there.
    size : int
        Bytes of the slot.
    """

    pid: int
    descriptor: int
    size: int


class SharedSlots:
    """Slots of one sender, each of which holds the tensors of one message until they are received.

    There are at most `SLOTS`, which grow with the messages: one is filled while the other is read. The memory
    has no name in any file system, so that nothing is left of processes that are killed.
    """

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._free: list[int] = []

    @property
    def has_room(self) -> bool:
        """True if a slot is free, or one can be made."""
        return bool(self._free) or len(self._maps) < SLOTS

    def fill(self, tensors: tuple[Tensor, ...]) -> SlotAddress:
        """Copy tensors one after another into a free slot; there must be room."""
        size = sum(tensor.nbytes for tensor in tensors)
        descriptor = self._take(size)
        place = self._maps[descriptor]
        start = 0
        for tensor in tensors:
            np.copyto(np.ndarray(tensor.shape, tensor.dtype, place, start), tensor)
            start += tensor.nbytes
        return SlotAddress(os.getpid(), descriptor, len(place))

    def release(self, descriptor: int) -> None:
        """Use a slot again: its tensors are received."""
        self._free.append(descriptor)

    def close(self) -> None:
        """Release the memory; receivers may still have it mapped."""
        for descriptor, place in self._maps.items():
            place.close()
            os.close(descriptor)
        self._maps.clear()

    def _take(self, size: int) -> int:
        if not self._free:
            descriptor = os.memfd_create("hetctl-tensors")
        else:
            descriptor = max(self._free, key=lambda free: len(self._maps[free]))
            self._free.remove(descriptor)
            if len(self._maps[descriptor]) >= size:
                return descriptor
            self._maps[descriptor].close()
        os.ftruncate(descriptor, size)
        self._maps[descriptor] = mmap.mmap(descriptor, size)
        return descriptor


class SlotReader:
    """Reader of the slots of one sender on the same node."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def read(self, address: SlotAddress, into: tuple[Tensor, ...]) -> None:
        """Copy the tensors of a slot into arrays of their shapes and types.

        Raises
        ------
        OSError
            If this process may not read the sender's memory.
        """
        place = self._maps.get(address.descriptor)
        if place is None or len(place) < address.size:
            place = self._maps[address.descriptor] = _mapped(address)
        start = 0
        for tensor in into:
            np.copyto(tensor, np.ndarray(tensor.shape, tensor.dtype, place, start))
            start += tensor.nbytes

    def close(self) -> None:
        """Release the memory."""
        for place in self._maps.values():
            place.close()
        self._maps.clear()


def _mapped(address: SlotAddress) -> mmap.mmap:
    with Path(f"/proc/{address.pid}/fd/{address.descriptor}").open("rb") as file:
        return mmap.mmap(file.fileno(), address.size, prot=mmap.PROT_READ)
