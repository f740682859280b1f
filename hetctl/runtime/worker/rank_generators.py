"""Random generators of the ranks of a group other than rank 0, among the arrays of a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.runtime.frameworks import TrainableNetwork
from hetctl.runtime.worker.checkpoint import Arrays
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.random_state import random_state, set_random_state

RANKS = "generators_of_rank/"
"""Prefix of the names of the states, each a JSON text; the number of the rank follows."""


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
