"""Groups whose ranks are threads of a test, connected by sockets."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from hetctl.runtime.transport import Connection
from hetctl.runtime.worker.group import CollectiveBackend, ProcessGroup


def groups_of_threads(size):
    """Return the group as each of its ranks sees it."""
    links = [tuple(map(Connection, socket.socketpair())) for _ in range(size - 1)]
    ends = [[own for own, _ in links], *([other] for _, other in links)]
    return [ProcessGroup(rank, size, ends[rank], "", "", CollectiveBackend(), 60.0) for rank in range(size)]


def on_each_rank(body, size):
    """Run a function with the group of each rank, at the same time; return the results by rank."""
    with ThreadPoolExecutor(size) as threads:
        running = [threads.submit(body, group) for group in groups_of_threads(size)]
        return [rank.result(timeout=60) for rank in running]
