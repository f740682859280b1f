from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
        Path(name).chmod(0o700)


@pytest.fixture
def make_read_only(folder: Path) -> Iterator[Callable[[], None]]:
    """Make `folder` and its files read-only; root, who may write everywhere, becomes somebody else."""
    user = os.geteuid()

    def act() -> None:
        for path in folder.iterdir():
            path.chmod(0o444)
        folder.chmod(0o555)
        if user == 0:
            os.seteuid(NOBODY)

    yield act
    os.seteuid(user)
