"""Conditions under which members whose parameters are divided among their GPUs can be planned."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.methods.parallelism import Demand, ModeLimits, does_not_fit, too_large
from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.plan import HOPPER, PIPELINE
from hetctl.model.training_settings import ON


def refuse_modes_of_sharded(ensemble: Ensemble, mode: str | None, balance: str) -> None:
    """Refuse modes and balancing that do not go with `shard`.

    Raises
    ------
    BadInputError
        If they do not.
    """
    sharded = [member.name for member in ensemble.members if member.shard]
    rules = (
        (mode not in (HOPPER, PIPELINE), f"--mode {mode}", "use --mode data-parallel or auto"),
        (balance != ON, f"--balance {ON}", "use --balance auto or off"),
    )
    for holds, what, hint in rules:
        if sharded and not holds:
            raise BadInputError(
                f"{sharded[0]} has `shard: true` in the ensemble file, which does not go with {what}",
                f"{hint}, or leave out `shard`",
            )


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
