"""The doubling heuristic of Capes et al. (section 4.2, Equation 6): powers of two, by gain per GPU.

Every member gets 1 worker, first come, first served where members are more than GPUs. Then the one
whose time falls most per added GPU is doubled, as long as there are GPUs for it. The paper does this
in every scheduling interval; here it is done whenever a member comes or goes. What the paper leaves
out: a member that is resized loses the time of a restart, which counts as part of its time t_j.
"""

from __future__ import annotations

from hetctl.planners.elastic import by_gain


def twice(gpus: int) -> int:
    """Return the next power of two."""
    return 2 * gpus


DOUBLING = by_gain("doubling", twice)
