"""The Python interpreter: commands that start it, imports on first use, pauses of the garbage collector."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


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


PYTHON = re.compile(r"python[\d.]*")
OPTION = re.compile(r"-(?P<flags>[bBdEIOPqRsSuv]*)(?P<last>[WXm]?)(?P<value>.*)")
"""Options of Python with which a script runs; with others it starts as usual."""
SYSTEM_FOLDERS = frozenset({"/usr/sbin", "/usr/bin", "/sbin", "/bin"})
"""Folders of the system's own programs, whose Python has no framework."""


class PythonStart(NamedTuple):
    """A command that runs a script or a module in Python.

    Parameters
    ----------
    python : tuple of str
        Program and its options.
    module : str
        Name of the module; empty for a script.
    argv : tuple of str
        Value of ``sys.argv``.
    """

    python: tuple[str, ...]
    module: str
    argv: tuple[str, ...]


def python_start(words: Sequence[str]) -> PythonStart | None:
    """Return how a command starts Python; None if it is no Python that runs a file or a module."""
    if not PYTHON.fullmatch(Path(words[0]).name):
        return None
    options, rest = [words[0]], list(words[1:])
    while rest and rest[0].startswith("-"):
        found = OPTION.fullmatch(rest.pop(0))
        if found is None or (found["value"] and not found["last"]):
            return None
        if found["flags"]:
            options.append(f"-{found['flags']}")
        if found["last"]:
            if not (value := found["value"] or (rest and rest.pop(0))):
                return None
            if found["last"] == "m":
                return PythonStart(tuple(options), value, ("-m", *rest))
            options.append(f"-{found['last']}{value}")
        elif not found["flags"]:
            return None
    return PythonStart(tuple(options), "", tuple(rest)) if rest and rest[0].endswith(".py") else None


def search_path(inherited: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the search path for programs, with the folder of the site's Python before the system's folders.

    So ``python`` is the site's, unless the job has put another one, as an environment or a module, in front.

    Parameters
    ----------
    python : str
        Path of the interpreter.
    """
    folders = (inherited.get("PATH") or os.defpath).split(os.pathsep)
    first = next((at for at, folder in enumerate(folders) if folder in SYSTEM_FOLDERS), len(folders))
    return {"PATH": os.pathsep.join([*folders[:first], str(Path(python).parent), *folders[first:]])}
