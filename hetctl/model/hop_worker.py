"""Names of the workers of a run whose members hop: ``node:gpu``, or ``node:gpu+gpu`` for a group."""

from __future__ import annotations

from collections.abc import Iterable


def worker_named(node: str, gpus: Iterable[int]) -> str:
    """Return the name of the worker of some GPUs of a node."""
    return f"{node}:{'+'.join(map(str, gpus))}"


def node_of(worker: str) -> str:
    """Return the node of a worker."""
    return worker.rpartition(":")[0]


def gpus_in(worker: str) -> tuple[int, ...]:
    """Return the GPUs of a worker by number; rank 0 of a group is on the first."""
    return tuple(map(int, worker.rpartition(":")[2].split("+")))


def slots_in(worker: str) -> tuple[str, ...]:
    """Return the name of the worker that each GPU of a worker would be alone."""
    return tuple(worker_named(node_of(worker), (gpu,)) for gpu in gpus_in(worker))
