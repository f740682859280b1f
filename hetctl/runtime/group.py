"""The ranks that train one member together."""

from __future__ import annotations

import os
from typing import Any, Protocol

from hetctl.core.errors import BadInputError

LOCAL_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",  # mpirun, and jsrun's Spectrum MPI
    "SLURM_LOCALID",  # srun
    "JSM_NAMESPACE_LOCAL_RANK",  # jsrun
)
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
VISIBLE_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"})


class Group(Protocol):
    """A member's ranks; rank 0 decides, reports and writes checkpoints."""

    size: int
    rank: int

    def agree(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""

    def leave(self) -> None:
        """Wait for the others and go; the first rank to leave early would kill the rest."""


class Link(Protocol):
    """How the ranks of a group exchange gradients; each framework has its own.

    Attributes
    ----------
    needs : str
        The packages that it takes, in words.
    """

    needs: str

    def load(self) -> None:
        """Import what it takes, before MPI starts; ImportError where a package is missing."""

    def meet(self, group: Group) -> None:
        """Start it on the ranks of a group of several."""

    def part(self) -> None:
        """End it."""


class SingleRank:
    """A group of one, which needs no MPI."""

    size = 1
    rank = 0

    def agree(self, value: Any) -> Any:
        """Return the value."""
        return value

    def leave(self) -> None:
        """Nobody to wait for."""


class MpiGroup:
    """The ranks of one MPI world."""

    def __init__(self, link: Link) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD.Dup()
        self._link = link
        self.size = int(self._world.Get_size())
        self.rank = int(self._world.Get_rank())

    def agree(self, value: Any) -> Any:
        """Broadcast from rank 0."""
        return self._world.bcast(value, root=0)

    def leave(self) -> None:
        """Meet at a barrier, then end what connects the ranks."""
        self._world.Barrier()
        self._link.part()


def launched_rank() -> int:
    """Return this process's rank in its step, as the launcher says; no MPI need have started."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def join_group(gpus: int, link: Link) -> Group:
    """Meet the other ranks of a member that holds `gpus` GPUs, one rank on each.

    Raises
    ------
    BadInputError
        If a package is missing, or the launcher started another number of ranks.
    """
    if gpus == 1:
        return SingleRank()
    try:
        link.load()
        return _linked(MpiGroup(link), gpus, link)
    except ImportError as error:
        raise BadInputError(
            f"a member with more than one GPU needs {link.needs}: {error}",
            "install them as docs/install.md says, or give the member max_gpus: 1",
        ) from None


def _linked(group: Group, gpus: int, link: Link) -> Group:
    if group.size != gpus:
        raise BadInputError(
            f"the launcher started {group.size} MPI ranks for a member with {gpus} GPUs",
            "check `mpi:` and `launcher:` in the site file",
        )
    link.meet(group)
    return group


def bind_device(device: str, gpus: int) -> tuple[int, ...]:
    """Bind this rank to its own share of what its step was given, before a framework starts.

    Parameters
    ----------
    device : str
        ``gpu`` or ``slot``, as the site says.
    gpus : int
        GPUs of the whole group, which are all on this node unless ``mpirun`` says otherwise.

    Returns
    -------
    tuple of int
        The cores that the rank may use.
    """
    local_rank = next((int(os.environ[v]) for v in LOCAL_RANK_VARIABLES if v in os.environ), 0)
    if device == "slot" and "HETCTL_CORES" in os.environ:
        ranks_here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", gpus))
        _bind_cores(os.environ["HETCTL_CORES"].split(","), local_rank, ranks_here)
    if device == "gpu":
        _bind_gpu(local_rank)
    return tuple(sorted(os.sched_getaffinity(0)))


def _bind_cores(cores: list[str], local_rank: int, ranks: int) -> None:
    available = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    share = cores[local_rank * each : (local_rank + 1) * each]
    os.sched_setaffinity(0, {available[int(core) % len(available)] for core in share})


def _bind_gpu(local_rank: int) -> None:
    for name in VISIBLE_DEVICES & os.environ.keys():
        visible = [gpu for gpu in os.environ[name].split(",") if gpu]
        if len(visible) > 1:
            os.environ[name] = visible[local_rank % len(visible)]
