"""Greedy method of Optimus for all-reduce jobs, as compared by Capes et al. (section 4.2).

As `doubling`, but one worker is added at a time, to the member whose time Q_j / f(w_j) it shortens
most. A member that one more worker does not make faster stays as it is, even if several would.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.model.site import Node
from hetctl.scheduling.planners.elastic import ResizeCandidate, allot, by_gain


def one_more(gpus: int) -> int:
    """Return the next number of workers."""
    return gpus + 1


def add(candidates: Sequence[ResizeCandidate], nodes: Sequence[Node]) -> dict[str, int]:
    """Return GPUs by member by the greedy method of Optimus (section 4.2)."""
    return allot(candidates, nodes, one_more)


OPTIMUS = by_gain("optimus", one_more, add)
