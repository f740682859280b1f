"""Train an ensemble of different neural networks on a Slurm, LSF, PBS or Flux cluster."""

from typing import Any

__version__ = "0.1.0"

OF_SCRIPTS = frozenset({"report", "should_stop", "last_checkpoint"})
"""Functions for the scripts of members."""
OF_API = frozenset({"Ensemble", "member", "plan", "submit", "run"})
"""Names for programs and notebooks that train ensembles."""


def __getattr__(name: str) -> Any:
    # Imported when they are first used: most processes of hetctl need neither.
    if name in OF_SCRIPTS:
        from hetctl import script as module
    elif name in OF_API:
        from hetctl import api as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
