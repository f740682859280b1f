"""Connections between the processes of a job: values as lines of JSON, in both directions, in order."""

from __future__ import annotations

import hmac
import json
import queue
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

LOCALHOST = "127.0.0.1"
HANDSHAKE_S = 30.0
MAX_HANDSHAKE_BYTES = 2**16
UNANSWERED_MS = 60_000
"""Milliseconds without acknowledgement after which a connection breaks: a lost node cannot close its own."""
RETRY_S = 0.2
ACCEPT_PAUSE_S = 0.05
"""Pause in seconds after a failed ``accept(2)``: descriptors or memory may be free then (EMFILE, ENOMEM)."""


@dataclass(frozen=True)
class Address:
    """Host and port of a `Listener`, and the key that it requires."""

    host: str
    port: int
    key: str

    @property
    def is_here(self) -> bool:
        """True if this machine listens at it."""
        return self.host == socket.gethostname()


class Connection:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        if end.family != socket.AF_UNIX:
            # Nagle's algorithm would hold back a small message until the last one is acknowledged (tcp(7)).
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)
        self._end = end
        # select() takes no descriptor above 1023, which a driver with hundreds of ranks exceeds.
        self._poll = selectors.PollSelector()
        self._poll.register(end, selectors.EVENT_READ)
        self._buffer = b""
        self._sending = threading.Lock()

    @property
    def local_host(self) -> str:
        """Address of this machine that the other end sees."""
        return str(self._end.getsockname()[0])

    def fileno(self) -> int:
        """Return the descriptor that is readable when data have arrived."""
        return self._end.fileno()

    def limit_silence(self, seconds: float) -> None:
        """Have sends, and reads that have begun, fail with TimeoutError if they take longer.

        A node that is switched off breaks no connection on which only it would send.
        """
        self._end.settimeout(seconds)

    def limit_unanswered(self, seconds: float) -> None:
        """Have the connection break after that time without acknowledgement of what was sent."""
        self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))

    def send(self, value: Any) -> None:
        """Send a value, from any thread; ConnectionError if the other end has closed."""
        # A rank's heartbeats come from a thread of their own: two messages at once would mix within a line.
        with self._sending, _closed_if_lost():
            self._end.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next value.

        Raises
        ------
        ConnectionError
            If the other end has closed.
        TimeoutError
            If no value arrives in time.
        """
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = None if limit is None else max(0.0, limit - time.monotonic())
            if not self._poll.select(left):
                raise TimeoutError("no message arrived within the time limit")
            self._read()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def send_bytes(self, data: memoryview) -> None:
        """Send bytes that the other end receives with `receive_bytes`."""
        with self._sending, _closed_if_lost():
            self._end.sendall(data)

    def receive_bytes(self, into: memoryview) -> None:
        """Wait for as many bytes as `into` has, and store them there; ConnectionError if too few come."""
        first = min(len(self._buffer), len(into))
        into[:first], self._buffer = self._buffer[:first], self._buffer[first:]
        while first < len(into):
            with _closed_if_lost():
                count = self._end.recv_into(into[first:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the other end has closed the connection")
            first += count

    def arrived(self) -> Iterator[Any]:
        """Yield all values that have arrived; ConnectionError after the last if the other end has closed."""
        with suppress(TimeoutError):
            while True:
                yield self.receive(0.0)

    def close(self) -> None:
        """Close the connection; the other end sees its end."""
        self._poll.close()
        self._end.close()

    def _read(self) -> None:
        with _closed_if_lost():
            data = self._end.recv(2**16)
        if not data:
            raise ConnectionResetError("the other end has closed the connection")
        self._buffer += data


@contextmanager
def _closed_if_lost() -> Iterator[None]:
    """Raise ConnectionError for whatever breaks a connection.

    Where nothing is acknowledged for too long, the kernel gives the error that it saw last, such as "No route
    to host" (EHOSTUNREACH), and else ETIMEDOUT; Python has other classes for these.
    """
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        # That of `limit_silence` has no number.
        if isinstance(error, TimeoutError) and error.errno is None:
            raise
        raise ConnectionResetError(f"the connection is lost: {error.strerror}") from error


class Listener:
    """A port for connections from other processes; connections without the key are rejected.

    Parameters
    ----------
    host : str
        The only address of this machine to listen at, IPv4 or IPv6. Empty: all addresses; others then
        connect by the host name.
    handshake_s : float
        Seconds within which a new connection must send its handshake with the key; it is closed otherwise.
    """

    def __init__(self, key: str, host: str = "", handshake_s: float = HANDSHAKE_S) -> None:
        self._key = key
        self._handshake_s = handshake_s
        self._host = host or socket.gethostname()
        self._socket = _listen(host)
        self._accepted: queue.Queue[tuple[Any, Connection]] = queue.Queue()
        self._closed = False
        threading.Thread(target=self._answer, name="listener", daemon=True).start()

    @property
    def address(self) -> Address:
        """Address at which others connect."""
        return Address(self._host, self._socket.getsockname()[1], self._key)

    def accepted(self) -> Iterator[tuple[Any, Connection]]:
        """Yield the connections accepted since the last call, each after the peer's name in its handshake."""
        with suppress(queue.Empty):
            while True:
                yield self._accepted.get_nowait()

    def wait(self, timeout_s: float) -> tuple[Any, Connection]:
        """Wait for the next connection; TimeoutError if none comes in time."""
        try:
            return self._accepted.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no connection within {timeout_s:g} s") from None

    def close(self) -> None:
        """Accept no more connections."""
        self._closed = True
        with suppress(OSError):
            # close(2) does not wake an accept(2) that another thread waits in; shutdown(2) does on Linux.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _answer(self) -> None:
        """Accept connections until the listener is closed; an error of one does not end the loop."""
        while not self._closed:
            try:
                end, _ = self._socket.accept()
            except OSError:
                time.sleep(ACCEPT_PAUSE_S)
                continue
            try:
                threading.Thread(target=self._handshake, args=(end,), daemon=True).start()
            except RuntimeError:  # Too many threads: the caller tries again.
                end.close()

    def _handshake(self, end: socket.socket) -> None:
        """Check the handshake of one connection, in a thread of its own: a slow one delays no other."""
        try:
            end.settimeout(self._handshake_s)
            handshake = json.loads(_line(end))
            # Any process that reaches the port may try keys: == would take longer the more of one is right.
            authorized = hmac.compare_digest(handshake["key"].encode(), self._key.encode())
            # Timeouts stay with the socket, and would break later reads of the connection.
            end.settimeout(None)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            authorized = False
        if authorized:
            self._accepted.put((handshake["peer"], Connection(end)))
        else:
            end.close()


