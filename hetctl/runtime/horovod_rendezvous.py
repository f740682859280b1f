"""Rendezvous of Horovod's ranks over Gloo: a key-value server such as horovodrun's.

Horovod's client speaks plain HTTP without authentication. It copies the given address into each request, so a
secret at the end of the address comes with every request.
"""

from __future__ import annotations

import hmac
import re
import secrets
import select
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

REQUEST_S = 10.0
MOST_CONNECTIONS = 1024
"""Connections at a time; each rank has one."""
MOST_HEAD_BYTES = 2**13
MOST_VALUE_BYTES = 2**20
"""Most bytes of a value: a rank's addresses for all others, of about 150 bytes each."""
MOST_BYTES = 2**28
"""Most bytes of all values, with `KEY_BYTES` for each."""
KEY_BYTES = 2**10
Answer = tuple[int, bytes]
"""Status of HTTP, and content."""
OK, BAD_REQUEST, FORBIDDEN, MISSING, CONFLICT, TOO_LARGE = 200, 400, 403, 404, 409, 413


class RendezvousStore:
    """Values by scope and key: ranks put and get them, and delete them once connected.

    Parameters
    ----------
    ranks : mapping of str to int
        Number of ranks that connect in each scope.
    """

    def __init__(self, ranks: Mapping[str, int]) -> None:
        self._ranks = ranks
        self._values: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self._connected: defaultdict[str, set[str]] = defaultdict(set)

    def answer(self, method: str, path: str, content: bytes = b"") -> Answer:
        """Return the answer to a request for ``/scope/key``."""
        match [method, *path.split("/")]:
            case "GET", "", scope, key:
                value = self._values.get(scope, {}).get(key)
                return (MISSING, b"") if value is None else (OK, value)
            case "PUT", "", scope, key:
                return self._put(scope, key, content)
            case "DELETE", "", scope, key:
                return self._delete(scope, key)
        return BAD_REQUEST, b""

    def _put(self, scope: str, key: str, content: bytes) -> Answer:
        """Store a value once: a second one would misdirect ranks. A client may repeat its request."""
        held = self._values[scope].get(key)
        if held is not None:
            return (OK, b"") if held == content else (CONFLICT, b"")
        values = [value for of_scope in self._values.values() for value in of_scope.values()]
        if sum(map(len, values)) + KEY_BYTES * len(values) + len(content) > MOST_BYTES - KEY_BYTES:
            return TOO_LARGE, b""
        self._values[scope][key] = content
        return OK, b""

    def _delete(self, scope: str, key: str) -> Answer:
        """Note that a rank is connected; the last one empties the scope for the next rendezvous."""
        if scope not in self._ranks:
            self._values[scope].pop(key, None)
            return OK, b""
        self._connected[scope].add(key)
        if len(self._connected[scope]) == self._ranks[scope]:
            del self._connected[scope]
            self._values.pop(scope, None)
        return OK, b""


@contextmanager
def horovod_rendezvous(
    ranks: Mapping[str, int], host: str, request_s: float = REQUEST_S
) -> Iterator[dict[str, str]]:
    """Serve ranks at an address of this machine; yield the variables with which Horovod finds the server.

    Parameters
    ----------
    ranks : mapping of str to int
        Number of ranks in each scope.
    host : str
        IPv4 address, the only one at which the server listens.
    request_s : float
        Seconds for one request and its answer.
    """
    listener, (ours, theirs) = socket.create_server((host, 0)), socket.socketpair()
    port, secret = listener.getsockname()[1], secrets.token_hex(16)
    server = _Server(RendezvousStore(ranks), f"/{secret}:{port}", request_s)
    # The thread does the imports: they must not delay a script, which may not use Horovod.
    threading.Thread(target=_serve, args=(server, listener, theirs), name="horovod", daemon=True).start()
    try:
        # Horovod's requests are for http://ADDR:PORT/scope/key.
        yield {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{host}:{port}/{secret}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }
    finally:
        ours.close()


def _serve(server: _Server, listener: socket.socket, end: socket.socket) -> None:
    """Serve from the first connection on, until the peer of `end` is closed."""
    poll = select.poll()
    for one in (listener, end):
        poll.register(one, select.POLLIN)
    with listener, end:
        if end.fileno() not in dict(poll.poll()):
            import asyncio

            asyncio.run(server.run(listener, end))


class _Server:
    """HTTP server for a store, as far as Horovod needs one: one request per connection."""

    def __init__(self, store: RendezvousStore, root: str, request_s: float) -> None:
        self._store = store
        self._request_s = request_s
        self._root = root
        self._connections = 0

    async def run(self, listener: socket.socket, end: socket.socket) -> None:
        """Answer requests until `end` is readable."""
        import asyncio

        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(end, over.set)
        async with await asyncio.start_server(self._take, sock=listener, limit=MOST_HEAD_BYTES):
            await over.wait()

    async def _take(self, reader: StreamReader, writer: StreamWriter) -> None:
        import asyncio

        self._connections += 1
        try:
            if self._connections <= MOST_CONNECTIONS:
                with suppress(OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError):
                    await asyncio.wait_for(self._answer(reader, writer), self._request_s)
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, _ = head.split(" ", 2)
        length = re.search(r"\r\ncontent-length:\s*(\d{1,18})\s*\r\n", head, re.IGNORECASE)
        count = int(length[1]) if length else 0
        root, path = path[: len(self._root)], path[len(self._root) :]
        if not hmac.compare_digest(root.encode(), self._root.encode()):
            status, value = FORBIDDEN, b""
        elif count > MOST_VALUE_BYTES:
            status, value = TOO_LARGE, b""
        else:
            status, value = self._store.answer(method, path, await reader.readexactly(count))
        writer.write(f"HTTP/1.1 {status} \r\nContent-Length: {len(value)}\r\n\r\n".encode() + value)
        await writer.drain()
