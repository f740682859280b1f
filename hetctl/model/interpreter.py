"""The Python interpreter: imports on first use, and pauses of the garbage collector."""

from __future__ import annotations

import atexit
import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def load_entry(reference: str) -> Any:
    """Return the object that ``module:name`` names; import its module."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable collections while many lasting objects are made.

    Collections take a third of the time of reading a large run, and a fifth of the import of TensorFlow or
    PyTorch.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def frozen_afterwards() -> Iterator[None]:
    """Disable collections; later ones skip all objects that exist at the end."""
    with without_collections():
        yield
        gc.freeze()


def skip_last_collections() -> None:
    """Skip the collections at the end of this process.

    Python collects several times as it ends, though the kernel then takes back all memory. This takes a sixth
    of a short command's time, and 0.7 s where PyTorch was imported.
    """
    atexit.register(gc.freeze)
