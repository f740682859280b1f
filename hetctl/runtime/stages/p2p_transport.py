"""Tensors between the ranks of a group, directly from rank to rank, while they compute.

Each rank has a thread per other rank to send, and one to receive: tensors travel while the rank computes, and
what arrives is taken in at once. No rank waits for another one to take its tensors, so ranks cannot deadlock;
memory is bounded since a virtual worker has N_m minibatches in flight.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from hetctl.methods.pipeline.stages import SLOTS
from hetctl.model.serialization import decode, encode
from hetctl.model.site import NetworkInterfaces, Timeouts
from hetctl.model.values import dataclass
from hetctl.runtime.frameworks.stage_network import PassedTensor, Tensor, TensorMemory
from hetctl.runtime.interfaces import control_address
from hetctl.runtime.transport import Address, Connection, Listener, connect
from hetctl.runtime.worker.group import Group, LostPeerError, RankInfo, all_gather

POLL_S = 0.2
"""Seconds between the accepting thread's checks for the end of the transport."""
LEAST_SHARED_BYTES = 4096
"""Size in bytes from which tensors go through shared memory; smaller ones fit into the message."""
LOST = "lost"
"""Kind of the message that reports the end of another rank."""
Handles = tuple[str | None, ...]
"""Handle with which the other rank opens each tensor of a message; None: it gets a copy."""
WITHIN_NODE, BETWEEN_NODES = "within_node", "between_nodes"
"""Ways on which bytes are sent, as in `StageReport`."""
CLOSE: dict[str, Any] = {}
"""Last message of a connection: its end then is not the loss of a rank."""


@dataclass(frozen=True)
class TensorMessage:
    """A message with tensors.

    Parameters
    ----------
    fields : mapping
        Values of JSON types.
    tensors : tuple of PassedTensor
        Activations and gradients may be on a GPU; all others are arrays.
    """

    sender: int
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[Any, ...] = ()


Outgoing = queue.SimpleQueue[tuple[TensorMessage, Handles] | None]
"""Messages to one other rank; None: there are no more."""


