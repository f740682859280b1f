"""``python -m hetctl``."""

from __future__ import annotations

from hetctl.cli.main import start

start()
