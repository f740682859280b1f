"""Connections between the processes of a job: values as lines of JSON, in both directions, in order.

Within a machine they are Unix sockets, where the kernel names the peer's user; between machines they use TLS,
where both ends show the job's certificate. The key is sent only after that.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hetctl.model.values import dataclass
from hetctl.runtime.handshake import read_handshake

if TYPE_CHECKING:
    from hetctl.runtime.tls import TlsSession

LOCALHOST = "127.0.0.1"
HANDSHAKE_S = 10.0
"""Seconds for the whole handshake of a connection."""
MOST_PENDING = 128
"""Most connections of a listener whose handshakes are not complete."""
PENDING_SHARE = 8
"""Connections without a complete handshake take at most one in so many of a process's descriptors."""
MIN_HANDSHAKE_S = 0.25
"""Seconds before a connection whose handshake has begun may be dropped for a newer one."""
UNANSWERED_MS = 60_000
"""Milliseconds without acknowledgement after which a connection breaks: a lost node closes nothing."""
RETRY_S = 0.2
ACCEPT_PAUSE_S = 0.02
"""Pause in seconds while no connection can be accepted: for want of room, descriptors or memory."""
BLOCK_BYTES = 2**16
BACKLOG = 512
MOST_UNPROVEN_BYTES = 2**11
"""Most bytes of a TLS handshake; OpenSSL 3.0 sends about 700."""


@dataclass(frozen=True)
class JobIdentity:
    """Certificate by which a job's processes on different nodes recognise one another.

    Parameters
    ----------
    certificate : str
        Certificate with its private key, as from `new_certificate`.
    encrypts_data : bool
        True: everything is encrypted. False: `Connection.send_bytes` sends clear text.
    """

    certificate: str
    encrypts_data: bool = True


@dataclass(frozen=True)
class Address:
    """Place of a `Listener`, and the key that it requires.

    Parameters
    ----------
    port : int or None
        Port for other machines; None: it listens to this one alone.
    name : str
        Name of its Unix socket.
    """

    host: str
    port: int | None
    key: str
    name: str = ""

    @property
    def is_here(self) -> bool:
        """True if the listener is on this machine."""
        return self.host == socket.gethostname()