class P2PTransport:
    """Exchange of messages between the ranks of a group; messages of one sender arrive in their order.

    Parameters
    ----------
    nodes : sequence of str
        Node of each rank; ranks of one node share memory, or open each other's tensors on a GPU.
    queues : mapping of str to queue
        Queue for each kind of message; other kinds go into `inbox`.
    memory : TensorMemory
        Memory of activations and gradients on this rank.

    Attributes
    ----------
    inbox : queue of TensorMessage
        Messages in the order of their arrival; the kind `LOST` reports the end of a rank.
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
        self.rank = group.rank
        self.inbox: queue.SimpleQueue[TensorMessage] = queue.SimpleQueue()
        self._queues, self._nodes, self._memory = dict(queues), tuple(nodes), memory
        self._openers = openers(group, self._nodes, memory)
        self._meeting_s, self._identity = timeouts.meeting_s, rank_info.identity
        self._closed = threading.Event()
        self._listener = Listener(rank_info.key, control_address(interfaces.control), self._identity)
        addresses = all_gather(group, encode(self._listener.address))
        self._peers = [decode(Address, address) for address in addresses]
        self._sent: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._outgoing: dict[int, Outgoing] = {}
        self._senders: list[threading.Thread] = []
        # A rank's stage and server send from different threads.
        self._sending = threading.Lock()
        self._acceptor = threading.Thread(target=self._accept, name="p2p-in", daemon=True)
        self._acceptor.start()

    def send(self, target: int, kind: str, tensors: Sequence[PassedTensor] = (), /, **fields: Any) -> None:
        """Send a message in the background; its tensors must not change afterwards."""
        message = TensorMessage(self.rank, kind, fields, tuple(tensors))
        if target == self.rank:
            self._deliver(message)
            return
        way = WITHIN_NODE if self._shares_node(target) else BETWEEN_NODES
        with self._sending:
            self._sent[way][kind] += sum(tensor.nbytes for tensor in tensors)
            if target not in self._outgoing:
                self._outgoing[target] = self._connected(target)
        # In the computing thread: nobody may use a tensor while a framework exports it.
        handles = tuple(
            self._memory.exported(one)
            if target in self._openers and one.nbytes >= LEAST_OPENED_BYTES
            else None
            for one in message.tensors
        )
        self._outgoing[target].put((message, handles))

    def take_sent(self) -> dict[str, dict[str, int]]:
        """Return the bytes of tensors sent to other ranks since the last call, by way and kind of message."""
        with self._sending:
            sent, self._sent = self._sent, defaultdict(Counter)
        return {way: dict(by_kind) for way, by_kind in sent.items()}

    def close(self) -> None:
        """End all threads after everything is sent; call it only when no rank waits for another one."""
        for outgoing in self._outgoing.values():
            outgoing.put(None)
        for sender in self._senders:
            sender.join()
        self._closed.set()
        self._acceptor.join()
        self._listener.close()

    def fail(self, reason: str) -> None:
        """Make the rank's threads that receive messages raise LostPeerError."""
        lost = TensorMessage(self.rank, LOST, {"reason": reason})
        for each in {id(each): each for each in (self.inbox, *self._queues.values())}.values():
            each.put(lost)

    def _shares_node(self, rank: int) -> bool:
        return self._nodes[rank] == self._nodes[self.rank]

    def _deliver(self, message: TensorMessage) -> None:
        self._queues.get(message.kind, self.inbox).put(message)

    def _connected(self, target: int) -> Outgoing:
        """Connect to a rank; return the queue of messages that a thread sends to it."""
        try:
            connection = connect(self._peers[target], self.rank, self._meeting_s, self._identity)
        except ConnectionError as error:
            raise LostPeerError(f"lost rank {target} of the group: {error}") from None
        outgoing: Outgoing = queue.SimpleQueue()
        slots = SharedSlots() if self._shares_node(target) else None
        sender = threading.Thread(
            target=self._send_all, args=(outgoing, connection, slots), name="p2p-out", daemon=True
        )
        sender.start()
        self._senders.append(sender)
        return outgoing

    def _send_all(self, outgoing: Outgoing, connection: Connection, slots: SharedSlots | None) -> None:
        try:
            while self._send_next(outgoing, connection, slots):
                pass
            connection.send(CLOSE)
            # The other rank closes the connection when it has received everything.
            with suppress(ConnectionError):
                while True:
                    connection.receive()
        except OSError as error:
            self.fail(str(error))
        finally:
            connection.close()
            if slots is not None:
                slots.close()

    def _send_next(self, outgoing: Outgoing, connection: Connection, slots: SharedSlots | None) -> bool:
        """Send the next message, then drop its tensors; return false if there are no more."""
        if (next_one := outgoing.get()) is None:
            return False
        message, handles = next_one
        described: list[Any] = list(handles)
        copied = [at for at, handle in enumerate(handles) if handle is None]
        tensors = tuple(np.ascontiguousarray(self._memory.array(message.tensors[at])) for at in copied)
        for at, tensor in zip(copied, tensors, strict=True):
            described[at] = [list(tensor.shape), tensor.dtype.str]
        header = {"kind": message.kind, "fields": dict(message.fields), "tensors": described}
        if slots is not None and sum(t.nbytes for t in tensors) >= LEAST_SHARED_BYTES:
            for descriptor in connection.arrived():
                slots.release(descriptor)
            # The other rank's thread receives at once, whatever that rank computes.
            while not slots.has_room:
                slots.release(connection.receive())
            connection.send({**header, "slot": slots.fill(tensors)})
            return True
        connection.send(header)
        for tensor in tensors:
            connection.send_bytes(_bytes_of(tensor))
        return True

    def _accept(self) -> None:
        while not self._closed.is_set():
            with suppress(TimeoutError):
                sender, connection = self._listener.wait(POLL_S)
                arguments = sender, connection
                threading.Thread(
                    target=self._receive_all, args=arguments, name=f"p2p-from-{sender}", daemon=True
                ).start()

    def _receive_all(self, sender: int, connection: Connection) -> None:
        slots: dict[int, mmap.mmap] = {}
        try:
            while (header := connection.receive()) != CLOSE:
                about = sender, header["kind"], header["fields"]
                self._deliver(TensorMessage(*about, self._received(header, connection, slots)))
        except (OSError, RuntimeError) as error:
            self.fail(f"rank {sender}: {error}")
        finally:
            connection.close()
            for place in slots.values():
                place.close()

    def _received(
        self, header: Any, connection: Connection, slots: dict[int, mmap.mmap]
    ) -> tuple[PassedTensor, ...]:
        """Return the tensors of a message: opened where they are, or copied."""
        tensors = tuple(
            self._memory.opened(described)
            if isinstance(described, str)
            else self._memory.empty(described[0], np.dtype(described[1]))
            for described in header["tensors"]
        )
        copied = [tensor for tensor in tensors if isinstance(tensor, np.ndarray)]
        if "slot" not in header:
            for tensor in copied:
                connection.receive_bytes(_bytes_of(tensor))
            return tensors
        pid, descriptor, size = header["slot"]
        if descriptor not in slots or len(slots[descriptor]) < size:
            with Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as file:
                slots[descriptor] = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        for tensor, place in _in_slot(slots[descriptor], copied):
            np.copyto(tensor, place)
        connection.send(descriptor)
        return tensors


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


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(np.uint8).data


