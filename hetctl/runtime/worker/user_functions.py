"""The user's functions, imported from the folder of the ensemble file."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.garbage import without_collections


@dataclass(frozen=True)
class UserFunctions:
    """Functions of CEREBRO's API (section 3); if ``train_fn`` is None, the framework's own is used.

    ``input_fn`` takes `Ensemble.data` and, for partitioned data, the path of a partition.
    """

    input_fn: Callable[..., Any]
    model_fn: Callable[[dict[str, Any]], Any]
    train_fn: Callable[..., Any] | None
    evaluate_fn: Callable[..., Any] | None = None


TRAIN_PARAMETERS = "(data, model, optimizer, config) or (data, model, optimizer, config, context)"
CONTEXT = "context"
FEWEST, MOST = 4, 5
"""Numbers of arguments of a ``train_fn``: without and with a context."""


def load_functions(ensemble: Ensemble) -> UserFunctions:
    """Import the functions of an ensemble; its folder becomes the first of the module path.

    Raises
    ------
    BadInputError
        If a module or a function is missing.
    """
    if ensemble.folder not in sys.path:
        sys.path.insert(0, ensemble.folder)
    named = ensemble.functions
    train_fn = _load(named.train_fn) if named.train_fn else None
    if train_fn is not None:
        takes_context(train_fn)
    return UserFunctions(
        input_fn=_load(named.input_fn),
        model_fn=_load(named.model_fn),
        train_fn=train_fn,
        evaluate_fn=_load(named.evaluate_fn) if named.evaluate_fn else None,
    )


def takes_context(train_fn: Callable[..., Any]) -> bool:
    """Return true if a ``train_fn`` has a fifth parameter, for the context.

    Parameters with a default are not counted, except one of the name `CONTEXT`.

    Raises
    ------
    BadInputError
        If it takes another number of arguments.
    """
    try:
        parameters = inspect.signature(train_fn).parameters.values()
    except ValueError:  # Some functions that are not written in Python tell no signature.
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = [p for p in parameters if p.kind in positional]
    count = sum(p.default is inspect.Parameter.empty or p.name == CONTEXT for p in own)
    is_open = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if count in (FEWEST, MOST) or (is_open and count < FEWEST):
        return count == MOST
    name = getattr(train_fn, "__name__", type(train_fn).__name__)
    raise BadInputError(f"train_fn {name} takes {count} arguments", f"define it as {name}{TRAIN_PARAMETERS}")


def loss_of(result: Any) -> float:
    """Return the mean training loss in the result of a ``train_fn``.

    Raises
    ------
    BadInputError
        If the result has another form.
    """
    value = result.get("loss") if isinstance(result, Mapping) else result
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise BadInputError(
            f"train_fn returned {result!r}",
            'return the mean training loss, or a mapping with the key "loss"',
        ) from None


def _load(reference: str) -> Callable[..., Any]:
    module_name, _, name = reference.partition(":")
    try:
        with without_collections():
            module = importlib.import_module(module_name)
        function = getattr(module, name)
    except ModuleNotFoundError as error:
        raise BadInputError(f"{reference}: {error}") from None
    except AttributeError:
        raise BadInputError(f"{reference}: module {module_name} defines no {name}") from None
    if not callable(function):
        raise BadInputError(f"{reference} is {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]
