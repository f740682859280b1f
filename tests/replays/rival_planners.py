"""Planners by name: hetctl's own, and one that FLEET compares with (section 6.1).

`HOMOGENEOUS` is the training of homogeneous ensembles (Pittman et al.): a random set of members trains with
shared data, one GPU each, and the next set begins when all of it are done. Sets follow one another in the
order in which `independent` draws members.
"""

from __future__ import annotations

from hetctl.scheduling.planners import PLANNERS as OWN
from hetctl.scheduling.planners import planner_named as own_named
from hetctl.scheduling.planners.base import Planner
from hetctl.scheduling.planners.fixed import decide, drawn
from hetctl.scheduling.planners.heterogeneous import by_type

HOMOGENEOUS = by_type(Planner("homogeneous", "global", decide, trains_as_group=True, order=drawn, alpha=0.0))
PLANNERS = {**OWN, HOMOGENEOUS.name: HOMOGENEOUS}


def planner_named(name: str) -> Planner:
    """Return the planner with a name, of the rivals too."""
    return PLANNERS.get(name) or own_named(name)