LEAST_OPENED_BYTES = 1 << 20
"""Size in bytes from which opening a tensor takes less time than a copy through the node's memory."""


def openers(group: Group, nodes: Sequence[str], memory: TensorMemory) -> frozenset[int]:
    """Return the other ranks that can open this rank's tensors, found by trying.

    It depends on links, drivers, containers and the step. All ranks of the group must call this.

    Parameters
    ----------
    nodes : sequence of str
        Node of each rank.
    """
    trial, handle = memory.filled(group.rank, 1), None
    # Users may choose an allocator with pools of the driver, which shares nothing.
    with suppress(RuntimeError):
        handle = None if trial is None else memory.exported(trial)
    handles = all_gather(group, handle or "")
    if not any(handles):
        return frozenset()
    opened = [
        rank
        for rank, other in enumerate(handles)
        if other and rank != group.rank and nodes[rank] == nodes[group.rank] and _opens(memory, other, rank)
    ]
    # The trial stays in memory until all have tried.
    opened_by = all_gather(group, opened)
    return frozenset(rank for rank, others in enumerate(opened_by) if group.rank in others)


def _opens(memory: TensorMemory, handle: str, value: float) -> bool:
    try:
        return bool(np.all(memory.array(memory.opened(handle)) == value))
    except RuntimeError:
        return False


class SharedSlots:
    """Slots of one sender; each holds the tensors of one message until they are received.

    At most `SLOTS` grow with the messages: one is filled while the other is read. The memory has no name in
    any file system, so killed processes leave nothing.
    """

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._free: list[int] = []

    @property
    def has_room(self) -> bool:
        """True if a slot is free, or one can be made."""
        return bool(self._free) or len(self._maps) < SLOTS

    def fill(self, tensors: Sequence[Tensor]) -> tuple[int, int, int]:
        """Copy tensors one after another into a free slot, if there is room.

        Returns the slot's place for other processes of the node: process, its file descriptor, and bytes.
        """
        size = sum(tensor.nbytes for tensor in tensors)
        if self._free:
            descriptor = max(self._free, key=lambda free: len(self._maps[free]))
            self._free.remove(descriptor)
            if len(self._maps[descriptor]) < size:
                self._maps[descriptor].resize(size)
        else:
            descriptor = os.memfd_create("hetctl-tensors")
            os.ftruncate(descriptor, size)
            self._maps[descriptor] = mmap.mmap(descriptor, size)
        for tensor, place in _in_slot(self._maps[descriptor], tensors):
            np.copyto(place, tensor)
        return os.getpid(), descriptor, len(self._maps[descriptor])

    def release(self, descriptor: int) -> None:
        """Free a slot whose tensors are received."""
        self._free.append(descriptor)

    def close(self) -> None:
        """Release the memory; receivers may still have it mapped."""
        for descriptor, place in self._maps.items():
            place.close()
            os.close(descriptor)
        self._maps.clear()


def _in_slot(slot: mmap.mmap, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tensors, each with its place in a slot."""
    start = 0
    for tensor in tensors:
        yield tensor, np.ndarray(tensor.shape, tensor.dtype, slot, start)
        start += tensor.nbytes
