"""Partitions that fit the memory of very many GPUs, however long their stages take."""

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
"""Ways to take some GPUs of each size that are looked at."""

Used = tuple[int, ...]
"""GPUs of each size."""


class LayerSpan(NamedTuple):
    """Layers from `first` to `last` on a GPU of so many bytes."""

    first: int
    last: int
    memory_bytes: int


def parts_that_fit(
    stage_bytes: Callable[[int], NDArray[np.int64]], memory_bytes: Sequence[int], in_flight: int
) -> list[LayerSpan]:
    """Return stages that fit, first layers first; none if there are none.

    From the last layer back, for each choice of GPUs used so far (only their sizes matter) the stages
    that reach the earliest layer: fewer layers that are left never need more. If there are more choices
    than `MOST_COUNTS`, as many GPUs of each size are considered as keep to that.

    Parameters
    ----------
    stage_bytes : callable
        Bytes by first and last layer, shape (layers, layers), for so many minibatches held.
    memory_bytes : sequence of int
        Of each GPU.
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
    """Return numbers of GPUs by size with no more choices than may be looked at."""
    limited = dict(counts)
    while math.prod(count + 1 for count in limited.values()) > MOST_COUNTS:
        most = max(limited, key=lambda size: limited[size])
        limited[most] -= 1
    return limited


def _earliest(needed: NDArray[np.int64], memory_bytes: int) -> NDArray[np.int64]:
    """Return by the layer that a stage ends before the first layer that it can have; else that layer."""
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
