"""Start of an agent from a Python environment that is on its node: ``python -m .. DRIVER_FILE ..``.

An archive of the environment comes to the disk or memory of each node, and is unpacked there while it comes.
One node reads it from the shared file system, and every other one from a node that the driver names. Agents
of one machine share the result. The words of the command line are those of an agent.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

from hetctl.cluster.launchers.container import PACKAGE
from hetctl.model.serialization import decode, encode
from hetctl.model.values import dataclass
from hetctl.runtime.agent.joining import CONNECT_S, DriverAddress, DriverFile
from hetctl.runtime.agent.messages import ENVIRONMENT, Archive, SourceRequest
from hetctl.runtime.agent.rank_template import run_to_the_end
from hetctl.runtime.interfaces import control_address
from hetctl.runtime.transport import Address, Connection, Listener, connect
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.patience import PATIENT
from hetctl.storage.processes import HostBoot, die_with_parent

BLOCK_BYTES = 2**20
POLL_S = 0.002
SIGN_EVERY_S, SILENT_S = 2.0, 10.0
"""Interval of signs of life of a source that waits itself, and time without one after which it is left."""
REACH_S = 5.0
"""Seconds in which a source must be reached."""
IDLE_S = 10.0
"""Seconds without a reader after which a node with the whole archive serves it no longer."""
DECOMPRESS = {".zst": "--zstd", ".gz": "--gzip", ".tgz": "--gzip", ".xz": "--xz"}
"""Options of tar(1) by the end of an archive's name; it detects no compression in a pipe."""
READY = "ready"


class UnusableError(Exception):
    """The environment cannot be had on this node, and why."""


@dataclass(frozen=True)
class Environment:
    """Environment on this node.

    Parameters
    ----------
    folder : Path
        Folder with it and with hetctl.
    lock : int
        Descriptor of its lock, shared by all that use it.
    """

    folder: Path
    lock: int

    @property
    def root(self) -> Path:
        """Folder of the unpacked archive."""
        return self.folder / "environment"

    @property
    def packages(self) -> Path:
        """Folder with hetctl, which need not be in the archive."""
        return self.folder / "packages"

    def leave(self) -> None:
        """Remove it if no other agent of this machine uses it."""
        with suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.folder, ignore_errors=True)
            fcntl.flock(self.lock, fcntl.LOCK_UN)


def main() -> NoReturn:
    """Bring the environment, and become the agent there."""
    driver = PATIENT.call(DriverFile, Path(sys.argv[1]))
    try:
        found = provide(driver.address)
    except (OSError, UnusableError) as error:
        sys.exit(f"agent: no environment on this node: {error}")
    os.set_inheritable(found.lock, True)
    programs = found.root / "bin"
    variables = {
        "PATH": f"{programs}:{os.environ.get('PATH', os.defpath)}",
        # Modules of the user outside of the archive must not come before those in it.
        "PYTHONPATH": str(found.packages),
        "PYTHONNOUSERSITE": "1",
    }
    print(f"agent: environment: {found.root}", flush=True)
    staged = ("--staged", str(found.folder), str(found.lock))
    words = (str(programs / "python"), "-m", "hetctl.runtime.agent", *sys.argv[1:], *staged)
    os.execve(words[0], words, {**os.environ, **variables})


def provide(driver: DriverAddress) -> Environment:
    """Bring the archive to this node, unless another agent here has.

    Raises
    ------
    UnusableError, OSError
        If it cannot be had.
    """
    archive = driver.environment
    assert archive is not None
    home = make_private_folder(Path(os.path.expandvars(archive.folder)) / f"hetctl-{os.geteuid()}")
    _refuse_unsafe(home)
    lock = os.open(home / f"{archive.key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    environment = Environment(home / archive.key, lock)
    boot = HostBoot.this().boot
    _remove_leftovers(home, archive.key)
    while True:
        # It waits for an agent here that makes it, and for the end of its last user that removes it.
        fcntl.flock(lock, fcntl.LOCK_SH)
        if _is_ready(environment.folder, boot):
            return environment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(POLL_S)
            continue
        # Between the two locks another agent may have made it (flock(2)).
        if not _is_ready(environment.folder, boot):
            shutil.rmtree(environment.folder, ignore_errors=True)
            _make(environment, archive, driver)
            (environment.folder / READY).write_text(boot, encoding="ascii")


def _remove_leftovers(home: Path, key: str) -> None:
    """Remove the environments of killed agents, which have no user any more."""
    for path in home.glob("*.lock"):
        if path.stem != key:
            with suppress(OSError), path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home / path.stem, ignore_errors=True)


def _is_ready(folder: Path, boot: str) -> bool:
    try:
        return (folder / READY).read_text(encoding="ascii") == boot
    except OSError:
        return False


def _refuse_unsafe(home: Path) -> None:
    """Raise UnusableError for a folder of another user, or one from which no library can be loaded."""
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UnusableError(f"{home} is another user's: change stage_folder in the site file")
    if os.statvfs(home).f_flag & os.ST_NOEXEC:
        raise UnusableError(f"{home} is mounted noexec: change stage_folder in the site file")


def _make(environment: Environment, archive: Archive, driver: DriverAddress) -> None:
    for folder in (environment.root, environment.packages):
        folder.mkdir(mode=0o700, parents=True)
    file = environment.folder / "archive"
    # What the batch system has brought, if it is whole and this user's.
    received = Path(os.path.expandvars(archive.folder)) / archive.name
    with suppress(OSError):
        found = received.lstat()
        if stat.S_ISREG(found.st_mode) and (found.st_uid, found.st_size) == (os.geteuid(), archive.bytes):
            received.rename(file)
    file.touch(mode=0o600)
    transfer = _Transfer(file, archive, driver, _serve(file, archive, driver))
    transfer.start()
    shutil.copytree(PACKAGE, environment.packages / PACKAGE.name)
    errors = _unpack(file, archive, environment.root, transfer.is_alive)
    if transfer.error:
        raise transfer.error
    if errors:
        raise UnusableError(f"{archive.path} cannot be unpacked: {errors}")
    if not (environment.root / "bin" / "python").exists():
        raise UnusableError(f"{archive.path} has no bin/python at its top level")


