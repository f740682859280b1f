"""Who trains next, on which GPUs: one file per published method, all of one shape."""

from __future__ import annotations

from hetctl.core.errors import BadInputError
from hetctl.planners.base import Planner, nearest
from hetctl.planners.flotilla import FLOTILLA
from hetctl.planners.independent import INDEPENDENT

PLANNERS: dict[str, Planner] = {planner.name: planner for planner in (INDEPENDENT, FLOTILLA)}


def planner_named(name: str) -> Planner:
    """Return the planner of that name.

    Raises
    ------
    BadInputError
        If there is none; the hint gives the nearest name.
    """
    if name not in PLANNERS:
        raise BadInputError(f"unknown planner {name!r}", hint=nearest(name, PLANNERS))
    return PLANNERS[name]
