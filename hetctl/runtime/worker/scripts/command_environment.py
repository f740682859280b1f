"""Variables of a member's command on one rank, as torchrun and Horovod set them, and hetctl's own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetctl.model.ensemble import Member
from hetctl.model.training_settings import RESUME_VARIABLE
from hetctl.runtime.agent.binding import VISIBLE_DEVICES

USUAL_DEVICES = "CUDA_VISIBLE_DEVICES"
PLACE_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("GLOO_SOCKET_IFNAME", "HOROVOD_RANK", "HOROVOD_SIZE"),
        *VISIBLE_DEVICES,
    }
)
"""Variables that tell a rank its place and its GPU."""
PROFILE_VARIABLE = "HETCTL_PROFILE"
"""Variable that is set if a command runs for its rate alone."""


@dataclass(frozen=True)
class RankDevice:
    """Node of a rank, and the index of its GPU among those that its agent sees; None for a slot."""

    node: str
    device: int | None


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous of the ranks of a command: address and port of rank 0, and the interface to it.

    Parameters
    ----------
    of_horovod : mapping of str to str
        Variables with which Horovod's ranks find the server on rank 0's node; empty: they cannot connect.
    """

    host: str
    port: int
    interface: str | None
    of_horovod: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CommandSettings:
    """Facts of which a command is told when it is started.

    Parameters
    ----------
    run : str
        Name of the run, or of the profiling job.
    epochs : int
        Number of epochs that it has reported in the run.
    checkpoints : str
        Folder for its checkpoints.
    deadline : float
        Time in seconds since the epoch at which it is told to stop at the latest.
    resume_from : str or None
        Newest checkpoint that it has named; None: there is none.
    profiled : bool
        True if it runs for its rate alone, and what it writes is removed.
    """

    run: str
    round: int
    epochs: int
    checkpoints: str
    deadline: float
    resume_from: str | None = None
    profiled: bool = False


def own_variables(member: Member, settings: CommandSettings) -> dict[str, str]:
    """Return hetctl's own variables of a command."""
    resume = {RESUME_VARIABLE: settings.resume_from} if settings.resume_from else {}
    return {
        "HETCTL_RUN": settings.run,
        "HETCTL_ROUND": str(settings.round),
        "HETCTL_MEMBER": member.name,
        "HETCTL_SEED": str(member.seed),
        "HETCTL_BATCH_SIZE": str(member.batch_size),
        "HETCTL_EPOCH": str(settings.epochs),
        "HETCTL_LAST_EPOCH": str(member.stop.max_epochs),
        "HETCTL_CHECKPOINT_DIR": settings.checkpoints,
        "HETCTL_DEADLINE": str(settings.deadline),
        **resume,
        **({PROFILE_VARIABLE: "1"} if settings.profiled else {}),
    }


def search_path(inherited: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the folders of programs, of which that of the site's Python is the last.

    ``python`` is found that way where no environment is active and the system has only a ``python3``.

    Parameters
    ----------
    python : str
        Path of the interpreter.
    """
    folders = [inherited.get("PATH") or os.defpath, str(Path(python).parent)]
    return {"PATH": os.pathsep.join(folders)}


def rank_variables(rank: int, devices: Sequence[RankDevice], rendezvous: Rendezvous) -> dict[str, str]:
    """Return the variables that give a rank its place among the others.

    Parameters
    ----------
    devices : sequence of RankDevice
        Those of all ranks, by rank.
    """
    sizes = _ranks_by_node(devices)
    nodes, node = list(sizes), devices[rank].node
    local_rank = sum(device.node == node for device in devices[:rank])
    # Of nodes with unlike numbers of ranks, only some have one of this local rank.
    across = [other for other in nodes if sizes[other] > local_rank]
    places = {
        "RANK": rank,
        "SIZE": len(devices),
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": sizes[node],
        "CROSS_RANK": across.index(node),
        "CROSS_SIZE": len(across),
    }
    own = {
        "RANK": rank,
        "WORLD_SIZE": len(devices),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": sizes[node],
        "GROUP_RANK": nodes.index(node),
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": rendezvous.port,
    }
    of_horovod: dict[str, object] = {f"HOROVOD_{name}": value for name, value in places.items()}
    if rendezvous.of_horovod:
        of_horovod |= {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_HOSTNAME": node,
            **rendezvous.of_horovod,
            **({"HOROVOD_GLOO_IFACE": rendezvous.interface} if rendezvous.interface else {}),
        }
    interface = {"GLOO_SOCKET_IFNAME": rendezvous.interface} if rendezvous.interface else {}
    return {name: str(value) for name, value in {**own, **of_horovod, **interface}.items()}


def horovod_scopes(devices: Sequence[RankDevice]) -> dict[str, int]:
    """Return the number of ranks in each scope in which Horovod's ranks meet.

    Parameters
    ----------
    devices : sequence of RankDevice
        Those of all ranks, by rank.
    """
    sizes = _ranks_by_node(devices)
    across = {
        f"cross_{local_rank}": sum(size > local_rank for size in sizes.values())
        for local_rank in range(max(sizes.values()))
    }
    return {"global": len(devices), **{f"local_{node}": size for node, size in sizes.items()}, **across}


def _ranks_by_node(devices: Sequence[RankDevice]) -> Counter[str]:
    return Counter(device.node for device in devices)


def visible_devices(rank: int, devices: Sequence[RankDevice], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which a command sees the GPUs of its group on its node, and no others.

    The GPU of local rank n is the nth: ``cuda:LOCAL_RANK`` is right, as it is under torchrun.
    """
    node = devices[rank].node
    indices = [device.device for device in devices if device.node == node and device.device is not None]
    if not indices:
        return {}
    name = next((name for name in sorted(VISIBLE_DEVICES) if inherited.get(name)), USUAL_DEVICES)
    seen = inherited[name].split(",") if inherited.get(name) else None
    return {name: ",".join(seen[index] if seen else str(index) for index in indices)}
