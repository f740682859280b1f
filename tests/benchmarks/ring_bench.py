"""Bytes per second through the ring of shared memory, and by ``memcpy`` of the same batches.

One producer copies batches into the ring, one reader in another process touches every page of each. Both
figures of a round are taken one after the other, so that what else the machine does hits them alike.

    python tests/benchmarks/ring_bench.py
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tables import Figure, Table

from hetctl.runtime.data.sharing.ring import Ring, RingShape

BATCH_BYTES = 6_000_000
BATCHES, SLOTS, ROUNDS = 200, 8, 7
SHARED_MEMORY = Path("/dev/shm")
TIMEOUT_S = 60.0

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Round:
    """Bytes/s of either way."""

    ring: float
    memcpy: float

    @property
    def ratio(self) -> float:
        return self.memcpy / self.ring


def rounds(count: int = ROUNDS, batches: int = BATCHES) -> list[Round]:
    """Measure, after one round that does not count: it lets the kernel hand out all pages."""
    sources = [np.random.default_rng(seed).integers(0, 256, BATCH_BYTES, np.uint8) for seed in range(4)]
    copies = [np.zeros(BATCH_BYTES, np.uint8) for _ in range(SLOTS)]
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        path = Path(folder) / "ring"
        with closing(Ring.create(path, RingShape(SLOTS, BATCH_BYTES, 1), TIMEOUT_S)) as ring:
            context = multiprocessing.get_context("fork")
            arrived = context.Semaphore(0)
            reader = context.Process(target=_read, args=(path, batches, count + 1, arrived), daemon=True)
            reader.start()
            found = [
                Round(_through_ring(ring, sources, batches, arrived), _copied(sources, copies, batches))
                for _ in range(count + 1)
            ]
            reader.join()
    return found[1:]


def _through_ring(ring: Ring, sources: list[Bytes], batches: int, arrived: object) -> float:
    """Return bytes/s until the reader has seen the last batch."""
    began = time.perf_counter()
    for index in range(batches):
        position = ring.claim(TIMEOUT_S)
        np.copyto(ring.buffer(position), sources[index % len(sources)])
        ring.publish(position, BATCH_BYTES)
    arrived.acquire()
    return batches * BATCH_BYTES / (time.perf_counter() - began)


def _read(path: Path, batches: int, rounds: int, arrived: object) -> None:
    with closing(Ring(path)) as ring:
        first = ring.register_reader(0)
        for position in range(first, rounds * batches):
            ring.read(position, TIMEOUT_S)[::4096].max()
            ring.release(position)
            if (position + 1) % batches == 0:
                arrived.release()
        ring.unregister_reader()


def _copied(sources: list[Bytes], copies: list[Bytes], batches: int) -> float:
    began = time.perf_counter()
    for index in range(batches):
        np.copyto(copies[index % len(copies)], sources[index % len(sources)])
    return batches * BATCH_BYTES / (time.perf_counter() - began)


def table(quick: bool = False) -> Table:
    """Set the medians out."""
    found = rounds(3 if quick else ROUNDS)
    ways = {"ring": [r.ring for r in found], "memcpy": [r.memcpy for r in found]}
    rows = tuple(
        (way, *(f"{value / 1e9:.2f}" for value in (min(rates), statistics.median(rates), max(rates))))
        for way, rates in ways.items()
    )
    return Table(
        "Bytes through the ring",
        ("GB/s", "least", "median", "most"),
        rows,
        (
            Figure(
                "memcpy over the ring, median of the rounds", statistics.median(r.ratio for r in found), 2.0
            ),
        ),
        f"{BATCHES} batches of {BATCH_BYTES / 1e6:g} MB, {SLOTS} slots, {len(found)} rounds.",
    )


def main() -> int:
    """Print the table; exit code 1: the bar is passed."""
    result = table("--quick" in sys.argv)
    print(result)
    return 0 if all(figure.holds for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
