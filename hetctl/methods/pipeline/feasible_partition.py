"""Partitions that fit the memory of very many GPUs, regardless of their time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.stage_memory import minibatches_held

MOST_COUNTS = 300_000
"""Most combinations of GPUs, by memory size, that are considered."""

Used = tuple[int, ...]
"""Number of GPUs of each memory size."""


class LayerSpan(NamedTuple):
    """Layers from `first` to `last` on a GPU with `memory_bytes`."""

    first: int
    last: int
    memory_bytes: int


def parts_that_fit(
    stage_bytes: Callable[[int], NDArray[np.int64]], memory_bytes: Sequence[int], in_flight: int
) -> list[LayerSpan]:
    """Return stages that fit, in the order of the layers; an empty list if there are none.

    Dynamic programming from the last layer back: for each combination of GPUs used so far (only their sizes
    matter), the stages that reach the earliest layer, since fewer remaining layers never need more memory.
    If there are more than `MOST_COUNTS` combinations, only some GPUs of each size are considered.

    Parameters
    ----------
    stage_bytes : callable
        Bytes of a stage by first and last layer, shape (layers, layers), for a number of minibatches held.
    memory_bytes : sequence of int
        Memory of each GPU.
    """
    layers = len(stage_bytes(1))
    counts = _limited({size: min(n, layers) for size, n in Counter(memory_bytes).items()})
    sizes = sorted(counts)
    reached: dict[Used, tuple[int, int]] = {(0,) * len(sizes): (layers, -1)}
    earliest: dict[tuple[int, int], NDArray[np.int64]] = {}
    for used in product(*(range(counts[size] + 1) for size in sizes)):
        if not any(used):
            continue
        held = minibatches_held(sum(used) - 1, in_flight)
        found = (layers, -1)
        for at in (at for at, count in enumerate(used) if count):
            key = (sizes[at], held)
            if key not in earliest:
                earliest[key] = _earliest(stage_bytes(held), sizes[at])
            found = min(found, (int(earliest[key][reached[_less(used, at)][0]]), at))
        reached[used] = found
        if found[0] == 0:
            return _parts(reached, used, sizes)
    return []


def _limited(counts: Mapping[int, int]) -> dict[int, int]:
    """Return the numbers of GPUs by size, reduced to at most `MOST_COUNTS` combinations."""
    limited = dict(counts)
    while math.prod(count + 1 for count in limited.values()) > MOST_COUNTS:
        most = max(limited, key=lambda size: limited[size])
        limited[most] -= 1
    return limited


def _earliest(needed: NDArray[np.int64], memory_bytes: int) -> NDArray[np.int64]:
    """Return the earliest first layer of a stage by the layer after its last; that layer if none fits."""
    fits = np.triu(needed <= memory_bytes)
    ends = np.arange(1, len(needed) + 1)
    return np.concatenate([[0], np.where(fits.any(axis=0), fits.argmax(axis=0), ends)])


def _less(used: Used, at: int) -> Used:
    return (*used[:at], used[at] - 1, *used[at + 1 :])


def _parts(reached: Mapping[Used, tuple[int, int]], used: Used, sizes: Sequence[int]) -> list[LayerSpan]:
    parts = []
    while any(used):
        first, at = reached[used]
        used = _less(used, at)
        parts.append(LayerSpan(first, reached[used][0] - 1, sizes[at]))
    return parts
