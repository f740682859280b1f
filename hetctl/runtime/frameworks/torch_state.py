"""PyTorch's state as NumPy arrays: each tensor under its path, and the structure as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hetctl.model.errors import BadInputError

STRUCTURE = "structure"
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Types, by size in bytes, that hold the bits of numbers that NumPy lacks, such as bfloat16."""

Arrays = Mapping[str, npt.NDArray[Any]]


def pack(state: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a state: mappings, lists and tuples of tensors and plain values.

    Raises
    ------
    BadInputError
        If the state contains anything else.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    text = json.dumps(_described(state, "", arrays))
    return {**arrays, STRUCTURE: np.frombuffer(text.encode(), np.uint8)}


def unpack(arrays: Arrays) -> Any:
    """Return a copy of the state that was packed."""
    return _remade(json.loads(arrays[STRUCTURE].tobytes()), arrays)


def without_functions(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without functions, which ``model_fn`` creates again."""
    return {name: value for name, value in state.items() if not callable(value)}


def generators() -> dict[str, torch.Tensor]:
    """Return the states of the generators of random numbers, by device."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def set_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to states that `generators` returned."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def other_variables(error: Exception) -> BadInputError:
    """Return the error for a state of another network."""
    return BadInputError(
        f"the checkpoint has other variables than the network that model_fn builds now: {error}",
        "undo the change of model_fn, or start a new run with `hetctl submit --new`",
    )


def _described(value: Any, place: str, arrays: dict[str, npt.NDArray[Any]]) -> Any:
    """Put tensors into `arrays`; return JSON that describes their places."""
    if isinstance(value, torch.Tensor):
        arrays[place] = _array(value)
        return {"tensor": place, "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"items": [[key, _described(v, _inside(place, key), arrays)] for key, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_described(v, _inside(place, n), arrays) for n, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise BadInputError(
        f"the state of the network holds {type(value).__name__} at {place}, which no checkpoint can contain",
        "state_dict() may return tensors, numbers, strings, and mappings and lists of these",
    )


def _remade(described: Any, arrays: Arrays) -> Any:
    match described:
        case {"tensor": place, "dtype": dtype}:
            return torch.tensor(arrays[place]).view(getattr(torch, dtype))
        case {"items": items}:
            return {key: _remade(value, arrays) for key, value in items}
        case {"list": values}:
            return [_remade(value, arrays) for value in values]
        case {"tuple": values}:
            return tuple(_remade(value, arrays) for value in values)
    return described


def _inside(place: str, key: Any) -> str:
    return f"{place}/{key}" if place else str(key)


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    try:
        return np.asarray(tensor.numpy(force=True))
    except TypeError:
        return np.asarray(tensor.view(BITS[tensor.element_size()]).numpy(force=True))
