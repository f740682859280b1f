"""The user's modules as they were submitted: digests in a run's specification, and a copy in its folder."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hetctl.model.ensemble import COMMAND, Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.run import RunSpec
from hetctl.storage.atomic_io import make_private_folder, private_file
from hetctl.storage.paths import RunFolder

MOST_ENTRIES = 1_000
MOST_BYTES = 20 * 2**20
GIT_TIMEOUT_S = 5.0
"""Seconds after which a slow file system counts as one without Git."""
PACKAGE = "__init__.py"
CACHE = "__pycache__"
DYNAMIC = frozenset({"importlib", "runpy"})
"""Modules that import others without an import statement."""


class _Entry(NamedTuple):
    """File or folder in an ensemble's folder or in a package there, by its path in the ensemble's folder."""

    path: Path
    is_module: bool


def modules_of(ensemble: Ensemble) -> dict[str, str]:
    """Return the digests of all modules in an ensemble's folder and in its packages; none for commands.

    Raises
    ------
    BadInputError
        If there are too many, or one cannot be read.
    """
    folder, size = Path(ensemble.folder), 0
    found: dict[str, str] = {}
    for entry in _entries(ensemble):
        if entry.is_module:
            data = _read(folder / entry.path)
            size += len(data)
            found[entry.path.as_posix()] = _digest(data)
    if size > MOST_BYTES:
        raise _too_much(folder, f"more than {MOST_BYTES // 2**20} MiB of Python files")
    return found


def imported_modules(ensemble: Ensemble, among: Iterable[str]) -> set[str]:
    """Return which of some modules an ensemble's functions import, directly or through each other.

    Only import statements are seen. A module that imports others by name (`importlib`), or that cannot be
    read, may import any.

    Parameters
    ----------
    among : iterable of str
        Paths in the ensemble's folder, as returned by `modules_of`; some may be missing there.
    """
    known = set(among)
    found: set[str] = set()
    waiting = [path for module in _named_modules(ensemble) for path in _files_of(module.parts)]
    while waiting:
        path = waiting.pop()
        if path not in known or path in found:
            continue
        found.add(path)
        try:
            tree = ast.parse(_read(Path(ensemble.folder) / path))
        except (BadInputError, SyntaxError, ValueError):
            return known
        names = list(_imports_of(tree, Path(path)))
        if DYNAMIC.intersection(name[0] for name in names if name):
            return known
        waiting += [file for name in names for file in _files_of(name)]
    return found


def keep_modules(spec: RunSpec, folder: RunFolder) -> None:
    """Copy the modules of a specification into the folder of its run, unless they are there already.

    All other files are linked, as a module may look for files in its own folder.

    Raises
    ------
    BadInputError
        If a module differs from the specification.
    """
    target = _copy_of(spec.modules, folder)
    if not spec.modules or target.exists():
        return
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    make_private_folder(unfinished)
    try:
        _copy(spec, unfinished)
        # All or nothing: a crash must not leave a part, which would pass for the whole.
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def with_kept_modules(spec: RunSpec, folder: RunFolder) -> RunSpec:
    """Return a specification with the functions of the run's copy, if there is one."""
    if not spec.modules:
        return spec
    return replace(
        spec, ensemble=replace(spec.ensemble, folder=str(_copy_of(spec.modules, folder).resolve()))
    )


def code_digest(modules: Mapping[str, str]) -> str:
    """Return a digest of modules with these digests."""
    return _digest(json.dumps(dict(sorted(modules.items()))).encode())


def revision_of(folder: Path) -> str:
    """Return the revision of a folder as Git describes it, with ``-dirty`` after edits; empty: none."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def _copy_of(modules: Mapping[str, str], folder: RunFolder) -> Path:
    # A run may take over edited modules while ranks of its last job still import from the earlier copy.
    return folder.modules / code_digest(modules)


def _copy(spec: RunSpec, target: Path) -> None:
    folder = Path(spec.ensemble.folder)
    for path, is_module in _entries(spec.ensemble):
        place, source = target / path, folder / path
        make_private_folder(place.parent)
        if not is_module:
            # A link to a folder around itself would be a loop.
            if not target.resolve().is_relative_to(source.resolve()):
                place.symlink_to(source)
            continue
        data = _read(source)
        if spec.modules.get(path.as_posix()) != _digest(data):
            raise BadInputError(f"{source} was edited while it was being submitted", "submit again")
        with private_file(place) as file:
            file.write(data)


def _entries(ensemble: Ensemble) -> Iterator[_Entry]:
    """Yield what is in an ensemble's folder and its packages, hidden entries excluded."""
    if ensemble.framework == COMMAND:
        return
    packages = frozenset(parent for module in _named_modules(ensemble) for parent in module.parents)
    folder = Path(ensemble.folder)
    for count, entry in enumerate(_within(folder, Path(), packages), start=1):
        if count > MOST_ENTRIES:
            raise _too_much(folder, f"more than {MOST_ENTRIES:,} files and folders")
        yield entry


def _named_modules(ensemble: Ensemble) -> set[Path]:
    """Return the modules with an ensemble's functions, as paths without a suffix."""
    functions = [code.functions for code in (ensemble.code, *ensemble.codes)]
    names = [name for f in functions for name in (f.input_fn, f.model_fn, f.train_fn, f.evaluate_fn)]
    return {Path(*name.split(":")[0].split(".")) for name in names if name}


def _imports_of(tree: ast.AST, path: Path) -> Iterator[tuple[str, ...]]:
    """Yield the parts of each name that a module imports, which may be a module or something in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package of the module itself.
            base = path.parts[: -node.level] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            yield module
            yield from ((*module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Name) and node.id == "__import__":
            yield ("importlib",)


def _files_of(name: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths of a module and of its packages, each as a file and as a package."""
    for length in range(1, len(name) + 1):
        path = "/".join(name[:length])
        yield from (f"{path}.py", f"{path}/{PACKAGE}")


def _within(folder: Path, inside: Path, packages: frozenset[Path]) -> Iterator[_Entry]:
    with os.scandir(folder / inside) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path = inside / entry.name
        if entry.name.startswith(".") or entry.name == CACHE:
            continue
        # Other folders are skipped: they may hold millions of samples, or a Python environment.
        is_folder = entry.is_dir(follow_symlinks=False)
        if is_folder and (path in packages or (folder / path / PACKAGE).is_file()):
            yield from _within(folder, path, packages)
        else:
            yield _Entry(path, entry.name.endswith(".py") and entry.is_file())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _too_much(folder: Path, what: str) -> BadInputError:
    return BadInputError(
        f"{folder} and its packages have {what}, and a run keeps a copy of the modules there",
        "move the ensemble file and its modules into a folder of their own",
    )
