"""Prepared samples in a file that all processes of a node map: each is prepared once on the node.

Any process may die at any instruction. A sample is claimed by a lock on one byte of the file, which the
kernel releases when the process dies, and it is valid only once its byte of state is set, written last.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hetctl.model.errors import BadInputError, HetctlError, LockedError
from hetctl.model.site import Timeouts
from hetctl.runtime.data.sharing.ofd_locks import ByteLocks
from hetctl.runtime.data.sharing.shared_file import create, fence, map_whole
from hetctl.runtime.data.sources import Array, SampleSpec
from hetctl.storage.atomic_io import make_private_folder

MAGIC = b"hetctl samples 2\n"
PAGE = 4096
READY = 1
POLL_S = 0.005

Prepare = Callable[[int], tuple[Array, Array]]


class SampleStore:
    """The prepared samples of one source on this node; the first process creates the store.

    Claims belong to this object: a second thread or a forked process needs its own object to fill the store.

    Parameters
    ----------
    path : Path
        File in a folder that only the owner can enter, on a file system of this node.
    spec : SampleSpec
        Specification of the samples.
    samples : int
        Number of the samples.
    fingerprint : str
        Identification of the samples and of their preparation.

    Raises
    ------
    BadInputError
        If the file holds other data, or there is too little space for all of it.
    """

    def __init__(self, path: Path, spec: SampleSpec, samples: int, fingerprint: str) -> None:
        content = repr((fingerprint, samples, spec)).encode()
        head = MAGIC + hashlib.sha256(content).hexdigest().encode()
        first = PAGE + -(-samples // PAGE) * PAGE
        make_private_folder(path.parent)
        if not path.exists():
            create(path, head, first + samples * spec.record.itemsize)
        self._spec = spec
        self._map = map_whole(
            path,
            f"the store of {samples} prepared samples",
            "share in lockstep, which keeps few samples at a time, or prepare smaller ones",
        )
        if self._map[: len(head)] != head:
            self._map.close()
            raise BadInputError(f"{path} holds other samples than these", "remove it if nothing uses it")
        self._claims = ByteLocks(path)
        self._states = np.frombuffer(self._map, np.uint8, samples, offset=PAGE)
        self._records = np.frombuffer(self._map, spec.record, samples, offset=first)

    def view(self, number: int) -> tuple[Array, Array]:
        """Return one sample's x and y in place, read-only.

        Raises
        ------
        HetctlError
            If the sample is not ready.
        """
        if self._states[number] != READY:
            raise HetctlError(f"sample {number} is read before it is prepared")
        fence()
        x, y = self._records["x"][number, ...], self._records["y"][number, ...]
        x.flags.writeable = y.flags.writeable = False
        return x, y

    def fill(self, number: int, prepare: Prepare, patience_s: float = Timeouts.samples_s) -> None:
        """Make a sample ready: prepare it, or wait for another process that does.

        Parameters
        ----------
        prepare : callable
            ``prepare(number) -> (x, y)``. Its exceptions pass through, and leave the sample to others.
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
        while self._states[number] != READY:
            if self._claims.acquire(number):
                try:
                    self._prepare(number, prepare)
                finally:
                    self._claims.release(number)
            elif time.monotonic() > latest:
                raise LockedError(
                    f"sample {number} is being prepared by another process, which has taken more than"
                    f" {patience_s:g} s",
                    "check the other trainers on this node",
                )
            else:
                time.sleep(POLL_S)

    def close(self) -> None:
        """Release the file."""
        self._claims.close()
        del self._states, self._records
        self._map.close()

    def _prepare(self, number: int, prepare: Prepare) -> None:
        # Another process may have prepared it between the check and the lock.
        if self._states[number] != READY:
            x, y = prepare(number)
            self._spec.check(x, y, f"sample {number}")
            self._records["x"][number] = x
            self._records["y"][number] = y
            fence()
            self._states[number] = READY
