"""Store of the states of members that hop: files in the node's memory, copied between nodes on order.

A file is immutable, and gets its name when complete. The node's ranks write and read the files themselves;
other nodes' agents get them over connections of their own.
"""

from __future__ import annotations

import mmap
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from hetctl.model.hops import StateFetched
from hetctl.runtime.data.sharing.node_folder import LEAST_FREE, USERS, node_folder, state_folder
from hetctl.runtime.interfaces import control_address
from hetctl.runtime.transport import Address, Connection, JobIdentity, Listener, connect
from hetctl.storage.atomic_io import draft

SILENT_S = 10.0
"""Seconds without a byte after which a copy fails: a node that is switched off closes no connection."""
BLOCK_BYTES = 2**20
POLL_S = 0.5
"""Seconds between two checks of the serving thread for a closed store."""
END_S = 2.0
"""Seconds in which copies under way end with the store."""
MOST_SPARE_BYTES = 2**28
"""Largest size of a spare file; a larger state gets the rest of its memory as it is written."""


class StateStore:
    """States on one node; threads serve them to other nodes and fetch states from there.

    Parameters
    ----------
    run_key, node : str
        Run and node, which give the name of its folder.
    control : sequence of str
        Patterns of the network interfaces for the connections; empty for any.
    identity : JobIdentity or None
        Identity of the job; None if all its stores are on one machine.
    silent_s : float
        Seconds without a byte after which a copy fails.
    """

    def __init__(
        self,
        run_key: str,
        node: str,
        control: Sequence[str] = (),
        identity: JobIdentity | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        self._node, self._identity = node, identity
        self._silent_s = silent_s
        self._keep = ExitStack()
        self.folder: Path = self._keep.enter_context(node_folder(state_folder(run_key, node)))
        # A killed agent leaves states, and halves of copies, that the driver does not know of.
        for left in self.folder.iterdir():
            if left.name != USERS:
                left.unlink(missing_ok=True)
        self._spare = SpareFile(self.folder)
        self._listener = Listener(secrets.token_hex(32), control_address(control), identity)
        # Copiers remove themselves; each operation of a dict is whole by itself.
        self._under_way: dict[str, threading.Thread] = {}
        self._results: queue.SimpleQueue[StateFetched] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._closed = False
        threading.Thread(target=self._serve, name="states", daemon=True).start()

    @property
    def address(self) -> Address:
        """Address at which other agents get states."""
        return self._listener.address

    def fileno(self) -> int:
        """Return the descriptor that is readable when `fetched` has results."""
        return self._woken

    def fetch(self, name: str, address: Address) -> None:
        """Copy a state from another store in the background, unless a copy is under way."""
        if name not in self._under_way:
            copier = threading.Thread(target=self._fetch, args=(name, address), name="hop", daemon=True)
            self._under_way[name] = copier
            copier.start()

    def fetched(self) -> list[StateFetched]:
        """Return the results of copies ended since the last call."""
        results = []
        with suppress(queue.Empty):
            while True:
                results.append(self._results.get_nowait())
                os.read(self._woken, 1)
        return results

    def forget(self, names: Iterable[str]) -> None:
        """Delete states; processes that have mapped one keep it."""
        for name in names:
            _file_in(self.folder, name).unlink(missing_ok=True)

    def close(self) -> None:
        """End service and copies, and remove the folder if no other process uses it."""
        self._closed = True
        self._listener.close()
        # A copy that goes on would write into the folder during its removal.
        limit = time.monotonic() + END_S
        for copier in list(self._under_way.values()):
            copier.join(max(0.0, limit - time.monotonic()))
        self._spare.close()
        self._keep.close()

    def _serve(self) -> None:
        while not self._closed:
            with suppress(TimeoutError):
                name, connection = self._listener.wait(POLL_S)
                threading.Thread(target=self._send, args=(str(name), connection), daemon=True).start()

    def _send(self, name: str, connection: Connection) -> None:
        """Send the length of a state and its bytes; only -1 if it is missing."""
        connection.set_timeout(self._silent_s)
        with suppress(OSError):
            try:
                with _file_in(self.folder, name).open("rb") as file:
                    size_bytes = os.fstat(file.fileno()).st_size
                    with mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ) as view:
                        connection.send(size_bytes)
                        with memoryview(view) as data:
                            # By blocks, since `set_timeout` limits each send as a whole (socket.sendall).
                            for start in range(0, size_bytes, BLOCK_BYTES):
                                connection.send_bytes(data[start : start + BLOCK_BYTES])
            except (FileNotFoundError, ValueError):
                connection.send(-1)
            finally:
                connection.close()

    def _fetch(self, name: str, address: Address) -> None:
        began = time.monotonic()
        try:
            target = _file_in(self.folder, name)
            size_bytes = 0 if target.exists() else self._copy(target, name, address)
            result = StateFetched(self._node, name, size_bytes, time.monotonic() - began)
        except (OSError, ValueError, LookupError) as failure:
            result = StateFetched(self._node, name, error=f"{type(failure).__name__}: {failure}")
        del self._under_way[name]
        self._results.put(result)
        os.write(self._wake, b".")
        # After the report: the allocation must not delay it.
        self._spare.renew(result.bytes)

    def _copy(self, target: Path, name: str, address: Address) -> int:
        """Copy a state into a file; return its length in bytes."""
        connection = connect(address, name, self._silent_s, self._identity)
        connection.set_timeout(self._silent_s)
        with closing(connection), draft(target) as temporary:
            size_bytes = int(connection.receive(self._silent_s))
            if size_bytes < 0:
                raise LookupError(f"the other node does not have {name}")
            self._spare.rename_to(temporary)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600)
            # Through a block in the processor's cache: page faults of a mapped file take longer.
            block = memoryview(bytearray(min(BLOCK_BYTES, size_bytes)))
            with os.fdopen(descriptor, "wb") as file:
                file.truncate(size_bytes)
                for start in range(0, size_bytes, BLOCK_BYTES):
                    if self._closed:
                        raise ConnectionAbortedError("the store is closed")
                    part = block[: size_bytes - start]
                    connection.receive_bytes(part)
                    file.write(part)
            temporary.replace(target)
        return size_bytes


def _file_in(folder: Path, name: str) -> Path:
    """Return the path of a state; ValueError for a name that could lead out of the folder."""
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no name of a state")
    return folder / name


class SpareFile:
    """Memory allocated ahead for the next copy of a state: allocation takes longer than copying.

    It is at most one file, with a hidden name in a folder of the node's memory.

    Parameters
    ----------
    most_bytes : int
        Largest size of the file.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_SPARE_BYTES) -> None:
        self.path = folder / ".spare"
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._closed = False

    def rename_to(self, path: Path) -> None:
        """Rename the file, if there is one; its content is arbitrary."""
        with suppress(FileNotFoundError):
            self.path.replace(path)

    def renew(self, size_bytes: int) -> None:
        """Provide a file for the next copy, likely as large as the last one."""
        with self._lock, suppress(OSError):
            if self._closed or self.path.exists():
                return
            size_bytes = min(size_bytes, self._most_bytes)
            status = os.statvfs(self.path.parent)
            if 0 < size_bytes <= status.f_bavail * status.f_frsize - LEAST_FREE:
                self._allocate(size_bytes)

    def close(self) -> None:
        """Delete the present file, and provide no more."""
        with self._lock:
            self._closed = True
            self.path.unlink(missing_ok=True)

    def _allocate(self, size_bytes: int) -> None:
        making = self.path.with_name(".spare-in-making")
        descriptor = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            making.replace(self.path)
        finally:
            os.close(descriptor)
            making.unlink(missing_ok=True)
