"""Multisets of interchangeable GPUs: those of a virtual worker that have no stage yet."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

Node = tuple[int, ...]
"""Number of GPUs of each type of the cluster on a node."""
Pool = tuple[Node, ...]
"""GPUs by node, sorted, without empty nodes: like GPUs and like nodes are interchangeable."""


class Head(NamedTuple):
    """A GPU of a pool, described by the GPUs on its node and by its type."""

    node: Node
    type: int


def pool_of(nodes: Iterable[Node]) -> Pool:
    """Return the pool of some nodes."""
    return tuple(sorted(node for node in nodes if any(node)))


def left_of(head: Head) -> Node:
    """Return the head's node without its GPU."""
    return tuple(count - (gpu_type == head.type) for gpu_type, count in enumerate(head.node))


def without(pool: Pool, head: Head) -> Pool:
    """Return the pool without the head's GPU."""
    nodes = list(pool)
    nodes.remove(head.node)
    return pool_of([*nodes, left_of(head)])


def all_heads(pool: Pool) -> Iterator[Head]:
    """Yield all distinct GPUs."""
    for node in dict.fromkeys(pool):
        yield from (Head(node, gpu_type) for gpu_type, count in enumerate(node) if count)


def one_head(pool: Pool) -> Iterator[Head]:
    """Yield one GPU; repeated calls use up one node before the next."""
    yield from list(all_heads(pool[:1]))[:1]


def heads_after(pool: Pool, head: Head, same_node: bool) -> Iterator[Head]:
    """Yield the distinct GPUs that are left on the head's node, or on all others."""
    others = list(pool)
    others.remove(head.node)
    yield from all_heads((left_of(head),) if same_node else tuple(others))


def most_within(pool: Pool) -> int:
    """Return an upper bound of the number of subpools, the pool itself and the empty one included."""
    kinds = Counter(pool).items()
    ways = [(math.prod(count + 1 for count in node), nodes) for node, nodes in kinds]
    return math.prod(math.comb(states + nodes - 1, nodes) for states, nodes in ways)
