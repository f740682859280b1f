"""Prepared samples in a file that all processes of a node map: each is prepared once on the node.

Any process may die at any instruction. A sample is claimed by a lock on one byte of the file, which the
kernel releases when the process dies, and it is valid only once its byte of state is set, written last.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np

from hetctl.model.errors import LockedError, TransientInputError
from hetctl.model.site import Timeouts
from hetctl.runtime.data.sharing.shared_file import ByteLocks, create, fence, map_whole
from hetctl.runtime.data.sources import Array, SampleSource

MAGIC = b"hetctl samples 2\n"
PAGE = 4096
READY = 1
POLL_S = 0.005


class SampleStore:
    """Samples of a source, prepared once on this node; the first process creates the store.

    Parameters
    ----------
    path : Path
        File in a folder that only the owner can enter, on a file system of this node.
    name : str
        Identification of the samples and of their preparation.
    samples_s : float
        Time limit in seconds for another process that prepares a sample.

    Raises
    ------
    TransientInputError
        If the file holds other data, or there is too little space for all of it.
    """

    def __init__(
        self, source: SampleSource, path: Path, name: str, samples_s: float = Timeouts.samples_s
    ) -> None:
        self._source, self._path, self._samples_s = source, path, samples_s
        self.spec, samples = source.spec, len(source)
        content = repr((name, samples, self.spec)).encode()
        head = MAGIC + hashlib.sha256(content).hexdigest().encode()
        first = PAGE + -(-samples // PAGE) * PAGE
        if not path.exists():
            create(path, head, first + samples * self.spec.record.itemsize)
        memory = map_whole(
            path,
            f"the store of {samples} prepared samples",
            "share in lockstep, which keeps few samples at a time, or prepare smaller ones",
        )
        if memory[: len(head)] != head:
            raise TransientInputError(
                f"{path} holds other samples than these", "remove it if nothing uses it"
            )
        self._claims = ByteLocks(path)
        self._states = np.frombuffer(memory, np.uint8, samples, offset=PAGE)
        self._records = np.frombuffer(memory, self.spec.record, samples, offset=first)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._source)

    def prepare(self, number: int) -> tuple[Array, Array]:
        """Return one sample's x and y in place, read-only; prepare it, or wait for another process that does.

        Errors of the source pass through, and leave the sample to others.

        Raises
        ------
        TransientInputError
            If the sample does not match the specification.
        LockedError
            If the other process takes longer.
        """
        if self._claims.closed:
            # A claim belongs to an open file, which a forked process would share with its parent.
            self._claims = ByteLocks(self._path)
        latest = time.monotonic() + self._samples_s
        while self._states[number] != READY:
            if self._claims.acquire(number):
                try:
                    self._fill(number)
                finally:
                    self._claims.release(number)
            elif time.monotonic() > latest:
                raise LockedError(
                    f"sample {number} is being prepared by another process, which has taken more than"
                    f" {self._samples_s:g} s",
                    "check the other trainers on this node",
                )
            else:
                time.sleep(POLL_S)
        fence()
        x, y = self._records["x"][number, ...], self._records["y"][number, ...]
        x.flags.writeable = y.flags.writeable = False
        return x, y

    def augment(self, x: Array, rng: np.random.Generator, out: Array | None = None) -> Array:
        """Return x after the random part, which is not shared."""
        return self._source.augment(x, rng, out)

    def _fill(self, number: int) -> None:
        # Another process may have prepared it between the check and the lock.
        if self._states[number] != READY:
            x, y = self._source.prepare(number)
            self.spec.check(x, y, f"sample {number}")
            self._records["x"][number] = x
            self._records["y"][number] = y
            fence()
            self._states[number] = READY
