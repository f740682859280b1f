"""Start of a project from an example."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from hetctl.model.errors import BadInputError


def examples() -> list[str]:
    """Return the names of the examples that come with hetctl."""
    folder = importlib.resources.files("hetctl.examples")
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "_")


def start_project(folder: Path, example: str) -> list[Path]:
    """Copy an example into a folder, which is created if needed; return the files.

    Raises
    ------
    BadInputError
        If there is no such example, a file would be replaced, or the folder cannot be written.
    """
    if example not in examples():
        raise BadInputError(f"no example {example!r}", f"choose one of: {', '.join(examples())}")
    source = importlib.resources.files("hetctl.examples") / example
    contents = {entry.name: entry.read_bytes() for entry in source.iterdir() if entry.is_file()}
    for name in contents:
        if (folder / name).exists():
            raise BadInputError(f"{folder / name} exists already", "choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise BadInputError(f"cannot write {folder}: {error.strerror}") from None
    return [folder / name for name in sorted(contents)]