class Connection:
    """One end of a connection.

    Parameters
    ----------
    tls : TlsSession or None
        Encryption; None: clear text.
    """

    def __init__(self, end: socket.socket, tls: TlsSession | None = None) -> None:
        self._is_local = end.family == socket.AF_UNIX
        if not self._is_local:
            # Nagle's algorithm would hold back a small message until the last one is acknowledged (tcp(7)).
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)
        self._end = end
        self._tls = tls
        self._of_data = tls if tls and tls.encrypts_data else None
        # select() takes no descriptor above 1023, which a driver with hundreds of ranks exceeds.
        self._poll = selectors.PollSelector()
        self._poll.register(end, selectors.EVENT_READ)
        self._buffer = b""
        self._sending = threading.Lock()
        self._record = memoryview(bytearray(BLOCK_BYTES if tls else 0))

    @property
    def local_host(self) -> str:
        """Address of this machine that the other end sees."""
        return LOCALHOST if self._is_local else str(self._end.getsockname()[0])

    def fileno(self) -> int:
        """Return the descriptor that is readable when data have arrived."""
        return self._end.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        """Fail sends, and reads that have begun, with TimeoutError after some seconds; None: never.

        Without a limit, a read from a node that is switched off never ends.
        """
        self._end.settimeout(seconds)

    def limit_unanswered(self, seconds: float) -> None:
        """Break the connection if sent data are not acknowledged in some seconds."""
        if not self._is_local:
            self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))

    def send(self, value: Any) -> None:
        """Send a value, from any thread; ConnectionError if the other end has closed."""
        # A rank's heartbeats come from another thread, and two messages at once would mix.
        with self._sending, _closed_if_lost():
            self._send(memoryview(json.dumps(value).encode() + b"\n"), self._tls)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next value.

        Raises
        ------
        ConnectionError
            If the other end has closed, or has sent no JSON.
        TimeoutError
            If no value arrives in time.
        """
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if self._tls and (count := self._tls.read_into(self._record)):
                self._buffer += self._record[:count]
                continue
            left = None if limit is None else max(0.0, limit - time.monotonic())
            if not self._poll.select(left):
                raise TimeoutError("no message arrived within the time limit")
            data = self._arrived()
            if self._tls is None:
                self._buffer += data
            else:
                self._tls.feed(data)
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise ConnectionAbortedError("the other end has sent what is no message") from None

    def send_bytes(self, data: memoryview) -> None:
        """Send bytes that the other end receives with `receive_bytes`."""
        with self._sending, _closed_if_lost():
            self._send(data, self._of_data)

    def receive_bytes(self, into: memoryview) -> None:
        """Wait for as many bytes as `into` has, and store them there; ConnectionError if too few come."""
        first = min(len(self._buffer), len(into))
        into[:first], self._buffer = self._buffer[:first], self._buffer[first:]
        while first < len(into):
            with _closed_if_lost():
                first += self._receive_some(into[first:])

    def arrived(self) -> Iterator[Any]:
        """Yield all values that have arrived; ConnectionError after the last if the other end has closed."""
        with suppress(TimeoutError):
            while True:
                yield self.receive(0.0)

    def close(self) -> None:
        """Close the connection; the other end sees its end."""
        self._poll.close()
        self._end.close()

    def _receive_some(self, into: memoryview) -> int:
        """Store the next bytes of data; return their number, which is 0 while a record is not complete."""
        if self._of_data is not None:
            if not (count := self._of_data.read_into(into)):
                self._of_data.feed(self._arrived())
            return count
        if self._tls is not None and (early := self._tls.read_clear(len(into))):
            # These bytes came together with the message before them.
            into[: len(early)] = early
            return len(early)
        if not (count := self._end.recv_into(into, 0, socket.MSG_WAITALL)):
            raise ConnectionResetError("the other end has closed the connection")
        return count

    def _arrived(self) -> bytes:
        with _closed_if_lost():
            data = self._end.recv(BLOCK_BYTES)
        if not data:
            raise ConnectionResetError("the other end has closed the connection")
        return data

    def _send(self, data: memoryview, tls: TlsSession | None) -> None:
        if tls is None:
            self._end.sendall(data)
            return
        for start in range(0, len(data), BLOCK_BYTES):
            self._end.sendall(tls.encrypted(data[start : start + BLOCK_BYTES]))


@contextmanager
def _closed_if_lost() -> Iterator[None]:
    """Raise ConnectionError for every error that breaks a connection.

    Without acknowledgements the kernel reports its last error, such as "No route to host" (EHOSTUNREACH), or
    ETIMEDOUT; Python makes no ConnectionError of these.
    """
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        # A timeout of `set_timeout` has no errno.
        if isinstance(error, TimeoutError) and error.errno is None:
            raise
        raise ConnectionResetError(f"the connection is lost: {error.strerror}") from error


@dataclass(eq=False)
class _PendingConnection:
    """Connection whose handshake is not complete.

    Parameters
    ----------
    since : float
        Time of its acceptance, by the monotonic clock.
    tls : TlsSession or None
        Encryption, for a peer on another machine.
    bytes_received : int
        Number of bytes that have arrived.
    handshake : bytes
        Handshake so far.
    """

    end: socket.socket
    since: float
    tls: TlsSession | None
    bytes_received: int = 0
    handshake: bytes = b""

    def listen(self, key: str) -> Any:
        """Read what has arrived; return the peer's name once the handshake is complete.

        Raises
        ------
        OSError, ValueError
            If it is no process of the job.
        """
        most = BLOCK_BYTES
        if self.tls and not self.tls.is_proven and not (most := MOST_UNPROVEN_BYTES - self.bytes_received):
            raise ValueError(f"a TLS handshake of more than {MOST_UNPROVEN_BYTES} bytes")
        data = self.end.recv(most)
        if not data:
            raise ConnectionResetError("it has closed the connection")
        self.bytes_received += len(data)
        self.handshake += data if self.tls is None else self._decrypted(data, self.tls)
        return read_handshake(self.handshake, key)

    def _decrypted(self, data: bytes, tls: TlsSession) -> bytes:
        if tls.is_proven:
            tls.feed(data)
        elif answer := tls.advance(data):
            self.end.sendall(answer)
        record, found = memoryview(bytearray(BLOCK_BYTES)), b""
        while tls.is_proven and (count := tls.read_into(record)):
            found += record[:count]
        return found


class Listener:
    """Listener for connections of the job's processes; it rejects other users and wrong keys.

    One thread does all handshakes. Strangers get limited bytes, descriptors and time. If too many connect,
    the oldest are dropped for new ones; processes of the job try again.

    Parameters
    ----------
    host : str
        Address of this machine to listen at, IPv4 or IPv6. Empty: all; peers then connect by host name.
    identity : JobIdentity or None
        Identity of the job, for connections from other machines; None: listen to this machine alone.
    handshake_s : float
        Seconds after which a connection without a complete handshake is closed.
    """

    def __init__(
        self,
        key: str,
        host: str = "",
        identity: JobIdentity | None = None,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._identity = identity
        self._handshake_s = handshake_s
        # The kernel frees such a name with the process; a file would stay. Any user may connect to it.
        name = f"hetctl-{secrets.token_hex(8)}"
        self._sockets = [_listen_locally(name), *([_listen(host)] if identity else [])]
        port = self._sockets[-1].getsockname()[1] if identity else None
        self.address = Address(host or socket.gethostname(), port, key, name)
        self._accepted: queue.Queue[tuple[Any, Connection]] = queue.Queue()
        # The oldest first: all have the same time limit.
        self._pending: dict[_PendingConnection, None] = {}
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_pending = max(1, min(MOST_PENDING, descriptors // PENDING_SHARE))
        self._closed = False
        self._thread = threading.Thread(target=self._answer, name="listener", daemon=True)
        self._thread.start()

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
        for each in self._sockets:
            with suppress(OSError):
                # It wakes the thread, which close(2) does not.
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in self._sockets:
            each.close()

    def _answer(self) -> None:
        """Accept connections until the listener is closed; an error of one does not end the loop."""
        with selectors.PollSelector() as selector:
            for each in self._sockets:
                selector.register(each, selectors.EVENT_READ)
            while not self._closed:
                oldest = next(iter(self._pending), None)
                left = None if oldest is None else oldest.since + self._handshake_s - time.monotonic()
                ready = [key for key, _ in selector.select(None if left is None else max(0.0, left))]
                for pending in filter(None, (key.data for key in ready)):
                    self._advance(pending, selector)
                now = time.monotonic()
                for pending in [one for one in self._pending if now > one.since + self._handshake_s]:
                    self._drop(pending, selector)
                for each in self._sockets:
                    if any(key.fileobj is each for key in ready):
                        self._accept(each, selector)
            for pending in list(self._pending):
                self._drop(pending, selector)

    def _accept(self, at: socket.socket, selector: selectors.BaseSelector) -> None:
        """Accept a connection, if there is room for it."""
        now = time.monotonic()
        if len(self._pending) >= self._most_pending:
            # Processes of the job speak at once: drop the oldest connection that is silent or slow.
            idle = (
                one for one in self._pending if not one.bytes_received or now > one.since + MIN_HANDSHAKE_S
            )
            if (last := next(idle, None)) is None:
                time.sleep(ACCEPT_PAUSE_S)
                return
            self._drop(last, selector)
        try:
            end, _ = at.accept()
        except BlockingIOError:
            return
        except OSError:
            time.sleep(ACCEPT_PAUSE_S)
            return
        end.setblocking(False)
        is_local = at.family == socket.AF_UNIX
        if is_local and not _is_own(end):
            end.close()
            return
        tls = _tls(self._identity, is_server=True) if self._identity and not is_local else None
        pending = _PendingConnection(end, now, tls)
        self._pending[pending] = None
        selector.register(end, selectors.EVENT_READ, pending)

    def _advance(self, pending: _PendingConnection, selector: selectors.BaseSelector) -> None:
        """Read more of a handshake; accept the connection if it is complete, drop it if it is wrong."""
        try:
            if (name := pending.listen(self.address.key)) is None:
                return
            connection = Connection(pending.end, pending.tls)
            pending.end.setblocking(True)
            connection.send(True)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._drop(pending, selector)
            return
        selector.unregister(pending.end)
        del self._pending[pending]
        self._accepted.put((name, connection))

    def _drop(self, pending: _PendingConnection, selector: selectors.BaseSelector) -> None:
        selector.unregister(pending.end)
        del self._pending[pending]
        pending.end.close()


def connect(address: Address, name: Any, timeout_s: float, identity: JobIdentity | None = None) -> Connection:
    """Connect to a listener under a name; try again until it accepts.

    Parameters
    ----------
    timeout_s : float
        Seconds after which no attempt begins; a connected one takes `HANDSHAKE_S` at most.
    identity : JobIdentity or None
        Identity of the job, for a listener on another machine.

    Raises
    ------
    ConnectionRefusedError
        If no process listens there.
    ConnectionError
        If it cannot be reached in time for another reason.
    """
    limit = time.monotonic() + timeout_s
    while True:
        try:
            return _accepted(_reached(address, timeout_s, identity), address.key, name)
        except OSError as error:
            if time.monotonic() > limit:
                kind = type(error) if isinstance(error, ConnectionRefusedError) else ConnectionError
                place = address.host if address.port is None else f"{address.host}:{address.port}"
                raise kind(f"{place} cannot be reached: {error}") from None
            time.sleep(RETRY_S)


def _reached(address: Address, timeout_s: float, identity: JobIdentity | None) -> Connection:
    """Connect to a process of this user on this machine, or else to one of the job by TLS."""
    try:
        return Connection(_connected_locally(address.name))
    except OSError:
        if address.port is None or identity is None:
            raise
    # A node may be unable to resolve its own name.
    host = LOCALHOST if address.is_here else address.host
    end = socket.create_connection((host, address.port), timeout_s)
    with _closed_on_error(end):
        tls = _tls(identity, is_server=False)
        _prove(end, tls)
        return Connection(end, tls)


@contextmanager
def _closed_on_error(end: socket.socket | Connection) -> Iterator[None]:
    """Close an end of a connection if the block raises an error."""
    try:
        yield
    except BaseException:
        end.close()
        raise


def _connected_locally(name: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    with _closed_on_error(end):
        # A full queue of the kernel must fail at once.
        end.setblocking(False)
        end.connect(f"\0{name}")
        if not _is_own(end):
            raise PermissionError("another user's program listens there")
    return end


def _is_own(end: socket.socket) -> bool:
    """Return true if the other end of a Unix socket is of this user (unix(7), SO_PEERCRED)."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())


