"""Connections between the processes of a job: values as lines of JSON, in both directions, in order."""

from __future__ import annotations

import json
import queue
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from hetctl.runtime.handshake import ACCEPTED, handshake, read_handshake

LOCALHOST = "127.0.0.1"
HANDSHAKE_S = 10.0
"""Seconds for the whole handshake of a connection."""
MOST_PENDING = 128
"""Most connections of a listener whose handshakes are not complete."""
PENDING_SHARE = 8
"""Strangers that connect and say nothing get this part of a process's descriptors at most: one in so many."""
FAIR_S = 0.25
"""Seconds for a handshake that has begun before its connection may have to make room for a newer one."""
UNANSWERED_MS = 60_000
"""Milliseconds without acknowledgement after which a connection breaks: a lost node cannot close its own."""
RETRY_S = 0.2
ACCEPT_PAUSE_S = 0.02
"""Pause in seconds while no connection can be accepted: for want of room, descriptors or memory."""
BLOCK_BYTES = 2**16


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
    """One end of a connection.

    Parameters
    ----------
    buffer : bytes
        Bytes that have arrived already.
    """

    def __init__(self, end: socket.socket, buffer: bytes = b"") -> None:
        if end.family != socket.AF_UNIX:
            # Nagle's algorithm would hold back a small message until the last one is acknowledged (tcp(7)).
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)
        self._end = end
        # select() takes no descriptor above 1023, which a driver with hundreds of ranks exceeds.
        self._poll = selectors.PollSelector()
        self._poll.register(end, selectors.EVENT_READ)
        self._buffer = buffer
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
            data = self._end.recv(BLOCK_BYTES)
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


@dataclass(eq=False)
class _Stranger:
    """Connection whose handshake is not complete.

    Parameters
    ----------
    since : float
        Time of its acceptance, by the monotonic clock.
    data : bytes
        Bytes that have arrived.
    """

    end: socket.socket
    since: float
    data: bytes = b""


class Listener:
    """A port for connections from other processes; connections without the key are rejected.

    One thread has all handshakes. What strangers can take is limited: some bytes, some of this process's
    descriptors, and the time of a handshake. If too many connect, the oldest connections make room for new
    ones; those that have a key try again.

    Parameters
    ----------
    host : str
        The only address of this machine to listen at, IPv4 or IPv6. Empty: all addresses; others then
        connect by the host name.
    handshake_s : float
        Seconds within which a new connection must have sent its handshake; it is closed otherwise.
    """

    def __init__(self, key: str, host: str = "", handshake_s: float = HANDSHAKE_S) -> None:
        self._key = key
        self._handshake_s = handshake_s
        self._host = host or socket.gethostname()
        self._socket = _listen(host)
        self._socket.setblocking(False)
        self._accepted: queue.Queue[tuple[Any, Connection]] = queue.Queue()
        # The oldest first: all have the same time.
        self._arrivals: dict[_Stranger, None] = {}
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_arrivals = max(1, min(MOST_PENDING, descriptors // PENDING_SHARE))
        self._closed = False
        self._thread = threading.Thread(target=self._answer, name="listener", daemon=True)
        self._thread.start()

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
            # It wakes the thread, which close(2) does not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        """Accept connections until the listener is closed; an error of one does not end the loop."""
        with selectors.PollSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not self._closed:
                ready = [key.data for key, _ in selector.select(self._time_left())]
                for arrival in filter(None, ready):
                    self._advance(arrival, selector)
                for arrival in self._late():
                    self._drop(arrival, selector)
                if None in ready:
                    self._accept(selector)
            for arrival in list(self._arrivals):
                self._drop(arrival, selector)

    def _time_left(self) -> float | None:
        """Return the seconds until the oldest handshake must be complete; None if there is none."""
        limits = (arrival.since + self._handshake_s for arrival in self._arrivals)
        return max(0.0, next(limits) - time.monotonic()) if self._arrivals else None

    def _late(self) -> list[_Stranger]:
        now = time.monotonic()
        return [arrival for arrival in self._arrivals if now > arrival.since + self._handshake_s]

    def _accept(self, selector: selectors.BaseSelector) -> None:
        """Accept a connection, if there is room for it."""
        now = time.monotonic()
        if len(self._arrivals) >= self._most_arrivals:
            # Those with a key send it at once; the first of the others are the oldest.
            idle = (one for one in self._arrivals if not one.data or now > one.since + FAIR_S)
            if (last := next(idle, None)) is None:
                time.sleep(ACCEPT_PAUSE_S)
                return
            self._drop(last, selector)
        try:
            end, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(ACCEPT_PAUSE_S)
            return
        end.setblocking(False)
        arrival = _Stranger(end, now)
        self._arrivals[arrival] = None
        selector.register(end, selectors.EVENT_READ, arrival)

    def _advance(self, arrival: _Stranger, selector: selectors.BaseSelector) -> None:
        """Read on in a handshake: accept the connection if it is complete, and close it if it is wrong."""
        try:
            if not (data := arrival.end.recv(BLOCK_BYTES)):
                raise ConnectionResetError
            arrival.data += data
            if (found := read_handshake(arrival.data, self._key)) is None:
                return
            arrival.end.sendall(ACCEPTED)
            arrival.end.setblocking(True)
            name, rest = found
            connection = Connection(arrival.end, rest)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._drop(arrival, selector)
            return
        selector.unregister(arrival.end)
        del self._arrivals[arrival]
        self._accepted.put((name, connection))

    def _drop(self, arrival: _Stranger, selector: selectors.BaseSelector) -> None:
        selector.unregister(arrival.end)
        del self._arrivals[arrival]
        arrival.end.close()


def connect(address: Address, name: Any, timeout_s: float) -> Connection:
    """Connect to a listener under a name; try again until it accepts.

    Parameters
    ----------
    timeout_s : float
        Seconds after which no other attempt begins; one takes `HANDSHAKE_S` at most once it is connected.

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
            return _accepted(socket.create_connection((host, address.port), timeout_s), address.key, name)
        except OSError as error:
            if time.monotonic() > limit:
                refused = isinstance(error, ConnectionRefusedError)
                kind = ConnectionRefusedError if refused else ConnectionError
                raise kind(f"{host}:{address.port} cannot be reached: {error}") from None
            time.sleep(RETRY_S)


def _accepted(end: socket.socket, key: str, name: Any) -> Connection:
    """Send the handshake, and wait for the answer; OSError if it does not come."""
    connection = Connection(end)
    try:
        connection.limit_silence(HANDSHAKE_S)
        connection.send_bytes(memoryview(handshake(key, name)))
        answer = bytearray(len(ACCEPTED))
        connection.receive_bytes(memoryview(answer))
        if answer != ACCEPTED:
            raise ConnectionAbortedError("another program listens there")
        # Timeouts stay with the socket, and would end later waits.
        end.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _listen(host: str) -> socket.socket:
    """Listen at an address, or at all if `host` is empty, with IPv6 if the kernel supports it."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=512)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=512, dualstack_ipv6=both)
