"""Entries of tables that name what is imported on first use."""

from __future__ import annotations

import importlib
from typing import Any


def load_entry(reference: str) -> Any:
    """Return the object that ``module:name`` names; import its module."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