def _tls(identity: JobIdentity, *, is_server: bool) -> TlsSession:
    # Most jobs on one node need no TLS.
    from hetctl.runtime.tls import TlsSession

    return TlsSession(identity.certificate, is_server=is_server, encrypts_data=identity.encrypts_data)


def _prove(end: socket.socket, tls: TlsSession) -> None:
    """Do the TLS handshake; OSError if the peer is no process of the job, or takes too long."""
    limit = time.monotonic() + HANDSHAKE_S
    end.settimeout(HANDSHAKE_S)
    end.sendall(tls.advance())
    while not tls.is_proven:
        data = b""
        if (left := limit - time.monotonic()) > 0:
            end.settimeout(left)
            with suppress(TimeoutError):
                data = end.recv(BLOCK_BYTES)
        if not data:
            raise ConnectionResetError("the process there has shown no certificate")
        if answer := tls.advance(data):
            end.sendall(answer)


def _accepted(connection: Connection, key: str, name: Any) -> Connection:
    """Send the handshake, and wait for the answer; OSError if it does not come."""
    with _closed_on_error(connection):
        connection.set_timeout(HANDSHAKE_S)
        connection.send(key)
        connection.send(name)
        if connection.receive(HANDSHAKE_S) is not True:
            raise ConnectionAbortedError("another program listens there")
        # Timeouts stay with the socket, and would end later waits.
        connection.set_timeout(None)
    return connection


def _listen_locally(name: str) -> socket.socket:
    """Listen at a name that only processes of this machine know (unix(7), abstract sockets)."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{name}")
    listening.listen(BACKLOG)
    listening.setblocking(False)
    return listening


def _listen(host: str) -> socket.socket:
    """Listen at an address, or at all addresses if `host` is empty, with IPv6 if the kernel has it."""
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    listening.setblocking(False)
    return listening
