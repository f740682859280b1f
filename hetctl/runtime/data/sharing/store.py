"""Prepared samples in a file that all processes of a node map: each is prepared once on the node.

Any process may die at any instruction. A sample is claimed by a lock on one byte of a file beside the
store, which the kernel releases when the process dies, and it is valid only once its byte of state is set,
which is written last.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hetctl.model.errors import BadInputError, HetctlError, LockedError
from hetctl.model.site import Timeouts
from hetctl.runtime.data.sharing.ofd_locks import ByteLocks
from hetctl.runtime.data.sources import Array, SampleSpec
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.processes import BOOT_ID

MAGIC = b"hetctl samples 1\n"
PAGE = 4096
READY = 1
POLL_S = 0.005
CREATION_S = 60.0
"""Time limit in seconds for another process that creates the file."""

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})

Prepare = Callable[[int], tuple[Array, Array]]


class SampleStore:
    """The prepared samples of one source on this node; the first process creates the store.

    Claims belong to this object: a second thread or a forked process needs its own object to fill the store.

    Parameters
    ----------
    path : Path
        File in a folder that only the owner can enter, on a file system of this node. Claims are in
        ``<name>.lock`` beside it.
    spec : SampleSpec
        Specification of the samples.
    samples : int
        Number of the samples.
    fingerprint : str
        Identification of the samples and of their preparation.

    Raises
    ------
    BadInputError
        If the file holds other data, or if it has to be created and there is too little space for all of it;
        nothing is written then.
    LockedError
        If another process does not finish creating the file.
    """

    def __init__(self, path: Path, spec: SampleSpec, samples: int, fingerprint: str) -> None:
        self._spec = spec
        self._claims = ByteLocks(_lock_file(path))
        try:
            self._map = self._opened(path, samples, fingerprint)
        except BaseException:
            self._claims.close()
            raise
        self._states = np.frombuffer(self._map, np.uint8, samples, offset=PAGE)
        self._records = np.frombuffer(self._map, spec.record, samples, offset=_records_at(samples))

    @staticmethod
    def bytes_needed(spec: SampleSpec, samples: int) -> int:
        """Return the size of the file in bytes."""
        return _records_at(samples) + samples * spec.record_bytes

    def view(self, number: int) -> tuple[Array, Array]:
        """Return one sample's x and y in place, read-only.

        Raises
        ------
        HetctlError
            If the sample is not ready.
        """
        if self._states[number] != READY:
            raise HetctlError(f"sample {number} is read before it is prepared")
        _fence()
        x, y = self._records["x"][number, ...], self._records["y"][number, ...]
        x.flags.writeable = y.flags.writeable = False
        return x, y

    def fill(self, number: int, prepare: Prepare, patience_s: float = Timeouts.samples_s) -> None:
        """Make a sample ready: prepare it, or wait for another process that does.

        Parameters
        ----------
        prepare : callable
            ``prepare(number) -> (x, y)``. Its exceptions are raised again; the sample is left to others.
        patience_s : float
            Seconds to wait for the other process.

        Raises
        ------
        BadInputError
            If the sample does not match the specification.
        LockedError
            If the other process takes longer.
        """
        latest = time.monotonic() + patience_s
        while not self._prepared(number, prepare):
            if time.monotonic() > latest:
                raise _taken_too_long(f"sample {number} is being prepared", patience_s)
            time.sleep(POLL_S)

    def close(self) -> None:
        """Release the file."""
        self._claims.close()
        del self._states, self._records
        self._map.close()

    def _opened(self, path: Path, samples: int, fingerprint: str) -> mmap.mmap:
        header = _header(self._spec, samples, fingerprint)
        size = self.bytes_needed(self._spec, samples)
        with _held(self._claims, samples, f"{path} is being made"):
            if not path.exists() or _of_an_earlier_boot(path):
                _create(path, header, size)
        return _mapped(path, header, size)

    def _prepared(self, number: int, prepare: Prepare) -> bool:
        """Make a sample ready; return false if another process prepares it."""
        if self._states[number] == READY:
            return True
        if not self._claims.take(number):
            return False
        try:
            # Another process may have prepared it between the check and the lock.
            if self._states[number] != READY:
                self._write(number, *prepare(number))
        finally:
            self._claims.drop(number)
        return True

    def _write(self, number: int, x: Array, y: Array) -> None:
        self._spec.check(x, y, f"sample {number}")
        self._records["x"][number] = x
        self._records["y"][number] = y
        _fence()
        self._states[number] = READY


@contextmanager
def _held(claims: ByteLocks, byte: int, what: str) -> Iterator[None]:
    latest = time.monotonic() + CREATION_S
    while not claims.take(byte):
        if time.monotonic() > latest:
            raise _taken_too_long(what, CREATION_S)
        time.sleep(POLL_S)
    try:
        yield
    finally:
        claims.drop(byte)


def _fence() -> None:
    """Act as a memory barrier, since some processors reorder reads and writes.

    The state of a sample must be neither written before nor read after the sample itself.
    """
    # Taking and releasing a lock are barriers in one direction each; two pairs in a row are one in both.
    for _ in range(2):
        with threading.Lock():
            pass


def _records_at(samples: int) -> int:
    return PAGE + -(-samples // PAGE) * PAGE


def _header(spec: SampleSpec, samples: int, fingerprint: str) -> bytes:
    content = repr((fingerprint, samples, spec)).encode()
    return MAGIC + _boot() + hashlib.sha256(content).hexdigest().encode()


def _boot() -> bytes:
    return BOOT_ID.read_bytes()


def _of_an_earlier_boot(path: Path) -> bool:
    """Return true if a store is older than the last boot: its last writes may be incomplete."""
    with path.open("rb") as file:
        begin = file.read(len(MAGIC + _boot()))
    return begin.startswith(MAGIC) and not begin.endswith(_boot())


def _lock_file(path: Path) -> Path:
    """Return the file of claims beside the store; create what is missing."""
    make_private_folder(path.parent)
    claims = path.with_name(f"{path.name}.lock")
    os.close(os.open(claims, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    return claims


def _create(path: Path, header: bytes, size: int) -> None:
    """Create the file with all of its space allocated, so that a full disk can show only here."""
    temporary = path.with_name(f".{path.name}.new")
    # Left by a process that was killed here: the lock of the claims lets no other one be at work.
    temporary.unlink(missing_ok=True)
    free = _free_bytes(path.parent)
    if size > free:
        raise _no_space(path.parent, size, free)
    try:
        with temporary.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            # A mapped page for which there is no space ends the process by SIGBUS (mmap(2)).
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(header)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise _no_space(path.parent, size, _free_bytes(path.parent)) from error
        raise


def _mapped(path: Path, header: bytes, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.pread(descriptor, len(header), 0) != header or os.fstat(descriptor).st_size != size:
            raise BadInputError(f"{path} holds other samples than these", "remove it if nothing uses it")
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _no_space(folder: Path, size: int, free: int) -> BadInputError:
    return BadInputError(
        f"the prepared samples need {size / 2**20:,.1f} MiB, and {folder} has {free / 2**20:,.1f} MiB free",
        "share in lockstep, which keeps few samples at a time, or prepare smaller ones",
    )


def _taken_too_long(what: str, seconds: float) -> LockedError:
    return LockedError(
        f"{what} by another process, which has taken more than {seconds:g} s",
        "check the other trainers on this node",
    )
