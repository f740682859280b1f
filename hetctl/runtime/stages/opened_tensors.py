"""Ranks of a node that can open each other's tensors on GPUs where they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from hetctl.runtime.frameworks.stage_network import DeviceTensor, TensorMemory
from hetctl.runtime.worker.group import Group, all_gather

LEAST_BYTES = 1 << 20
"""Size from which a tensor is opened sooner than it is copied to the node's memory and from there."""


def openers(group: Group, nodes: Sequence[str], memory: TensorMemory) -> frozenset[int]:
    """Return the other ranks that can open tensors of this one: found by trying.

    Whether GPUs reach each other, see each other, and may share memory depends on links, drivers, containers
    and the step. All ranks of the group must call this.

    Parameters
    ----------
    nodes : sequence of str
        Node of each rank.
    """
    trial = memory.filled(group.rank, 1)
    handles = all_gather(group, _handle(memory, trial) or "")
    if not any(handles):
        return frozenset()
    of_node = {rank: handle for rank, handle in enumerate(handles) if nodes[rank] == nodes[group.rank]}
    opened = [
        rank
        for rank, handle in of_node.items()
        if handle and rank != group.rank and _opens(memory, handle, rank)
    ]
    # The trial stays in memory until all have tried.
    opened_by = all_gather(group, opened)
    return frozenset(rank for rank, others in enumerate(opened_by) if group.rank in others)


def _handle(memory: TensorMemory, trial: DeviceTensor | None) -> str | None:
    # Allocators with pools of the driver, which users can choose, share nothing.
    with suppress(RuntimeError):
        return None if trial is None else memory.exported(trial)
    return None


def _opens(memory: TensorMemory, handle: str, value: float) -> bool:
    try:
        found = memory.array(memory.opened(handle))
    except RuntimeError:
        return False
    return bool(np.all(found == value))
