"""Seconds in which a tensor reaches another rank of a pipeline, beside ``torch.distributed`` over Gloo.

Both ranks are processes of this machine. "Between nodes" they are told to be on two, so that tensors go over
TCP, as Gloo's do, here through the loopback interface: encrypted by TLS, as is usual, or in clear text.

    python tests/benchmarks/transport_bench.py [--quick]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from stage_memory_bench import in_a_process
from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from stage_ranks import layout_of, run_ranks

from hetctl.runtime.tls import new_certificate
from hetctl.runtime.transport import JobIdentity

KIB = 1024
SIZES = (4 * KIB, 64 * KIB, 1024 * KIB, 16 * 1024 * KIB, 64 * 1024 * KIB)
TURNS, WARM_UPS = 30, 5
ROUNDS = 3
"""Turns in each process pair, and how often all ways are measured, in changing order."""
WITHIN, BETWEEN, GLOO = "within a node", "between nodes", "Gloo"
IN_CLEAR = "between nodes, in clear"
OWN = (WITHIN, BETWEEN, IN_CLEAR)
KIND = "forward"


def table(quick: bool = False) -> Table:
    """Measure all ways and sizes."""
    found: dict[tuple[str, int], list[float]] = {}
    ways = list(WAYS)
    for turn in range(1 if quick else ROUNDS):
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            for size, seconds in zip(SIZES, WAYS[way](), strict=True):
                found.setdefault((way, size), []).append(seconds)
    medians = {key: statistics.median(values) for key, values in found.items()}
    rows = [
        (
            f"{size // KIB:,} KiB",
            *(f"{medians[way, size] * 1e3:.2f}" for way in WAYS),
            *(f"{medians[way, size] / medians[GLOO, size]:.2f}" for way in OWN),
        )
        for size in SIZES
    ]
    return Table(
        "Pipelines: a tensor from rank to rank",
        (
            "size",
            *(f"{way}, ms" for way in WAYS),
            *(f"{way} over Gloo" for way in OWN),
        ),
        tuple(rows),
        tuple(
            Figure(f"{WITHIN} over Gloo, {shown}", medians[WITHIN, size] / medians[GLOO, size], 1.0)
            for size, (shown, *_) in zip(SIZES[-2:], rows[-2:], strict=True)
        ),
        f"Half the time of a tensor there and another back, median of {TURNS} turns; medians of {ROUNDS} "
        "pairs of processes. Gloo receives into tensors that exist; hetctl's ranks know no shapes before.",
    )


def _within() -> list[float]:
    return in_a_process(_by_transport, ["node1", "node1"])


def _between() -> list[float]:
    return in_a_process(_by_transport, ["node1", "node2"], JobIdentity(new_certificate()))


def _in_clear() -> list[float]:
    return in_a_process(_by_transport, ["node1", "node2"], JobIdentity(new_certificate(), False))


def _gloo() -> list[float]:
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = list(pool.map(_by_gloo, (0, 1), (folder, folder)))
    return found[0]


WAYS: dict[str, Callable[[], list[float]]] = {
    WITHIN: _within,
    BETWEEN: _between,
    IN_CLEAR: _in_clear,
    GLOO: _gloo,
}


def _by_transport(nodes: list[str], identity: JobIdentity | None = None) -> list[float]:
    def work(rank: Any) -> list[float]:
        transport, other = rank.transport, 1 - rank.transport.rank

        def send(tensor: Any) -> None:
            transport.send(other, KIND, (tensor,))

        return _measured(send, lambda _: transport.inbox.get().tensors[0], transport.rank)

    return run_ranks(layout_of(1, 2, 2, 1), work, nodes=nodes, identity=identity)[0]


def _by_gloo(rank: int, folder: str) -> list[float]:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    def receive(into: Any) -> Any:
        distributed.recv(torch.from_numpy(into), 1 - rank)
        return into

    found = _measured(lambda tensor: distributed.send(torch.from_numpy(tensor), 1 - rank), receive, rank)
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def _measured(send: Callable[[Any], None], receive: Callable[[Any], Any], rank: int) -> list[float]:
    """Return the seconds of one way by size: rank 0 sends, and rank 1 sends back a tensor of its own."""
    medians = []
    for size in SIZES:
        own, into = np.full(size // 4, rank, np.float32), np.zeros(size // 4, np.float32)
        seconds = []
        for _ in range(WARM_UPS + TURNS):
            began = time.perf_counter()
            if rank == 0:
                send(own)
            received = receive(into)
            if rank == 1:
                send(own)
            seconds.append((time.perf_counter() - began) / 2)
            assert received[-1] == 1 - rank
        medians.append(statistics.median(seconds[WARM_UPS:]))
    return medians


if __name__ == "__main__":
    print(table("--quick" in sys.argv), flush=True)
