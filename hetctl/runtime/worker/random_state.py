"""States of NumPy's and Python's global generators of random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def random_state() -> Any:
    """Return the states of the generators as plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    numpy_state = [kind, [int(key) for key in keys], position, has_gauss, gauss]
    version, internal, gauss_next = random.getstate()
    return {"numpy": numpy_state, "python": [version, list(internal), gauss_next]}


def set_random_state(state: Any) -> None:
    """Set the generators to states that `random_state` returned; None leaves them as they are."""
    if state is None:
        return
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
