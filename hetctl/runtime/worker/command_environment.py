"""Variables of a member's command on one rank, as torchrun and Horovod set them, and hetctl's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetctl.runtime.agent.binding import VISIBLE_DEVICES

USUAL_DEVICES = "CUDA_VISIBLE_DEVICES"


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
