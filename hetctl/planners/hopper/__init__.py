"""CEREBRO's model hopper: which configuration trains on which partition of the data, where and when."""

from __future__ import annotations

from collections.abc import Callable

from hetctl.planners.hopper.approximate import approximate
from hetctl.planners.hopper.best import best
from hetctl.planners.hopper.milp import milp
from hetctl.planners.hopper.options import SearchOptions
from hetctl.planners.hopper.randomized import randomized
from hetctl.planners.hopper.schedule import Schedule
from hetctl.planners.hopper.units import UnitTimes

__all__ = ["SCHEDULERS", "SearchOptions"]

SCHEDULERS: dict[str, Callable[[UnitTimes, SearchOptions], Schedule]] = {
    "randomized": randomized,
    "milp": milp,
    "approximate": approximate,
    "best": best,
}
