"""Optuna's samplers and pruners by their names and options."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from hetctl.model.errors import BadInputError

SAMPLERS, PRUNERS = "samplers", "pruners"
EXAMPLES = {
    SAMPLERS: "for example TPESampler, GPSampler or CmaEsSampler",
    PRUNERS: "for example MedianPruner, SuccessiveHalvingPruner or HyperbandPruner",
}


def optuna_part(kind: str, name: str, options: Mapping[str, Any], seed: int = 0) -> Any:
    """Return a new sampler or pruner in its initial state.

    An option that is a mapping with a ``name`` is such a part itself, for parts that wrap another one.

    Parameters
    ----------
    kind : str
        `SAMPLERS` or `PRUNERS`.
    seed : int
        Seed of parts that have one, unless the options give it.

    Raises
    ------
    BadInputError
        If Optuna is missing, has no such class, or the class refuses the options.
    """
    word = kind.removesuffix("s")
    try:
        import optuna
    except ImportError:
        raise BadInputError(
            f"{word} {name} requires Optuna, which is not installed",
            hint="install hetctl with its extra optuna, or Optuna itself: pip install optuna",
        ) from None
    made = getattr(getattr(optuna, kind), name, None)
    if not isinstance(made, type) or name.startswith("Base"):
        raise BadInputError(f"{word} {name} is not a class of optuna.{kind}", hint=EXAMPLES[kind])
    known = inspect.signature(made).parameters
    # NumPy's RandomState, which samplers use, takes seeds of 32 bits only.
    seeded = {"seed": seed % 2**32} if "seed" in known else {}
    given = {key: _value(kind, value, seed) for key, value in options.items()}
    try:
        with warnings.catch_warnings():
            # Many parts count as experimental in Optuna, of which each process of a run would tell.
            warnings.simplefilter("ignore")
            return made(**{**seeded, **given})
    except (TypeError, ValueError) as error:
        raise BadInputError(
            f"{word} {name} cannot be made: {error}", hint=f"its options are {', '.join(known)}"
        ) from None


def _value(kind: str, value: Any, seed: int) -> Any:
    if isinstance(value, Mapping) and "name" in value:
        return optuna_part(kind, str(value["name"]), value.get("options", {}), seed)
    return value
