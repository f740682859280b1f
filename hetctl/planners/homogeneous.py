"""Training of homogeneous ensembles (Pittman et al.), as FLEET compares with it (section 6.1).

A random set of the members that are left trains with shared data, one GPU each; the next set begins
when all of it are done. Sets follow one another in the order in which `independent` draws members.
"""

from __future__ import annotations

from hetctl.planners.base import Planner
from hetctl.planners.independent import decide, drawn

HOMOGENEOUS = Planner("homogeneous", "global", decide, shares=True, order=drawn, alpha=0.0)
