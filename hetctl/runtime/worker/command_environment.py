"""Variables of a member's command on one rank, as torchrun and Horovod set them, and hetctl's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetctl.model.ensemble import Member
from hetctl.model.script_variables import RESUME_VARIABLE
from hetctl.runtime.agent.binding import VISIBLE_DEVICES

USUAL_DEVICES = "CUDA_VISIBLE_DEVICES"
PROFILE_VARIABLE = "HETCTL_PROFILE"
"""Variable that is set if a command runs for its rate alone."""


@dataclass(frozen=True)
class RankDevice:
    """Node of a rank, and the index of its GPU among those that its agent sees; None for a slot."""

    node: str
    device: int | None


@dataclass(frozen=True)
class Meeting:
    """Place where the ranks of a command meet: address and port of rank 0, and the interface to it."""

    host: str
    port: int
    interface: str | None


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
        "HETCTL_CHECKPOINT_DIR": settings.checkpoints,
        "HETCTL_DEADLINE": str(settings.deadline),
        **resume,
        **({PROFILE_VARIABLE: "1"} if settings.profiled else {}),
    }


def rank_variables(rank: int, devices: Sequence[RankDevice], meeting: Meeting) -> dict[str, str]:
    """Return the variables that give a rank its place among the others.

    Parameters
    ----------
    devices : sequence of RankDevice
        Those of all ranks, by rank.
    """
    nodes = list(dict.fromkeys(device.node for device in devices))
    node = devices[rank].node
    local = [other for other, device in enumerate(devices) if device.node == node]
    places = {
        "RANK": rank,
        "SIZE": len(devices),
        "LOCAL_RANK": local.index(rank),
        "LOCAL_SIZE": len(local),
        "CROSS_RANK": nodes.index(node),
        "CROSS_SIZE": len(nodes),
    }
    own = {
        "RANK": rank,
        "WORLD_SIZE": len(devices),
        "LOCAL_RANK": places["LOCAL_RANK"],
        "LOCAL_WORLD_SIZE": len(local),
        "GROUP_RANK": places["CROSS_RANK"],
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": meeting.port,
    }
    of_horovod = {f"HOROVOD_{name}": value for name, value in places.items()}
    interface = {"GLOO_SOCKET_IFNAME": meeting.interface} if meeting.interface else {}
    return {name: str(value) for name, value in {**own, **of_horovod, **interface}.items()}


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
