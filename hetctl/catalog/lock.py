"""The project's lock: one hetctl at a time changes the catalog and submits."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hetctl.core.codec import decode, encode
from hetctl.core.errors import BadInputError, LockedError
from hetctl.core.layout import make_private_folder


@dataclass(frozen=True)
class Holder:
    """Who holds the lock, as the lock file says.

    Parameters
    ----------
    since : float
        Seconds since the epoch.
    """

    host: str
    pid: int
    command: str
    since: float

    @property
    def dead(self) -> bool:
        """Whether the process is known to be gone; on another host that cannot be known."""
        return self.host == socket.gethostname() and not is_alive(self.pid)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.since))
        return f"`{self.command}` (process {self.pid} on host {self.host}, since {since})"


def is_alive(pid: int) -> bool:
    """Say whether a process of this host exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        # Somebody else's process, or a kernel that does not tell: it may be alive.
        return True
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


class ProjectLock:
    """Holds the project's lock within a ``with`` block.

    The lock is a file that appears whole, by a hard link, or not at all. That of a dead process of
    this host is taken over; so is one that cannot be read, since hetctl never leaves such a file.

    Parameters
    ----------
    path : Path
        `Home.lock`.
    command : str
        Named to those who find the project locked, such as ``hetctl submit``.
    """

    def __init__(self, path: Path, command: str) -> None:
        self._path = path
        self._holder = Holder(socket.gethostname(), os.getpid(), command, time.time())

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
        except OSError as error:
            raise BadInputError(
                f"the project's lock {self._path} cannot be written: {error.strerror}",
                "set HETCTL_HOME to a folder that is writable and allows hard links",
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

        Only processes of the holder's host get as far as replacing it, and only the one that has
        the stale file locked while it still is the project's lock does.
        """
        try:
            with self._path.open("r+", encoding="utf-8", errors="replace") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                holder = _read(file.read())
                if holder is not None and not holder.dead:
                    raise self._locked_by(holder)
                if not os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                    return False
                own.replace(self._path)
                return True
        except FileNotFoundError:
            return False

    def _locked_by(self, holder: Holder) -> LockedError:
        hint = "wait for it to end"
        if holder.host != socket.gethostname():
            hint += f"; if nothing of hetctl runs on host {holder.host} any more, remove {self._path}"
        return LockedError(f"the project is locked by {holder}", hint)


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
        holder = decode(Holder, json.loads(text))
    except ValueError:
        return None
    return holder if holder.pid > 0 else None
