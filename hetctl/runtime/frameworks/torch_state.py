"""PyTorch's state as NumPy arrays: each tensor under its path, as `packed_state` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hetctl.model.errors import BadInputError
from hetctl.runtime.frameworks import packed_state

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Types, by size in bytes, that hold the bits of numbers that NumPy lacks, such as bfloat16."""

Arrays = Mapping[str, npt.NDArray[Any]]


def pack(state: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a state: mappings, lists and tuples of tensors, arrays and plain values.

    Raises
    ------
    BadInputError
        If the state contains anything else.
    """
    return packed_state.pack(state, _dissolved)


def unpack(arrays: Arrays) -> Any:
    """Return a copy of the state that was packed."""
    return packed_state.unpack(arrays, _formed)


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


def _dissolved(value: Any) -> tuple[npt.NDArray[Any], str] | None:
    """Return the array of a tensor and its type."""
    if not isinstance(value, torch.Tensor):
        return None
    return _array(value), str(value.dtype).removeprefix("torch.")


def _formed(array: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    return torch.tensor(array).view(getattr(torch, dtype))


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    try:
        return np.asarray(tensor.numpy(force=True))
    except TypeError:
        return np.asarray(tensor.view(BITS[tensor.element_size()]).numpy(force=True))
