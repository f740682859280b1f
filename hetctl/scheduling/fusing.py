"""Choice of the members that train fused: those of one shape that wait join others on their GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import field

from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.plan import FUSED, Allocation, Placement
from hetctl.model.profile import shape_digest
from hetctl.model.run import LOCKSTEP
from hetctl.model.site import MEMBERS, Node
from hetctl.model.training_settings import FRAMEWORKS
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options

FUSE_LIMIT = 16
"""Most members in one process; how many of them are one computation is measured there."""
TRIAL_LIMIT = 2
"""Most members in one process until one has told what its shape gains: those that gain nothing start anew."""


def fused_shape(
    member: Member, ensemble: Ensemble, launch: str, sharing: str, options: Options
) -> str | None:
    """Return the shape of a member that may train fused with others of it; None if it may not.

    The rank tells by a step whether members of one shape do have one program.
    """
    code = member.code or ensemble.code
    framework = FRAMEWORKS.get(code.framework)
    own_loop = code.functions.train_fn or member.shard or member.global_batch_size or member.min_gpus > 1
    apart = ensemble.partitions or sharing == LOCKSTEP or launch == MEMBERS
    can_fuse = options.fuse and framework is not None and framework.can_fuse
    return None if not can_fuse or own_loop or apart else shape_digest(member, ensemble.rate_keys)


def places(shapes: Iterable[str | None]) -> int:
    """Return how many trials of these shapes a search has on a GPU at a time.

    With several shapes, one that goes on and on would keep the GPUs from the others.
    """
    found = {*shapes}
    return FUSE_LIMIT if len(found) == 1 and all(found) else 1


@dataclass
class FusedGroup:
    """Members that train fused on one GPU, or one member that others may join.

    Parameters
    ----------
    shape : str
        Shape of the members.
    seats : set of int
        Seats that are taken, as in `Placement`.
    """

    shape: str
    node: Node
    gpu: int
    seats: set[int] = field(default_factory=lambda: {1})

    def take(self) -> Placement:
        """Take a seat."""
        seat = next(number for number in range(1, FUSE_LIMIT + 1) if number not in self.seats)
        self.seats.add(seat)
        return Placement(self.node.name, (self.gpu,), seat)


def companions(
    groups: Iterable[FusedGroup], waiting: Iterable[Workload], alone: Collection[str]
) -> list[Allocation]:
    """Return the allocations of waiting members that join the groups of their shapes, smallest group first.

    Parameters
    ----------
    waiting : iterable of Workload
        Members in the order in which they get seats.
    alone : collection of str
        Members that have to train alone.
    """
    by_shape: dict[str, list[FusedGroup]] = {}
    for group in groups:
        by_shape.setdefault(group.shape, []).append(group)
    joined = []
    for workload in waiting if by_shape else ():
        known = () if workload.name in alone else by_shape.get(workload.fuses, ())
        limit = FUSE_LIMIT if workload.fused else TRIAL_LIMIT
        open_groups = [group for group in known if len(group.seats) < limit]
        smallest = min(open_groups, key=lambda group: len(group.seats), default=None)
        if smallest and (rate := workload.on_type(smallest.node.gpu_type or "").rates.get(1)):
            joined.append(Allocation(workload.name, 1, FUSED, rate, (smallest.take(),)))
    return joined
