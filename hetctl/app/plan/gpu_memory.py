"""Memory of the GPUs of a job, and memory that members need of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetctl.app.plan.plan_request import PlanRequest
from hetctl.methods.parallelism import Demand, ModeLimits, does_not_fit, too_large
from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.errors import InfeasibleError


def limits_of(request: PlanRequest) -> ModeLimits:
    """Return the memory of the smallest GPU of a job, and the number of partitions."""
    memory = request.site.memory_in(request.scenario.cluster)
    # An unknown memory counts as the smallest: nothing is then known to be too large for it.
    smallest = min(memory, key=lambda gpu_type: memory[gpu_type] or 0)
    return ModeLimits(
        gpus=request.gpus,
        gpu=f"a {smallest or request.site.device} of {request.site.name}",
        memory_bytes=memory[smallest],
        partitions=request.partitions,
    )


def demands_of(request: PlanRequest, summed: Mapping[str, int]) -> list[Demand]:
    """Return the memory that each member needs of a GPU: measured, or else the sum over its layers.

    Parameters
    ----------
    summed : mapping of str to int
        Bytes of all layers of the members whose layers are known.
    """
    measured = {name: profile.peak_memory_bytes for name, profile in request.profiles.items()}
    return [
        Demand(
            member.name,
            demand_in_parts(member, measured.get(member.name) or summed.get(member.name), request.gpus),
        )
        for member in request.ensemble.members
    ]


def demand_in_parts(member: Member, memory_bytes: int | None, gpus: int) -> int | None:
    """Return the least memory of a rank of a member that needs so much on its least number of GPUs.

    For divided members, a lower bound: activations are as large on any number of GPUs.
    """
    if memory_bytes is None or not member.shard:
        return memory_bytes
    return memory_bytes * member.min_gpus // max(member.min_gpus, member.most_gpus(gpus))


def refuse_large_parts(ensemble: Ensemble, demands: Sequence[Demand], room: ModeLimits) -> None:
    """Raise InfeasibleError for a divided member of which even the least part is too large."""
    for demand in demands:
        if ensemble.member(demand.member).shard and too_large(demand, room):
            raise InfeasibleError(
                does_not_fit(f"a part of {demand.member} on each of its GPUs", demand, room),
                "raise its max_gpus, lower its batch_size, or use GPUs with more memory",
            )
