"""Training mode of each network: data-parallel, hopping or pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetctl.methods.hopper.modes import modes
from hetctl.model.plan import DATA_PARALLEL, HOPPER, PIPELINE, ModeChoice


@dataclass(frozen=True)
class Demand:
    """Properties of a network that decide its training mode.

    Parameters
    ----------
    memory_bytes : int or None
        Memory that training on a single GPU needs; None if unknown.
    epochs : int
        Epochs left to train.
    """

    member: str
    memory_bytes: int | None
    epochs: int = 1


@dataclass(frozen=True)
class ModeLimits:
    """Properties of the GPUs and the data that decide the training modes.

    Parameters
    ----------
    gpu : str
        Name of the GPU with the least memory, for messages.
    memory_bytes : int or None
        Memory of that GPU; None if unknown.
    partitions : int
        Partitions of the data, each on one node; 0 if the data is not partitioned.
    """

    gpus: int
    gpu: str
    memory_bytes: int | None
    partitions: int


def too_large(demand: Demand, limits: ModeLimits) -> bool:
    """Return true if the network is known to exceed the memory of the smallest GPU."""
    needs, has = demand.memory_bytes, limits.memory_bytes
    return needs is not None and has is not None and needs > has


def does_not_fit(subject: str, demand: Demand, limits: ModeLimits) -> str:
    """Return the reason why one GPU is too small, as a clause for a message."""
    needs, has = _gigabytes(demand.memory_bytes), _gigabytes(limits.memory_bytes)
    return f"{subject} needs {needs} of memory, and {limits.gpu} has {has}"


def hopper_epochs(epochs: Sequence[int], gpus: int) -> int:
    """Return the number of epochs that have enough configurations for hopping (CEREBRO, appendix 12).

    Parameters
    ----------
    epochs : sequence of int
        Epochs that each configuration has left. Configurations that are done leave, until too few remain.
    gpus : int
        Number of workers, p in the paper.
    """
    left = sorted(epochs, reverse=True)
    return next((left[n - 1] for n in range(1, len(left) + 1) if modes(n, gpus)[0] == HOPPER), 0)


def choose_modes(demands: Sequence[Demand], limits: ModeLimits) -> tuple[ModeChoice, ...]:
    """Return the mode of each network with its reason.

    A network that does not fit one GPU is split into a pipeline. The others hop if the data is partitioned
    over the nodes and there are enough of them; otherwise they train data-parallel.
    """
    fitting = [demand for demand in demands if not too_large(demand, limits)]
    hops = hopper_epochs([demand.epochs for demand in fitting], limits.gpus) if limits.partitions else 0
    return tuple(
        _pipeline(demand, limits)
        if too_large(demand, limits)
        else _hopper(demand, len(fitting), hops, limits)
        if hops
        else _data_parallel(demand, len(fitting), limits)
        for demand in demands
    )


def _pipeline(demand: Demand, limits: ModeLimits) -> ModeChoice:
    why = f"{does_not_fit('it', demand, limits)}: its layers go to several GPUs"
    return ModeChoice(demand.member, PIPELINE, why)


def _hopper(demand: Demand, configs: int, hops: int, limits: ModeLimits) -> ModeChoice:
    why = (
        f"the data lies in {limits.partitions} partitions, and {configs} configurations are more than half of"
        f" {limits.gpus} GPUs: each trains on one, and hops"
    )
    if demand.epochs > hops:
        why += f"; after {hops} of its {demand.epochs} epochs too few are left, and it goes on data-parallel"
    return ModeChoice(demand.member, HOPPER, why)


def _data_parallel(demand: Demand, configs: int, limits: ModeLimits) -> ModeChoice:
    fits = "it fits one GPU"
    if limits.memory_bytes is None:
        fits = "it is taken to fit one GPU, as the site does not say how much memory they have"
    data = "the data is not partitioned"
    if limits.partitions:
        data = f"{configs} configurations are too few to hop: no more than half of {limits.gpus} GPUs"
    return ModeChoice(demand.member, DATA_PARALLEL, f"{fits}, and {data}")


def _gigabytes(size: int | None) -> str:
    return f"{(size or 0) / 1e9:.3g} GB"
