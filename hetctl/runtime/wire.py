"""Connections between the processes of a job: values as lines of JSON, both ways, in order."""

from __future__ import annotations

import hmac
import json
import queue
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LOCALHOST = "127.0.0.1"
GREETING_S = 30.0
"""Who connects and does not say who he is within this time is not let in."""
LONGEST_GREETING = 2**16
RETRY_S = 0.2


@dataclass(frozen=True)
class Address:
    """Where a `Door` is, and what opens it."""

    host: str
    port: int
    key: str


class Wire:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self._buffer = b""

    @property
    def local_host(self) -> str:
        """The address of this machine that the other end sees."""
        return str(self._end.getsockname()[0])

    def send(self, value: Any) -> None:
        """Send a value; ConnectionError if the other end is gone."""
        self._end.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next value.

        Raises
        ------
        ConnectionError
            If the other end is gone.
        TimeoutError
            If none came in time.
        """
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = None if limit is None else max(0.0, limit - time.monotonic())
            if not select.select([self._end], [], [], left)[0]:
                raise TimeoutError("nothing came over the wire in time")
            self._read()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def arrived(self) -> Iterator[Any]:
        """Yield what has arrived; ConnectionError when that is all and the other end is gone."""
        with suppress(TimeoutError):
            while True:
                yield self.receive(0.0)

    def close(self) -> None:
        """Let the other end know that this one is gone."""
        self._end.close()

    def _read(self) -> None:
        data = self._end.recv(2**16)
        if not data:
            raise ConnectionResetError("the other end of the wire is gone")
        self._buffer += data


class Door:
    """A port at which others connect; nobody is let in who does not bring the key."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._socket = socket.create_server(("", 0), backlog=512)
        self._guests: queue.Queue[tuple[Any, Wire]] = queue.Queue()
        threading.Thread(target=self._answer, name="door", daemon=True).start()

    @property
    def address(self) -> Address:
        """Where it is."""
        return Address(socket.gethostname(), self._socket.getsockname()[1], self._key)

    def guests(self) -> Iterator[tuple[Any, Wire]]:
        """Yield those who have come: what they said, and their wires."""
        with suppress(queue.Empty):
            while True:
                yield self._guests.get_nowait()

    def wait(self, timeout_s: float) -> tuple[Any, Wire]:
        """Wait for the next one; TimeoutError if nobody comes in time."""
        try:
            return self._guests.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"nobody connected within {timeout_s:g} s") from None

    def close(self) -> None:
        """Let nobody in any more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _answer(self) -> None:
        with suppress(OSError):
            while True:
                end, _ = self._socket.accept()
                threading.Thread(target=self._greet, args=(end,), daemon=True).start()

    def _greet(self, end: socket.socket) -> None:
        """Hear who it is, in a thread of its own: a stranger keeps nobody else waiting."""
        try:
            end.settimeout(GREETING_S)
            greeting = json.loads(_line(end))
            known = hmac.compare_digest(greeting["key"].encode(), self._key.encode())
            end.settimeout(None)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            known = False
        if known:
            self._guests.put((greeting["who"], Wire(end)))
        else:
            end.close()


def knock(address: Address, who: Any, timeout_s: float) -> Wire:
    """Connect to a door, and say who is there; ConnectionError if it does not open in time."""
    host = LOCALHOST if address.host == socket.gethostname() else address.host
    limit = time.monotonic() + timeout_s
    while True:
        try:
            wire = Wire(socket.create_connection((host, address.port), timeout_s))
        except OSError as error:
            if time.monotonic() > limit:
                raise ConnectionError(f"{host}:{address.port} cannot be reached: {error}") from None
            time.sleep(RETRY_S)
        else:
            wire._end.settimeout(None)
            wire.send({"key": address.key, "who": who})
            return wire


def _line(end: socket.socket) -> bytes:
    """Read a line and not a byte more; what follows belongs to the wire."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > LONGEST_GREETING or not (byte := end.recv(1)):
            raise ValueError("no greeting")
        line += byte
    return line
