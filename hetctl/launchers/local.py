"""One machine: plain processes, several ranks through Open MPI's ``mpirun``."""

from __future__ import annotations

from hetctl.core.errors import InfeasibleError
from hetctl.core.plan import Allocation
from hetctl.core.site import Site
from hetctl.launchers.step import Step, common_environment


def local(site: Site, allocation: Allocation, command: tuple[str, ...]) -> Step:
    """Start one rank per GPU or slot on this machine.

    GPUs are named in ``CUDA_VISIBLE_DEVICES``, and the cores of slots in ``HETCTL_CORES``; both hold those
    of all ranks, and each rank takes its share by its local rank. So ``mpirun`` must not bind, nor count
    cores; ``--allow-run-as-root``, which containers need, means nothing to other users.

    Raises
    ------
    InfeasibleError
        If the member is to run on more than one node.
    """
    if len(allocation.placement) != 1:
        raise InfeasibleError(
            f"{allocation.member}: {len(allocation.placement)} nodes; the launcher 'local' has one",
            "Set nodes to 1 in the site file, or choose another launcher.",
        )
    gpus = allocation.placement[0].gpus
    environment = {**common_environment(site), **devices(site, gpus)}
    return Step(allocation.member, (*_mpirun(allocation.gpus), *command), environment)


def _mpirun(ranks: int) -> tuple[str, ...]:
    if ranks == 1:
        return ()
    return ("mpirun", "-np", str(ranks), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")


def devices(site: Site, gpus: tuple[int, ...]) -> dict[str, str]:
    """Return the variables that name the GPUs, or the cores of the slots, of all ranks on a node."""
    if site.device == "gpu":
        return {site.visible_devices: _join(gpus)}
    width = site.cores_per_gpu
    return {"HETCTL_CORES": _join(tuple(g * width + core for g in gpus for core in range(width)))}


def _join(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
