"""Lock of the project: only one hetctl process at a time changes the catalog and submits."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from hetctl.model.errors import DISK_FULL_ERRORS, BadInputError, LockedError, is_transient
from hetctl.model.serialization import encode, parse
from hetctl.model.values import dataclass
from hetctl.storage.atomic_io import draft, hard_link, make_private_folder, write_json
from hetctl.storage.processes import HostBoot, Process

HEARTBEAT_S = 5.0
"""Seconds between two touches of a held lock."""
POLL_S = 0.2
LOGGED_AFTER_S = 1.0
"""Seconds of waiting for the lock after which the holder is named in a log message."""
SILENT_S = 120.0
"""Seconds without a touch of the lock after which a holder on another host counts as dead."""

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """Holder of the lock, as stored in the lock file.

    Parameters
    ----------
    since : float
        Time of the locking in seconds since the epoch.
    """

    machine: HostBoot
    process: Process
    command: str
    since: float

    @property
    def here(self) -> bool:
        """True if the holder is a process of this host."""
        return self.machine.host == HostBoot.this().host

    @property
    def gone(self) -> bool:
        """True if the holder, a process of this host, has ended."""
        return self.machine != HostBoot.this() or not self.process.alive

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        return f"`{self.command}` (process {self.process.pid} on host {self.machine.host}, since {since})"


_LEFT: set[Holder] = set()
"""Locks that this process has left although a disk that did not answer may still have the file."""


class ProjectLock:
    """Lock of the project within a ``with`` block.

    The lock is a file, created atomically by a hard link; its holder touches it as long as it runs. The lock
    of a dead process is taken over with a log message. A process of this host is dead when it has ended, one
    of another host when it has not touched the lock for `SILENT_S`. An unreadable lock is also taken over,
    since hetctl never leaves such a file.

    Parameters
    ----------
    path : Path
        Path of the lock file, `Home.lock`.
    command : str
        Command, such as ``hetctl submit``, named in the errors of processes that find the project locked.
    patience_s : float
        Seconds to wait for another process to release the lock. Most hold it for a fraction of a second.
    heartbeat_s : float
        Seconds between two touches of the lock, far fewer than `SILENT_S`.
    """

    def __init__(
        self, path: Path, command: str, patience_s: float = 0.0, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self._path = path
        self._patience_s = patience_s
        self._heartbeat_s = heartbeat_s
        self._holder = Holder(HostBoot.this(), Process.of(os.getpid()), command, time.time())
        self._heartbeat = ExitStack()

    def __enter__(self) -> ProjectLock:
        """Take the lock.

        Raises
        ------
        LockedError
            If another process still holds it after `patience_s`.
        BadInputError
            If the lock file cannot be written.
        OSError
            If the disk is full, or does not answer.
        """
        self._holder = replace(self._holder, since=time.time())
        try:
            make_private_folder(self._path.parent)
            with draft(self._path) as own:
                write_json(own, encode(self._holder))
                self._wait(own)
                self._heartbeat.enter_context(_touching(self._path, self._heartbeat_s))
        except OSError as error:
            self._heartbeat.close()
            # The file may still be there, and this process may try again.
            _LEFT.add(self._holder)
            if is_transient(error) or error.errno in DISK_FULL_ERRORS:
                raise
            raise BadInputError(
                f"the project's lock {self._path} cannot be written: {error.strerror}",
                "set HETCTL_HOME to a folder that is writable and allows hard links",
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.close()
        try:
            # A process that was stopped for too long has lost the lock to another one.
            if _read(self._path.read_text(encoding="utf-8")) == self._holder:
                self._path.unlink()
        except FileNotFoundError:
            pass
        except OSError as failure:
            if not is_transient(failure):
                raise
            LOGGER.warning("the lock stays until process %d ends: %s", os.getpid(), failure)
            _LEFT.add(self._holder)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Leave the lock to other processes within a ``with`` block, and take it again at its end.

        Raises
        ------
        LockedError, BadInputError
            As when it was taken first.
        """
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def _wait(self, own: Path) -> None:
        start, is_logged = time.monotonic(), False
        while True:
            try:
                while not (hard_link(own, self._path) or self._take_over(own)):
                    pass
                return
            except LockedError as error:
                waited_s = time.monotonic() - start
                if waited_s >= self._patience_s:
                    raise
                if not is_logged and waited_s >= LOGGED_AFTER_S:
                    LOGGER.warning("%s; waiting up to %g s", error.message, self._patience_s)
                    is_logged = True
            time.sleep(POLL_S)

    def _take_over(self, own: Path) -> bool:
        """Replace a stale lock file by this process's; return False if the stale file no longer exists.

        The process replaces it only while it holds a file lock on it and it still is the project's lock.
        """
        try:
            # Open for writing, since NFS turns flock(2) into a byte-range lock that needs it.
            with self._path.open("r+", encoding="utf-8", errors="replace") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                holder = _read(file.read())
                # Both times are those of the file server: clocks of hosts differ.
                silent_s = own.stat().st_mtime - os.fstat(file.fileno()).st_mtime
                is_over = holder and (holder.gone if holder.here else silent_s > SILENT_S)
                if holder and holder not in _LEFT and not is_over:
                    raise self._locked_by(holder)
                # Another process may have replaced the file between open and lock.
                if not os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                    return False
                own.replace(self._path)
        except FileNotFoundError:
            return False
        LOGGER.warning("the lock of %s was stale and is taken over", holder or "an unknown process")
        return True

    def _locked_by(self, holder: Holder) -> LockedError:
        hint = "wait for it to end"
        if not holder.here:
            hint += f"; if host {holder.machine.host} is down, the lock is free in {SILENT_S:g} s at most"
        return LockedError(f"the project is locked by {holder}", hint)


@contextmanager
def _touching(path: Path, every_s: float) -> Iterator[None]:
    """Touch a file again and again through its descriptor, and so never a file that replaced it."""
    descriptor = os.open(path, os.O_RDONLY)
    over = threading.Event()

    def touch() -> None:
        while not over.wait(every_s):
            with suppress(OSError):
                # Without times, so that an NFS server sets its own.
                os.utime(descriptor)

    thread = threading.Thread(target=touch, name="lock-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.close(descriptor)


def _read(text: str) -> Holder | None:
    """Return the holder named in a lock file; None if it names none."""
    try:
        return parse(Holder, text)
    except ValueError:
        return None
