"""The table of frameworks: its modules exist, and the extras to install them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from hetctl.model.training_settings import FRAMEWORKS, FrameworkEntry

SETUP = Path(__file__).parents[2] / "setup.py"


@pytest.mark.parametrize("entry", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_a_framework_has_a_module_and_an_extra(entry: FrameworkEntry) -> None:
    assert find_spec(entry.module) is not None
    assert f'"{entry.name}": ' in SETUP.read_text(encoding="utf-8")
