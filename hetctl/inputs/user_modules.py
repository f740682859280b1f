"""Modules of users' functions, read without running them: their files, and the framework they import."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

from hetctl.model.ensemble import Functions
from hetctl.model.training_settings import FRAMEWORKS, TENSORFLOW, USUAL_FRAMEWORK

IMPORTED = {"keras": TENSORFLOW.name} | {entry.packages[0]: entry.name for entry in FRAMEWORKS.values()}
"""Framework of each package that a user's module may import."""


def candidates(module: str) -> tuple[Path, Path]:
    """Return the paths, relative to the ensemble file's folder, at which a module may be."""
    stem = Path(*module.split("."))
    return stem.with_name(f"{stem.name}.py"), stem / "__init__.py"


def module_file(module: str, folder: Path) -> Path | None:
    """Return the file of a module beside the ensemble file; None if there is none."""
    return next((path for one in candidates(module) if (path := folder / one).is_file()), None)


def parsed(file: Path) -> ast.Module:
    """Parse a file; errors are those of reading it and of `ast.parse`."""
    with warnings.catch_warnings():
        # Parsing warns about invalid escapes and the like, which is not at issue here.
        warnings.simplefilter("ignore")
        # Bytes, not text: Python then honours the encoding that the first lines of the file declare.
        return ast.parse(file.read_bytes())


def framework_of(functions: Functions, folder: Path) -> str:
    """Return the framework that the module of ``model_fn`` imports, itself or through others beside it.

    If that is none or several, the usual one.
    """
    waiting, seen, found = [functions.model_fn.partition(":")[0]], set[str](), set[str]()
    while waiting:
        module = waiting.pop()
        if module in seen or (file := module_file(module, folder)) is None:
            continue
        seen.add(module)
        try:
            imported = _imports(parsed(file))
        # What is wrong with the file is reported with the functions.
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        found |= {IMPORTED[name] for one in imported if (name := one.partition(".")[0]) in IMPORTED}
        waiting += imported
    return found.pop() if len(found) == 1 else USUAL_FRAMEWORK


def _imports(tree: ast.Module) -> list[str]:
    """Return the modules that a module imports, in functions too."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names
