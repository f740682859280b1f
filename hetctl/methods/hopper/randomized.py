"""`randomized`: CEREBRO's own scheduler; an idle worker begins a random unit that is ready for it."""

from __future__ import annotations

import random

from hetctl.methods.hopper.list_schedule import Numbers, dispatch
from hetctl.methods.hopper.schedule import Schedule
from hetctl.methods.hopper.search_options import SearchOptions
from hetctl.methods.hopper.unit_times import UnitTimes


def randomized(units: UnitTimes, options: SearchOptions) -> Schedule:
    """Return a random dense schedule (CEREBRO, Algorithms 1 and 2).

    With replicas, any worker that has the partition may process a unit (section 4.5).
    """
    draw = random.Random(options.seed)

    def any_of(_worker: int, ready: Numbers) -> int:
        return int(ready[draw.randrange(len(ready))])

    return dispatch(units, any_of)
