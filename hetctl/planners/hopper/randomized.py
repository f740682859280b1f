"""`randomized`: CEREBRO's own scheduler; an idle worker begins any unit that is ready for it."""

from __future__ import annotations

import random

from hetctl.planners.hopper.dispatch import Numbers, dispatch
from hetctl.planners.hopper.options import SearchOptions
from hetctl.planners.hopper.schedule import Schedule
from hetctl.planners.hopper.units import UnitTimes


def randomized(units: UnitTimes, options: SearchOptions) -> Schedule:
    """Return a random dense schedule (CEREBRO, Algorithms 1 and 2).

    With replicas, any worker that has the partition may take a unit (section 4.5).
    """
    draw = random.Random(options.seed)

    def any_of(_worker: int, ready: Numbers) -> int:
        return int(ready[draw.randrange(len(ready))])

    return dispatch(units, any_of)
