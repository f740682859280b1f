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
    """Disable collections while many objects are made that stay.

    They are a third of the time in which a large run is read, and a fifth of that in which TensorFlow or
    PyTorch is imported.
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
    """Disable collections, and leave what there is then out of all later ones."""
    with without_collections():
        yield
        gc.freeze()


def skip_last_collections() -> None:
    """Leave out the collections at the end of this process.

    Python collects several times as it ends, though the kernel takes back all memory afterwards. They are a
    sixth of a short command's time, and take 0.7 s where PyTorch was imported.
    """
    atexit.register(gc.freeze)
