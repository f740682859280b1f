"""CEREBRO's model hopper: schedules of configurations over data partitions, and their simulation."""

from __future__ import annotations

from collections.abc import Callable

from hetctl.methods.hopper.approximate import approximate
from hetctl.methods.hopper.list_schedule import randomized
from hetctl.methods.hopper.milp import milp
from hetctl.methods.hopper.portfolio import best
from hetctl.methods.hopper.schedule import Schedule, SearchOptions, UnitTimes

__all__ = ["SCHEDULERS", "SearchOptions"]

SCHEDULERS: dict[str, Callable[[UnitTimes, SearchOptions], Schedule]] = {
    "randomized": randomized,
    "milp": milp,
    "approximate": approximate,
    "best": best,
}
