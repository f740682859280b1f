"""Transfer times between two ranks, as stages of a pipeline exchange activations.

Between nodes over a connection of `hetctl.runtime.transport`, within a node through its memory. On GPUs the
copies from one GPU and to the other are part of a transfer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.profile import INTRA_NODE, LinkPoint
from hetctl.model.serialization import encode
from hetctl.model.site import Point, Site
from hetctl.runtime.data.sharing.node_folder import node_folder
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.interfaces import control_address
from hetctl.runtime.transport import Address, Connection, Listener, connect
from hetctl.runtime.worker.context import DATA_SEED, WorkerContext
from hetctl.runtime.worker.group import Group, NoCollectives, SingleRank, all_gather, join_group
from hetctl.runtime.worker.messages import Assignment
from hetctl.runtime.worker.reporting import reporter
from hetctl.storage.profile_request import Measurements, read_measurements

SIZES = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
"""Bytes of a message: activations of a minibatch have some 100 kB to 100 MB."""
WARM_UPS, TIMED = 2, 9

Bytes = npt.NDArray[np.uint8]


def measure_links(assignment: Assignment, context: WorkerContext) -> None:
    """Measure the link between the two ranks of a group; rank 0 writes the result to its event file."""
    folder, rank_info = Path(assignment.task.folder), assignment.rank_info
    measurements = read_measurements(folder)
    kind, site = measurements.target(assignment.task.name).member, measurements.site
    context.group = SingleRank()
    context.group = group = join_group(
        rank_info, NoCollectives(), context.publish_address, site.network, site.timeouts
    )
    nodes = tuple(all_gather(group, context.binding.node))
    with ExitStack() as stack:
        connection = stack.enter_context(_connected(group, rank_info.key, site))
        name = f"{folder.name}-{nodes[0]}-links"
        memory = stack.enter_context(_shared_memory(name, group)) if kind == INTRA_NODE else None
        end = LinkEnd(group.rank, connection, memory)
        points = tuple(measured_points(end, _copy_s(measurements, context), context.heartbeat))
    result = LinkPoint(kind, nodes, time.time(), points)
    reporter(assignment.task, group, context.send_written).write("links", **encode(result))
    group.barrier_and_close()


@dataclass(frozen=True)
class LinkEnd:
    """One end of a link: rank 0 sends, rank 1 receives and acknowledges.

    Parameters
    ----------
    memory : array or None
        Memory that both ranks map; None: the data go over the connection.
    """

    rank: int
    connection: Connection
    memory: Bytes | None = None

    def transfer(self, data: Bytes) -> None:
        """Send the data, or receive as many; return when the other end has done its part."""
        if self.rank == 0:
            self._send(data)
            self._wait()
        else:
            self._receive(data)
            self._notify()

    def _send(self, data: Bytes) -> None:
        if self.memory is None:
            self.connection.send_bytes(data.data)
        else:
            self.memory[: len(data)] = data
            self._notify()

    def _receive(self, data: Bytes) -> None:
        if self.memory is None:
            self.connection.receive_bytes(data.data)
        else:
            self._wait()
            data[:] = self.memory[: len(data)]

    def _notify(self) -> None:
        self.connection.send_bytes(memoryview(b"\0"))

    def _wait(self) -> None:
        self.connection.receive_bytes(memoryview(bytearray(1)))


def measured_points(
    end: LinkEnd, copy_s: Callable[[Bytes], float], heartbeat: Callable[[], None]
) -> Iterator[Point]:
    """Yield the bytes and median seconds of messages of all `SIZES`; both ranks call it.

    Parameters
    ----------
    copy_s : callable
        Function that returns the seconds in which an array is copied to or from the GPU.
    heartbeat : callable
        Function called after each size, as a heartbeat.
    """
    # An acknowledgement takes half of the time of an exchange of one byte.
    answer_s = _median_s(end, np.zeros(1, np.uint8)) / 2
    for size in SIZES:
        data = np.ones(size, np.uint8)
        both_s = _median_s(end, data)
        yield float(size), max(both_s - answer_s, both_s / 2) + 2 * copy_s(data)
        heartbeat()


def _median_s(end: LinkEnd, data: Bytes) -> float:
    return statistics.median([_transfer_s(end, data) for _ in range(WARM_UPS + TIMED)][WARM_UPS:])


def _transfer_s(end: LinkEnd, data: Bytes) -> float:
    began = time.perf_counter()
    end.transfer(data)
    return time.perf_counter() - began


def _copy_s(measurements: Measurements, context: WorkerContext) -> Callable[[Bytes], float]:
    binding = context.binding
    if binding.device is None:
        return lambda _data: 0.0
    framework = load_framework(measurements.ensemble.framework)
    framework.prepare(binding.cores, binding.device, DATA_SEED)
    return framework.memory_gauge(binding.device).copy_s


@contextmanager
def _connected(group: Group, key: str, site: Site) -> Iterator[Connection]:
    """Connect both ranks, over the interface of control connections."""
    listener = Listener(key, control_address(site.network.control)) if group.rank == 0 else None
    host, port = group.broadcast([listener.address.host, listener.address.port] if listener else None)
    meeting_s = site.timeouts.meeting_s
    if listener:
        connection: Connection = listener.wait(meeting_s)[1]
        listener.close()
    else:
        connection = connect(Address(host, port, key), group.rank, meeting_s)
    connection.limit_silence(site.timeouts.hang_s)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def _shared_memory(name: str, group: Group) -> Iterator[Any]:
    """Map a file in the memory of the node on both ranks."""
    with node_folder(name) as folder:
        path = folder / "message"
        if group.rank == 0:
            np.memmap(path, np.uint8, "w+", shape=(max(SIZES),)).flush()
        group.broadcast(True)
        yield np.memmap(path, np.uint8, "r+", shape=(max(SIZES),))
