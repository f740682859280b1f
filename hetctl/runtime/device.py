"""A rank's own share of what its step was given."""

from __future__ import annotations

import os

LOCAL_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",  # mpirun, and jsrun's Spectrum MPI
    "SLURM_LOCALID",  # srun
    "JSM_NAMESPACE_LOCAL_RANK",  # jsrun
)
VISIBLE_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"})


def bind_device(device: str, gpus: int) -> tuple[int, ...]:
    """Bind this rank to its own share of what its step was given, before a framework starts.

    Parameters
    ----------
    device : str
        ``gpu`` or ``slot``, as the site says.
    gpus : int
        GPUs of the whole step, which are all on this node unless ``mpirun`` says otherwise.

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
