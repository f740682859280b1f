"""Roles in a round (FLEET, Table 1): masters, workers and preprocessors."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetctl.model.plan import Allocation
from hetctl.model.profile import PreprocessPoint
from hetctl.model.run import CACHED, LOCKSTEP
from hetctl.perf.preprocessing import preprocessors_needed
from hetctl.runtime.data.loaders import Lockstep

LEAST_CHUNK = 8


@dataclass(frozen=True)
class Role:
    """One rank of a member's group.

    Parameters
    ----------
    rank : int
        Number within the group; rank 0 is its master, the others are its workers.
    leader : bool
        True for the first of all ranks on its node.
    preprocessors : int
        Number of preprocessor processes of the rank.
    """

    member: str
    rank: int
    node: str
    leader: bool
    preprocessors: int

    @property
    def master(self) -> bool:
        """True if the rank decides for its group."""
        return self.rank == 0


def roles_of(
    allocations: Sequence[Allocation], sharing: str, points: Sequence[PreprocessPoint], cores: int
) -> tuple[Role, ...]:
    """Assign the roles of a round.

    Each node has the least number of preprocessors that meets the demand of its ranks: the sum of their
    rates if each prepares for itself; the fastest member's rate if a prepared sample serves all; the slowest
    member's if all wait for it. They are distributed evenly over the ranks. Each rank has at least one,
    except in lockstep with two or more cores per rank, where one can serve all.

    Parameters
    ----------
    sharing : str
        Kind of sharing: ``none``, ``cached`` or ``lockstep``.
    points
        Rates of preprocessing on 1, 2, 4, .. cores, in samples/s.
    cores : int
        Number of cores per node.

    Returns
    -------
    tuple of Role
        Roles of all ranks, by member and rank.
    """
    placed = [(a, rank, node) for a in allocations for rank, node in enumerate(_nodes_of(a))]
    by_node: dict[str, list[tuple[Allocation, int]]] = {}
    for allocation, rank, node in placed:
        by_node.setdefault(node, []).append((allocation, rank))
    forked = {
        (node, allocation.member, rank): count
        for node, ranks in by_node.items()
        for (allocation, rank), count in zip(ranks, _counts(ranks, sharing, points, cores), strict=True)
    }
    leaders = {(node, ranks[0][0].member, ranks[0][1]) for node, ranks in by_node.items()}
    return tuple(
        Role(a.member, rank, node, (node, a.member, rank) in leaders, forked[node, a.member, rank])
        for a, rank, node in placed
    )


def together(
    roles: Sequence[Role], batches: Mapping[str, int], run: str, round_index: int
) -> tuple[Lockstep, ...]:
    """Return the lockstep of each rank with the others on its node.

    Parameters
    ----------
    batches : mapping
        Samples of a batch of each member's whole group. The chunk that is prepared together is their greatest
        common divisor, or the smallest of them if the divisor is less than `LEAST_CHUNK`.

    Returns
    -------
    tuple of Lockstep
        Locksteps in the order of the roles.
    """
    sizes = [batches[role.member] for role in roles]
    common = math.gcd(*sizes)
    readers = Counter(role.node for role in roles)
    seen: Counter[str] = Counter()
    steps = []
    for role in roles:
        steps.append(
            Lockstep(
                name=f"round-{round_index}.ring",
                # hash() of a text differs from process to process (PYTHONHASHSEED), and ranks must agree.
                seed=zlib.crc32(f"{run}/{round_index}".encode()),
                chunk=common if common >= LEAST_CHUNK else min(sizes),
                largest=max(sizes),
                reader=seen[role.node],
                readers=readers[role.node],
            )
        )
        seen[role.node] += 1
    return tuple(steps)


def _nodes_of(allocation: Allocation) -> list[str]:
    """Return the node of each rank; launchers number ranks node by node."""
    return [place.node for place in allocation.placement for _ in place.gpus]


def _counts(
    ranks: Sequence[tuple[Allocation, int]], sharing: str, points: Sequence[PreprocessPoint], cores: int
) -> list[int]:
    """Return the number of preprocessors of each of a node's ranks."""
    demand = _demand({a.member: a.rate for a, _ in ranks}, [a.rate / a.gpus for a, _ in ranks], sharing)
    total = preprocessors_needed(points, demand, cores)
    # Where ranks have a core each, one that alone had a preprocessor would be the slowest, and set the pace.
    if sharing != LOCKSTEP or cores < 2 * len(ranks):
        total = max(total, len(ranks))
    return [total // len(ranks) + (index < total % len(ranks)) for index in range(len(ranks))]


def _demand(members: Mapping[str, float], per_rank: Sequence[float], sharing: str) -> float:
    if sharing == LOCKSTEP:
        return min(members.values())
    return max(members.values()) if sharing == CACHED else sum(per_rank)