def connect(address: Address, name: Any, timeout_s: float) -> Connection:
    """Connect to a listener and send a name.

    Raises
    ------
    ConnectionRefusedError
        If no process listens there.
    ConnectionError
        If it cannot be reached in time for another reason.
    """
    # A node need not be able to resolve its own name.
    host = LOCALHOST if address.is_here else address.host
    limit = time.monotonic() + timeout_s
    while True:
        try:
            connection = Connection(socket.create_connection((host, address.port), timeout_s))
        except OSError as error:
            if time.monotonic() > limit:
                refused = isinstance(error, ConnectionRefusedError)
                kind = ConnectionRefusedError if refused else ConnectionError
                raise kind(f"{host}:{address.port} cannot be reached: {error}") from None
            time.sleep(RETRY_S)
        else:
            # create_connection() leaves its timeout on the socket, which would end later waits.
            connection._end.settimeout(None)
            connection.send({"key": address.key, "peer": name})
            return connection


def _listen(host: str) -> socket.socket:
    """Listen at an address, or at all if `host` is empty, with IPv6 if the kernel supports it."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=512)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=512, dualstack_ipv6=both)


def _line(end: socket.socket) -> bytes:
    """Read a line and not a byte more: the bytes that follow belong to the `Connection`."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > MAX_HANDSHAKE_BYTES or not (byte := end.recv(1)):
            raise ValueError("no handshake")
        line += byte
    return line
