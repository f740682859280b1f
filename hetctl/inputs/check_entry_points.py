"""Check that the user's functions exist, without running any of their code."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

from hetctl.inputs.input_errors import suggestion


def problem_with(function: str, folder: Path) -> str | None:
    """Return the error in ``module:function`` beside an ensemble file; None if there is none."""
    module, name = function.split(":")
    stem = Path(*module.split("."))
    candidates = [stem.with_name(f"{stem.name}.py"), stem / "__init__.py"]
    file = next((candidate for candidate in candidates if (folder / candidate).is_file()), None)
    if file is None:
        return f"there is no {candidates[0]} or {candidates[1]} in this file's folder"
    try:
        names = _top_level_names((folder / file).read_bytes())
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except SyntaxError as error:
        return f"{file} is not Python: {error.msg} in line {error.lineno}"
    # ast.parse raises ValueError for null bytes, and RecursionError or MemoryError for deeply nested code.
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{file} is not Python: {error}"
    if name in names or "*" in names:
        return None
    return f"{file} defines no '{name}'" + suggestion(name, names)


def _top_level_names(source: bytes) -> set[str]:
    with warnings.catch_warnings():
        # Parsing warns about, for example, invalid escapes in the user's module, which is not at issue here.
        warnings.simplefilter("ignore")
        # Bytes, not text: Python then honours the encoding that the first lines of the file declare.
        tree = ast.parse(source)
    finder = _Finder()
    finder.visit(tree)
    return finder.names


class _Finder(ast.NodeVisitor):
    """Visitor that collects the names bound at a module's top level; ``*`` for a star import."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.names.add(node.name)

    # These visitors do not visit the node's body, so that names inside of functions and classes do not count.
    visit_FunctionDef = _define  # noqa: N815
    visit_AsyncFunctionDef = _define  # noqa: N815
    visit_ClassDef = _define  # noqa: N815

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}

    visit_Import = _import  # noqa: N815
    visit_ImportFrom = _import  # noqa: N815

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.names.add(node.id)
