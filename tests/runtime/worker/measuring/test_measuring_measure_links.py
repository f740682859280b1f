"""Links between two ranks: over a connection, and through memory that both map."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hetctl.runtime.transport import Connection
from hetctl.runtime.worker.measuring.measure_links import SIZES, LinkEnd, measured_points


@pytest.fixture(params=["connection", "memory"])
def ends(request):
    memory = np.zeros(max(SIZES), np.uint8) if request.param == "memory" else None
    connections = [Connection(end) for end in socket.socketpair()]
    yield [LinkEnd(rank, connection, memory) for rank, connection in enumerate(connections)]
    for connection in connections:
        connection.close()


def on_both(ends, work):
    with ThreadPoolExecutor(2) as threads:
        return [job.result(timeout=60) for job in [threads.submit(work, end) for end in ends]]


def test_what_one_end_sends_the_other_receives(ends):
    arrays = [np.arange(1000, dtype=np.uint8), np.zeros(1000, np.uint8)]
    on_both(ends, lambda end: end.transfer(arrays[end.rank]))
    assert np.array_equal(*arrays)


def test_messages_of_all_sizes_are_timed_with_their_copies(ends):
    plain = on_both(ends, lambda end: list(measured_points(end, lambda _: 0.0, lambda: None)))[0]
    assert [size for size, _ in plain] == list(SIZES)
    assert all(seconds > 0 for _, seconds in plain)
    assert plain[-1][1] > plain[0][1]
    copied = on_both(ends, lambda end: list(measured_points(end, lambda _: 10.0, lambda: None)))[0]
    assert all(seconds > 20 for _, seconds in copied)
