"""The ranks of a job, one on each GPU: each is a step of its own, with one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement

Gpu = tuple[str, int]
"""A node and the number of one of its GPUs."""

CREW_FILE = "crew.json"
"""By which ranks find their driver; in the folder of its job's first round, or of its profiling job."""

NAMELESS = frozenset({"jsrun"})
"""Launchers that cannot be told a node: they fill one after the other, in the order of the steps."""


def gpus_of(allocation: Allocation) -> Iterator[Gpu]:
    """Yield the GPUs of a group, in the order of its ranks."""
    return ((place.node, gpu) for place in allocation.placement for gpu in place.gpus)


def seat_of(gpu: Gpu) -> Allocation:
    """Return what the launcher is to give the rank on a GPU; its name is that of the rank."""
    node, number = gpu
    return Allocation(f"rank-{node}-{number}", 1, DATA_PARALLEL, 0.0, (Placement(node, (number,)),))


def rank_command(gpu: Gpu, folder: Path, device: str, python: str) -> tuple[str, ...]:
    """Return what the rank on a GPU runs; the file by which it finds its driver is in the folder."""
    name = seat_of(gpu).member
    crew_file = str(folder / CREW_FILE)
    return (python, "-m", "hetctl.runtime.rank", crew_file, "--seat", name, "--device", device)
