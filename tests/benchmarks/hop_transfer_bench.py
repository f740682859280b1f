"""Time of a hop between nodes over that of sending the same bytes through one socket.

Two agents on this machine, each with a store of its own, copy a state on the driver's order. Beside it a
process sends as many bytes from its memory to another, which receives them into memory that it reuses.

    python tests/benchmarks/hop_transfer_bench.py [--quick]
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from agent_bench import PATIENCE_S, ranks_on, until
from tables import Figure, Table

from hetctl.runtime.agent.messages import StoreOrder
from hetctl.runtime.data.sharing.node_folder import node_folder, state_folder
from hetctl.runtime.driver.rank_pool import RankPool
from hetctl.runtime.transport import LOCALHOST

SIZES = (1_000_000, 10_000_000, 100_000_000)
"""Bytes of a state."""
HELD = SIZES[-1]
"""The size that is held against the bar."""
ROUNDS = 21
SOURCE, TARGET = "n0", "n1"
RUN = f"hop-transfer-{os.getpid()}"


class PlainSocket:
    """Connection over which another process sends so many bytes as often as it is asked."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._memory = memoryview(bytearray(max(SIZES)))

    def seconds(self, size_bytes: int) -> float:
        """Return the time from the request to the last byte."""
        began = time.perf_counter()
        self._end.sendall(size_bytes.to_bytes(8, "big"))
        received = 0
        while received < size_bytes:
            received += self._end.recv_into(self._memory[received:size_bytes])
        return time.perf_counter() - began


@contextmanager
def plain_socket() -> Iterator[PlainSocket]:
    """Start the sender."""
    with socket.create_server((LOCALHOST, 0)) as listener:
        sender = get_context("fork").Process(target=_send_on_request, args=(listener,))
        sender.start()
        with socket.create_connection(listener.getsockname()) as end:
            yield PlainSocket(end)
        sender.join()


def _send_on_request(listener: socket.socket) -> None:
    end, _ = listener.accept()
    memory = memoryview(os.urandom(max(SIZES)))
    while request := end.recv(8):
        end.sendall(memory[: int.from_bytes(request, "big")])


@dataclass
class Hops:
    """Two nodes with their stores."""

    pool: RankPool
    source: Path
    target: Path

    def seconds(self, size_bytes: int, number: int) -> tuple[float, float]:
        """Return the time of a hop as the driver sees it, and as the agent reports it."""
        name = f"m-{number}"
        (self.source / name).write_bytes(os.urandom(size_bytes))
        began = time.perf_counter()
        self.pool.agents.fetch(TARGET, name, SOURCE)
        while not self.pool.reports:
            self.pool.wait(PATIENCE_S)
        seconds = time.perf_counter() - began
        (fetched,), self.pool.reports = self.pool.reports, []
        assert fetched.bytes == size_bytes, fetched.error
        self.pool.agents.forget([name], [SOURCE, TARGET])
        until(self.pool, lambda: not (self.source / name).exists() and not (self.target / name).exists())
        return seconds, fetched.duration_s


@contextmanager
def hops() -> Iterator[Hops]:
    """Start the agents of two nodes."""
    with (
        ranks_on(2, 1, None, sys.executable, StoreOrder(RUN, ())) as (pool, _),
        node_folder(state_folder(RUN, SOURCE)) as source,
        node_folder(state_folder(RUN, TARGET)) as target,
    ):
        pool.start_agents()
        until(pool, lambda: len(pool.reports) == 2)
        pool.reports.clear()
        yield Hops(pool, source, target)


def table(quick: bool = False) -> Table:
    """Measure both ways in turns, for states of several sizes."""
    rows, ratios = [], {}
    rounds = range(3 if quick else ROUNDS)
    with plain_socket() as plain, hops() as both:
        for size_bytes in SIZES:
            plain.seconds(size_bytes)
            found = [(plain.seconds(size_bytes), *both.seconds(size_bytes, number)) for number in rounds]
            plain_s, hop_s, copy_s = (statistics.median(column) for column in zip(*found, strict=True))
            ratios[size_bytes] = statistics.median(hop / alone for alone, hop, _ in found)
            times = (f"{1000 * seconds:.1f}" for seconds in (plain_s, hop_s, copy_s))
            rows.append((f"{size_bytes / 1e6:g}", *times, f"{ratios[size_bytes]:.2f}"))
    return Table(
        "A hop between two nodes",
        ("MB", "one socket, ms", "hop, ms", "copy alone, ms", "hop over socket"),
        tuple(rows),
        (Figure(f"hop of {HELD / 1e6:g} MB over one socket", ratios[HELD], 1.5),),
        f"Two agents on this machine, medians of {len(rounds)} rounds that measure both ways. A hop is the "
        "time from the driver's order to the agent's report, with a connection of its own, from one store in "
        "memory to the other; the copy alone has no messages. The receiver at the socket reuses its memory.",
    )


def main() -> int:
    """Print the table; exit code 1: the bar is passed."""
    result = table("--quick" in sys.argv)
    print(result)
    return 0 if all(figure.holds for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
