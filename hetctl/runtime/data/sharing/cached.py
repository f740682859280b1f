"""Sharing ``cached``, hetctl's own: samples are prepared once on the node, for all its members."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from hetctl.runtime.data.sharing.store import SampleStore
from hetctl.runtime.data.sources import Array, SampleSource, SampleSpec


class CachedSource:
    """Source that reads samples from a store, and prepares those that are missing for all processes.

    Parameters
    ----------
    path : Path
        File of the store; the first process creates it.
    name : str
        Identification of the samples.

    Raises
    ------
    BadInputError
        If there is too little space for it.
    """

    def __init__(self, source: SampleSource, path: Path, name: str) -> None:
        self._source = source
        self._path = path
        self._name = name
        self._store = self._opened()
        self._launcher = os.getpid()

    @property
    def spec(self) -> SampleSpec:
        """Shapes and types of the arrays that `prepare` returns."""
        return self._source.spec

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._source)

    def prepare(self, number: int) -> tuple[Array, Array]:
        """Return one sample's x and y, which must not be changed: they are in the store."""
        if os.getpid() != self._launcher:
            # A claim belongs to an open file, which a forked process shares with its parent.
            self._store, self._launcher = self._opened(), os.getpid()
        self._store.fill([number], self._source.prepare)
        return self._store.view(number)

    def augment(self, x: Array, rng: np.random.Generator, out: Array | None = None) -> Array:
        """Return x after the random part, which is not shared."""
        return self._source.augment(x, rng, out)

    def _opened(self) -> SampleStore:
        return SampleStore(self._path, self.spec, len(self), self._name)
