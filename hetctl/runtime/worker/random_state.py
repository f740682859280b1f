"""Generators of random numbers: NumPy's and Python's global ones, and those of all ranks in a checkpoint."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.runtime.frameworks import TrainableNetwork
from hetctl.runtime.worker.checkpoint import Arrays
from hetctl.runtime.worker.group import Group

RANKS = "generators_of_rank/"
"""Prefix of the names of the states, each a JSON text; the number of the rank follows."""


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


def gathered_states(network: TrainableNetwork, group: Group) -> dict[str, npt.NDArray[Any]]:
    """Return, on rank 0, the states of the other ranks' generators; all ranks of the group call it."""
    if group.size == 1:
        return {}
    states = network.gather([random_state(), network.generators()])
    others = enumerate(states[1:], 1) if group.rank == 0 else ()
    return {f"{RANKS}{rank}": np.frombuffer(json.dumps(state).encode(), np.uint8) for rank, state in others}


def restore_own(network: TrainableNetwork, rank: int, arrays: Arrays) -> None:
    """Set the generators of this rank to its states; without any in the arrays they stay those of rank 0."""
    text = arrays.get(f"{RANKS}{rank}")
    if text is not None:
        of_process, of_framework = json.loads(text.tobytes())
        set_random_state(of_process)
        network.set_generators(of_framework)
