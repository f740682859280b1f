"""State as NumPy arrays: each tensor and array under its path, and the structure as JSON."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError

STRUCTURE = "structure"

Arrays = Mapping[str, npt.NDArray[Any]]
Dissolve = Callable[[Any], tuple[npt.NDArray[Any], str] | None]
"""Function that returns the array and the type of a framework's tensor; None for any other value."""
Form = Callable[[npt.NDArray[Any], str], Any]
"""Function that makes a new tensor from the array and the type that `Dissolve` returned."""


def other_variables(problem: object) -> BadInputError:
    """Return the error for a state of another network."""
    return BadInputError(
        f"the checkpoint has other variables than the network that model_fn builds now: {problem}",
        "undo the change of model_fn, or start a new run with `hetctl submit --new`",
    )


def within(arrays: Arrays, prefix: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def pack(state: Any, dissolve: Dissolve = lambda _value: None) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a state: mappings, lists and tuples of tensors, arrays and plain values.

    Raises
    ------
    BadInputError
        If the state contains anything else.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    text = json.dumps(_described(state, "", arrays, dissolve))
    return {**arrays, STRUCTURE: np.frombuffer(text.encode(), np.uint8)}


def unpack(arrays: Arrays, form: Form | None = None) -> Any:
    """Return a copy of the state that was packed."""
    return _remade(json.loads(arrays[STRUCTURE].tobytes()), arrays, form)


def to_bytes(state: Any) -> bytes:
    """Return a packed state as a NumPy archive; BadInputError as from `pack`."""
    archive = io.BytesIO()
    np.savez(archive, **pack(state))
    return archive.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the state that `to_bytes` has packed."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return unpack(arrays)


def _described(value: Any, place: str, arrays: dict[str, npt.NDArray[Any]], dissolve: Dissolve) -> Any:
    """Put tensors into `arrays`; return JSON that describes their places."""
    if (dissolved := dissolve(value)) is not None:
        arrays[place], dtype = dissolved
        return {"tensor": place, "dtype": dtype}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        # NumPy writes types that are not its own, such as bfloat16, without their names.
        is_foreign = value.dtype.kind == "V" and value.dtype.names is None
        arrays[place] = value.view(f"u{value.itemsize}") if is_foreign else value
        return {"array": place, **({"dtype": value.dtype.name} if is_foreign else {})}
    # PyTorch's schedulers need its methods; a plain mapping has none of them.
    if isinstance(value, Counter):
        return {"counter": list(value.items())}
    if isinstance(value, Mapping):
        return {"items": [[k, _described(v, _inside(place, k), arrays, dissolve)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_described(v, _inside(place, n), arrays, dissolve) for n, v in enumerate(value)]}
    plain = value.item() if isinstance(value, np.generic) else value
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise BadInputError(
        f"the state of the network holds {type(value).__name__} at {place}, which no checkpoint can contain",
        "state_dict() may return tensors, arrays, numbers, strings, and mappings and lists of these",
    )


def _remade(described: Any, arrays: Arrays, form: Form | None) -> Any:
    match described:
        case {"tensor": place, "dtype": dtype} if form is not None:
            return form(arrays[place], dtype)
        case {"array": place, "dtype": dtype}:
            return arrays[place].view(dtype).copy()
        case {"array": place}:
            return arrays[place].copy()
        case {"counter": items}:
            return Counter(dict(items))
        case {"items": items}:
            return {key: _remade(value, arrays, form) for key, value in items}
        case {"list": values}:
            return [_remade(value, arrays, form) for value in values]
        case {"tuple": values}:
            return tuple(_remade(value, arrays, form) for value in values)
    return described


def _inside(place: str, key: Any) -> str:
    return f"{place}/{key}" if place else str(key)
