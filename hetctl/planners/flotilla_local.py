"""FLEET-L (section 4.3.3): as `flotilla`, but GPUs that become free are filled again at once.

Who gets them is found by the same greedy algorithm on those GPUs and the members left alone, while
all others train on.
"""

from __future__ import annotations

from hetctl.planners.base import Planner
from hetctl.planners.flotilla import decide

FLOTILLA_LOCAL = Planner("flotilla-local", "local", decide, shares=True, alpha=0.0)
