"""Memory of members whose parameters are divided among their GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.methods.parallelism import Demand, ModeLimits, does_not_fit, too_large
from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.errors import InfeasibleError


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
