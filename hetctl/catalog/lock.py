"""The project's lock: one hetctl at a time changes the catalog and submits."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hetctl.model.errors import BadInputError, LockedError
from hetctl.model.serialization import decode, encode
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.processes import HostBoot, Process

HEARTBEAT_S = 5.0
SILENT_S = 120.0
"""A holder on another host that has not touched its lock for so long is dead."""

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """Who holds the lock, as the lock file says.

    Parameters
    ----------
    since : float
        Seconds since the epoch.
    """

    machine: HostBoot
    process: Process
    command: str
    since: float

    @property
    def here(self) -> bool:
        """Whether it is a process of this host."""
        return self.machine.host == HostBoot.this().host

    @property
    def gone(self) -> bool:
        """Whether its process, one of this host, has ended."""
        return self.machine != HostBoot.this() or not self.process.alive

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        return f"`{self.command}` (process {self.process.pid} on host {self.machine.host}, since {since})"


class ProjectLock:
    """Holds the project's lock within a ``with`` block.

    The lock is a file that appears whole, by a hard link, or not at all, and that its holder touches
    as long as it lives. That of a dead process is taken over, and the log says so: on this host the
    process is gone, on another one it has fallen silent. A lock that cannot be read is taken over,
    too, since hetctl never leaves such a file.

    Parameters
    ----------
    path : Path
        `Home.lock`.
    command : str
        Named to those who find the project locked, such as ``hetctl submit``.
    """

    def __init__(self, path: Path, command: str) -> None:
        self._path = path
        self._holder = Holder(HostBoot.this(), Process.of(os.getpid()), command, time.time())
        self._heartbeat = ExitStack()

    def __enter__(self) -> ProjectLock:
        """Take the lock.

        Raises
        ------
        LockedError
            If another process holds it.
        BadInputError
            If the lock file cannot be written.
        """
        try:
            with self._own_file() as own:
                while not (_link(own, self._path) or self._take_over(own)):
                    pass
                self._heartbeat.enter_context(_touching(self._path))
        except OSError as error:
            raise BadInputError(
                f"the project's lock {self._path} cannot be written: {error.strerror}",
                "set HETCTL_HOME to a folder that is writable and allows hard links",
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.close()
        with suppress(FileNotFoundError):
            if _read(self._path.read_text(encoding="utf-8")) == self._holder:
                self._path.unlink()

    @contextmanager
    def _own_file(self) -> Iterator[Path]:
        """Write a file that says that we are the holder; what is left of it is removed."""
        make_private_folder(self._path.parent)
        own = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex}.tmp")
        try:
            descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(json.dumps(encode(self._holder)))
                file.flush()
                os.fsync(file.fileno())
            yield own
        finally:
            own.unlink(missing_ok=True)

    def _take_over(self, own: Path) -> bool:
        """Put our file in place of a stale one; False if the one that was there is gone.

        Only the process that has the stale file locked while it still is the project's lock
        replaces it.
        """
        try:
            with self._path.open("r+", encoding="utf-8", errors="replace") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                holder = _read(file.read())
                silent_s = own.stat().st_mtime - os.fstat(file.fileno()).st_mtime
                if holder is not None and not (holder.gone if holder.here else silent_s > SILENT_S):
                    raise self._locked_by(holder)
                if not os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                    return False
                own.replace(self._path)
        except FileNotFoundError:
            return False
        LOGGER.warning("the lock of %s was stale and is taken over", holder or "nobody")
        return True

    def _locked_by(self, holder: Holder) -> LockedError:
        hint = "wait for it to end"
        if not holder.here:
            hint += f"; if host {holder.machine.host} is down, the lock is free in {SILENT_S:g} s at most"
        return LockedError(f"the project is locked by {holder}", hint)


@contextmanager
def _touching(path: Path) -> Iterator[None]:
    """Touch a file every few seconds, as long as it is the same file."""
    descriptor = os.open(path, os.O_RDONLY)
    over = threading.Event()

    def touch() -> None:
        while not over.wait(HEARTBEAT_S):
            with suppress(OSError):
                os.utime(descriptor)

    thread = threading.Thread(target=touch, name="lock-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.close(descriptor)


def _link(own: Path, path: Path) -> bool:
    try:
        os.link(own, path)
    except FileExistsError:
        # On NFS the answer to a link that was made can be lost, and the repeated call then fails.
        return own.stat().st_nlink == 2
    return True


def _read(text: str) -> Holder | None:
    """Return whom a lock file names; None if it names nobody."""
    try:
        return decode(Holder, json.loads(text))
    except ValueError:
        return None
