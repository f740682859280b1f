"""How each network trains: data-parallel, hopping, or as a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetctl.methods.hopper.parallelism_rule import ways
from hetctl.model.plan import DATA_PARALLEL, HOPPER, PIPELINE, ModeChoice


@dataclass(frozen=True)
class Demand:
    """What counts of a network.

    Parameters
    ----------
    memory_bytes : int or None
        That it needs on a GPU which trains it alone; None: not known.
    epochs : int
        That it has left.
    """

    member: str
    memory_bytes: int | None
    epochs: int = 1


@dataclass(frozen=True)
class ModeLimits:
    """What counts of the GPUs and the data.

    Parameters
    ----------
    gpu : str
        The GPU with the least memory, in words.
    memory_bytes : int or None
        That it has; None: not known.
    partitions : int
        Parts of the data, each on one node; 0: it is not partitioned.
    """

    gpus: int
    gpu: str
    memory_bytes: int | None
    partitions: int


def too_large(demand: Demand, room: ModeLimits) -> bool:
    """Return whether one GPU, that with the least memory, is known to be too small for a network."""
    needs, has = demand.memory_bytes, room.memory_bytes
    return needs is not None and has is not None and needs > has


def does_not_fit(who: str, demand: Demand, room: ModeLimits) -> str:
    """Say why one GPU is too small."""
    needs, has = _gigabytes(demand.memory_bytes), _gigabytes(room.memory_bytes)
    return f"{who} needs {needs} of memory, and {room.gpu} has {has}"


def hopper_epochs(epochs: Sequence[int], gpus: int) -> int:
    """Return for how many epochs there are enough configurations to hop (CEREBRO, appendix 12).

    Parameters
    ----------
    epochs : sequence of int
        That each configuration has left. Those that are done leave, until too few are there.
    gpus : int
        The workers, p in the paper.
    """
    left = sorted(epochs, reverse=True)
    return next((left[n - 1] for n in range(1, len(left) + 1) if ways(n, gpus)[0] == HOPPER), 0)


def choose_modes(demands: Sequence[Demand], room: ModeLimits) -> tuple[ModeChoice, ...]:
    """Return each network's mode, and why.

    One that does not fit a GPU is cut into a pipeline. The others hop if the data is partitioned over
    the nodes and there are enough of them; else they train data-parallel.
    """
    fitting = [demand for demand in demands if not too_large(demand, room)]
    hops = hopper_epochs([demand.epochs for demand in fitting], room.gpus) if room.partitions else 0
    return tuple(
        _pipeline(demand, room)
        if too_large(demand, room)
        else _hopper(demand, len(fitting), hops, room)
        if hops
        else _data_parallel(demand, len(fitting), room)
        for demand in demands
    )


def _pipeline(demand: Demand, room: ModeLimits) -> ModeChoice:
    why = f"{does_not_fit('it', demand, room)}: its layers go to several GPUs"
    return ModeChoice(demand.member, PIPELINE, why)


def _hopper(demand: Demand, configs: int, hops: int, room: ModeLimits) -> ModeChoice:
    why = (
        f"the data lies in {room.partitions} partitions, and {configs} configurations are more than half of"
        f" {room.gpus} GPUs: each trains on one, and hops"
    )
    if demand.epochs > hops:
        why += f"; after {hops} of its {demand.epochs} epochs too few are left, and it goes on data-parallel"
    return ModeChoice(demand.member, HOPPER, why)


def _data_parallel(demand: Demand, configs: int, room: ModeLimits) -> ModeChoice:
    fits = "it fits one GPU"
    if room.memory_bytes is None:
        fits = "it is taken to fit one GPU, as the site does not say how much memory they have"
    data = "the data is not partitioned"
    if room.partitions:
        data = f"{configs} configurations are too few to hop: no more than half of {room.gpus} GPUs"
    return ModeChoice(demand.member, DATA_PARALLEL, f"{fits}, and {data}")


def _gigabytes(size: int | None) -> str:
    return f"{(size or 0) / 1e9:.3g} GB"
