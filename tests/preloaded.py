"""Imports all frameworks as templates of ranks do, for the process from which tests fork ranks."""

from __future__ import annotations

from hetctl.model.training_settings import FRAMEWORKS
from hetctl.runtime.frameworks import preload_framework

for name in FRAMEWORKS:
    preload_framework(name)