class _Transfer(threading.Thread):
    """Reads the archive into a file: from the source that the driver names, or else where it is."""

    def __init__(self, file: Path, archive: Archive, driver: DriverAddress, address: Address) -> None:
        super().__init__(name="environment", daemon=True)
        self.error: OSError | None = None
        self._file, self._archive, self._driver, self._address = file, archive, driver, address

    def run(self) -> None:
        """Read until the file is whole; a source that fails is replaced, and reading goes on there."""
        failed = ""
        try:
            with self._file.open("ab") as target:
                while target.tell() < self._archive.bytes:
                    source = self._next_source(failed)
                    if source is None:
                        self._read(target)
                        continue
                    failed = ""
                    try:
                        self._receive(source, target)
                    except OSError as error:
                        failed = source.name
                        print(f"agent: environment: {source.host} is left: {error}", file=sys.stderr)
        except OSError as error:
            self.error = error

    def _next_source(self, failed: str) -> Address | None:
        request = {ENVIRONMENT: encode(SourceRequest(self._address, failed))}
        with closing(connect(self._driver, request, CONNECT_S, self._driver.identity)) as connection:
            answer = connection.receive(CONNECT_S)[ENVIRONMENT]
        return decode(Address, answer) if answer else None

    def _read(self, target: BinaryIO) -> None:
        with Path(self._archive.path).open("rb") as source:
            source.seek(target.tell())
            while block := source.read(BLOCK_BYTES):
                target.write(block)
                target.flush()
        if target.tell() != self._archive.bytes:
            raise OSError(f"{self._archive.path} has changed")

    def _receive(self, source: Address, target: BinaryIO) -> None:
        block = memoryview(bytearray(BLOCK_BYTES))
        with closing(connect(source, target.tell(), REACH_S, self._driver.identity)) as connection:
            connection.set_timeout(SILENT_S)
            while target.tell() < self._archive.bytes:
                # Zero is a sign of life of a source that waits for its own.
                if count := connection.receive(SILENT_S):
                    connection.receive_bytes(block[:count])
                    target.write(block[:count])
                    target.flush()


def _serve(file: Path, archive: Archive, driver: DriverAddress) -> Address:
    """Fork a process that serves the file to other nodes while it grows; return where."""
    end_with_agent = die_with_parent(signal.SIGKILL)
    reader, writer = os.pipe()
    if os.fork() == 0:
        end_with_agent()
        os.close(reader)
        run_to_the_end(lambda: _serve_others(file, archive, driver, writer))
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as answer:
        return decode(Address, json.loads(answer.read()))


def _serve_others(file: Path, archive: Archive, driver: DriverAddress, writer: int) -> int:
    listener = Listener(driver.key, control_address(archive.control), driver.identity)
    with os.fdopen(writer, "w", encoding="utf-8") as answer:
        json.dump(encode(listener.address), answer)
    readers: list[threading.Thread] = []
    busy_at = time.monotonic()
    # The file is gone once the last agent has left.
    with suppress(FileNotFoundError):
        while time.monotonic() < busy_at + IDLE_S:
            with suppress(TimeoutError):
                start, connection = listener.wait(1.0)
                readers.append(threading.Thread(target=_send, args=(connection, file, start, archive.bytes)))
                readers[-1].start()
            if file.stat().st_size < archive.bytes or any(reader.is_alive() for reader in readers):
                busy_at = time.monotonic()
        file.unlink()
    return 0


def _send(connection: Connection, file: Path, start: int, size: int) -> None:
    sign_at = time.monotonic()
    with suppress(OSError), closing(connection):
        connection.set_timeout(SILENT_S)
        for block in _growing(file, start, size):
            if not block and time.monotonic() < sign_at:
                continue
            connection.send(len(block))
            connection.send_bytes(memoryview(block))
            sign_at = time.monotonic() + SIGN_EVERY_S


def _growing(
    file: Path, start: int, size: int, goes_on: Callable[[], bool] = lambda: True
) -> Iterator[bytes]:
    """Yield blocks of a file that grows to `size` bytes, and an empty one after each wait."""
    with file.open("rb", buffering=0) as content:
        content.seek(start)
        while start < size:
            is_growing = goes_on()
            if block := content.read(BLOCK_BYTES):
                start += len(block)
            elif is_growing:
                time.sleep(POLL_S)
            else:
                return
            yield block


def _unpack(file: Path, archive: Archive, folder: Path, goes_on: Callable[[], bool]) -> str:
    """Unpack the file while it grows; return what tar(1) says of a failure, or else nothing."""
    compression = DECOMPRESS.get(Path(archive.path).suffix)
    command = ("tar", "--extract", f"--directory={folder}", "--no-same-owner", "--file=-")
    words = (*command, compression) if compression else command
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as tar:
        assert tar.stdin is not None
        assert tar.stderr is not None
        # It ends early where it cannot go on, for want of zstd or of room.
        with suppress(BrokenPipeError), tar.stdin as target:
            for block in _growing(file, 0, archive.bytes, goes_on):
                target.write(block)
        said = tar.stderr.read().decode(errors="replace").strip()
    return (said or f"tar ended with {tar.returncode}") if tar.returncode else ""


if __name__ == "__main__":
    main()
