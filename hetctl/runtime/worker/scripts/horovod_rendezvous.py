"""Rendezvous of a script's ranks by Horovod over Gloo: a server of keys, as horovodrun starts one."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

POLL_S = 0.5
"""Seconds after which the server sees that it is no longer needed."""
Answer = tuple[int, bytes]
"""Status of HTTP, and content."""
OK, BAD_REQUEST, MISSING = 200, 400, 404


class RendezvousStore:
    """Values by scope and key, which ranks put, get, and delete when they are connected.

    Parameters
    ----------
    ranks : mapping of str to int
        Number of ranks that connect in each scope.
    """

    def __init__(self, ranks: Mapping[str, int]) -> None:
        self._ranks = ranks
        self._values: dict[str, dict[str, bytes]] = {}
        self._connected = Counter[str]()
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, content: bytes = b"") -> Answer:
        """Return the answer to a request for ``/scope/key``."""
        _, *names = path.split("/")
        if len(names) != 2:
            return BAD_REQUEST, b""
        with self._lock:
            return getattr(self, f"_{method.lower()}")(*names, content)  # type: ignore[no-any-return]

    def _get(self, scope: str, key: str, _content: bytes) -> Answer:
        value = self._values.get(scope, {}).get(key)
        return (MISSING, b"") if value is None else (OK, value)

    def _put(self, scope: str, key: str, content: bytes) -> Answer:
        self._values.setdefault(scope, {})[key] = content
        return OK, b""

    def _delete(self, scope: str, key: str, _content: bytes) -> Answer:
        """Note that a rank is connected; the last one leaves an empty scope for the next time."""
        if scope not in self._ranks:
            self._values.get(scope, {}).pop(key, None)
            return OK, b""
        self._connected[scope] += 1
        if self._connected[scope] == self._ranks[scope]:
            del self._connected[scope]
            self._values.pop(scope, None)
        return OK, b""


@contextmanager
def horovod_rendezvous(ranks: Mapping[str, int]) -> Iterator[int]:
    """Serve the ranks of a script; yield the port.

    Parameters
    ----------
    ranks : mapping of str to int
        Number of ranks in each scope.
    """
    listener, over = socket.create_server(("", 0)), threading.Event()
    store = RendezvousStore(ranks)
    # In a thread with its imports: they must not delay the start of the script, which may not need it.
    threading.Thread(target=_serve, args=(listener, store.answer, over), name="horovod", daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        over.set()


def _serve(
    listener: socket.socket, answer: Callable[[str, str, bytes], Answer], over: threading.Event
) -> None:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def handle_any(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, value = answer(self.command, self.path, content)
            self.send_response(status)
            self.send_header("Content-Length", str(len(value)))
            self.end_headers()
            self.wfile.write(value)

        do_GET = do_PUT = do_DELETE = handle_any  # noqa: N815 - names of http.server

        def log_message(self, *_: object) -> None:
            """Print nothing: the log is the script's."""

    with ThreadingHTTPServer(listener.getsockname(), Handler, bind_and_activate=False) as server:
        server.socket.close()
        server.socket, server.timeout = listener, POLL_S
        while not over.is_set():
            server.handle_request()
