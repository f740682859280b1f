"""Transfer times between the devices of two ranks, over the transport that stages of a pipeline use."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hetctl.model.profile import LinkPoint
from hetctl.model.serialization import encode
from hetctl.model.site import Point
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.frameworks.stage_network import PassedTensor, Tensor, TensorMemory
from hetctl.runtime.stages.p2p_transport import P2PTransport, receive
from hetctl.runtime.worker.context import DATA_SEED, WorkerContext
from hetctl.runtime.worker.group import CollectiveBackend, all_gather
from hetctl.runtime.worker.hardware import MemoryGauge
from hetctl.runtime.worker.messages import Assignment
from hetctl.storage.profile_request import read_measurements

SIZES = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
"""Bytes of a message: activations of a minibatch have some 100 kB to 100 MB."""
WARM_UPS, TIMED = 2, 9

ITEM_BYTES = 4
"""Bytes of one number of a message."""
SENT, RECEIVED = "sent", "received"


def measure_links(assignment: Assignment, context: WorkerContext) -> None:
    """Measure the link between the two ranks of a group; rank 0 writes the result to its event file."""
    folder, rank_info = Path(assignment.task.folder), assignment.rank_info
    measurements = read_measurements(folder)
    kind, site = measurements.target(assignment.task.name).member, measurements.site
    group = context.join(rank_info, site.network, site.timeouts, CollectiveBackend())
    binding, memory, gauge = context.binding, TensorMemory(), MemoryGauge()
    if binding.device is not None:
        framework = load_framework(measurements.ensemble.framework)
        framework.prepare(binding.cores, binding.device, DATA_SEED)
        memory, gauge = framework.tensor_memory(), framework.memory_gauge(binding.device)
    nodes = tuple(all_gather(group, binding.node))
    transport = P2PTransport(group, rank_info, nodes, site.network, site.timeouts, {}, memory)
    points = tuple(measured_points(transport, memory, gauge.copy_s, context.heartbeat))
    result = LinkPoint(kind, nodes, time.time(), points)
    context.reporter(assignment.task).write("links", **encode(result))
    group.barrier_and_close()
    transport.close()


def measured_points(
    transport: P2PTransport,
    memory: TensorMemory,
    copy_s: Callable[[Tensor], float],
    heartbeat: Callable[[], None],
) -> Iterator[Point]:
    """Yield the bytes and median seconds of messages of all `SIZES`; both ranks call it.

    Parameters
    ----------
    memory : TensorMemory
        Memory of tensors on the device of this rank.
    copy_s : callable
        Function that returns the seconds to copy an array to the device, or back.
    heartbeat : callable
        Function called after each size.
    """
    # An acknowledgement takes half as long as an exchange of two small messages.
    answer_s = _median_s(transport, memory, np.zeros(1, np.float32)) / 2
    for size in SIZES:
        numbers = size // ITEM_BYTES
        array = np.ones(numbers, np.float32)
        tensor = memory.filled(1.0, numbers)
        both_s = _median_s(transport, memory, array if tensor is None else tensor)
        # The framework copies arrays itself, before and after their transfer.
        copies_s = 2 * copy_s(array) if tensor is None else 0.0
        yield float(size), max(both_s - answer_s, both_s / 2) + copies_s
        heartbeat()


def _median_s(transport: P2PTransport, memory: TensorMemory, tensor: PassedTensor) -> float:
    times = [_transfer_s(transport, memory, tensor) for _ in range(WARM_UPS + TIMED)]
    return statistics.median(times[WARM_UPS:])


def _transfer_s(transport: P2PTransport, memory: TensorMemory, tensor: PassedTensor) -> float:
    """Send a tensor from rank 0 to rank 1; return when rank 1 has it on its device."""
    began = time.perf_counter()
    if transport.rank == 0:
        transport.send(1, SENT, (tensor,))
        receive(transport.inbox)
    else:
        message = receive(transport.inbox)
        assert message is not None
        memory.received(message.tensors[0])
        transport.send(0, RECEIVED)
    return time.perf_counter() - began
