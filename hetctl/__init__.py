"""Train an ensemble of different neural networks on a Slurm or LSF cluster."""

from typing import Any

__version__ = "0.1.0"

OF_SCRIPTS = frozenset({"report", "should_stop", "last_checkpoint"})
"""Functions for the user's scripts, imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name not in OF_SCRIPTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hetctl import script

    return getattr(script, name)
