"""Ranks of a pipeline as processes: each runs one function with its place, and returns a value."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetctl.methods.pipeline.stage_costs import minibatches_held
from hetctl.model.pipelines import PipelineLayout, StagePlan
from hetctl.model.site import ANY_INTERFACES, USUAL_TIMEOUTS
from hetctl.runtime import transport
from hetctl.runtime.frameworks.stage_network import TensorMemory
from hetctl.runtime.stages.p2p_transport import P2PTransport
from hetctl.runtime.stages.parameter_server import TO_SERVER, WaveServer
from hetctl.runtime.worker.group import CollectiveBackend, RankInfo, join_group

FORK = multiprocessing.get_context("fork")


@dataclass
class Rank:
    """What a rank of a pipeline has when its group has formed."""

    group: Any
    transport: P2PTransport
    server: WaveServer
    memory: TensorMemory


def layout_of(workers, stages, layers, in_flight, distance=0, held=None):
    """Return a layout of equal virtual workers; rank after rank, stage after stage."""
    bounds = [round(layers * at / stages) for at in range(stages + 1)]
    most = [minibatches_held(stages - 1 - at, in_flight, is_first=not at) for at in range(stages)]
    plans = tuple(
        tuple(
            StagePlan(worker * stages + at, bounds[at], bounds[at + 1] - 1, held or most[at])
            for at in range(stages)
        )
        for worker in range(workers)
    )
    servers = tuple(layer % (workers * stages) for layer in range(layers)) if workers > 1 else ()
    return PipelineLayout(plans, in_flight, distance, servers)


def run_ranks(
    layout: PipelineLayout,
    work: Callable[[Rank], Any],
    nodes=None,
    ends=(),
    memory=TensorMemory,
    identity=None,
) -> list[Any]:
    """Run a function on every rank, and return the values by rank; the first error is raised.

    Parameters
    ----------
    memory : callable
        Function called on each rank for its memory of tensors.
    ends : collection of int
        Ranks that end before the others, which therefore cannot part in order.
    identity : Identity, optional
        Identity of ranks that connect as if each were on a machine of its own.
    """
    size = sum(map(len, layout.workers))
    nodes = nodes or ["node1"] * size
    results, addresses = FORK.SimpleQueue(), [FORK.SimpleQueue() for _ in range(size)]

    def publish_address(address):
        for place in addresses[1:]:
            place.put(address)

    def run(rank):
        try:
            master = addresses[rank].get() if rank else None
            if identity:
                transport._connected_locally = _elsewhere
            rank_info = RankInfo(rank, size, "key", master, identity)
            group = join_group(
                rank_info, CollectiveBackend(), publish_address, ANY_INTERFACES, USUAL_TIMEOUTS
            )
            messages = queue.SimpleQueue()
            queues = dict.fromkeys(TO_SERVER, messages)
            tensors = memory()
            p2p = P2PTransport(group, rank_info, nodes, ANY_INTERFACES, USUAL_TIMEOUTS, queues, tensors)
            layers = [layer for layer, server in enumerate(layout.servers) if server == rank]
            server = WaveServer(p2p, messages, layers, [stages[0].rank for stages in layout.workers])
            value = work(Rank(group, p2p, server, tensors))
            if not ends:
                group.barrier_and_close()
                server.close()
                p2p.close()
            results.put((rank, value, ""))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))

    processes = [FORK.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    found = [results.get() for _ in range(size - len(ends))] + [(rank, None, "") for rank in ends]
    for process in processes:
        process.join()
    for _, _, error in found:
        assert not error, error
    return [value for _, value, _ in sorted(found, key=lambda one: one[0])]


def _elsewhere(name: str) -> socket.socket:
    raise ConnectionRefusedError(f"no {name} on this machine")
