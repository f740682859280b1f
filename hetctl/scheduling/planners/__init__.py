"""Planners, which choose the members to train next and their GPUs: one module each, all of one form."""

from __future__ import annotations

import re

from hetctl.model.errors import BadInputError
from hetctl.scheduling.planners.base import Planner, nearest
from hetctl.scheduling.planners.doubling import DOUBLING
from hetctl.scheduling.planners.exploratory import EXPLORATORY
from hetctl.scheduling.planners.fixed import INDEPENDENT, fixed
from hetctl.scheduling.planners.flotilla import FLOTILLA, FLOTILLA_LOCAL
from hetctl.scheduling.planners.fluid import FLUID
from hetctl.scheduling.planners.heterogeneous import by_type
from hetctl.scheduling.planners.static import STATIC

PLANNERS: dict[str, Planner] = {
    planner.name: by_type(planner)
    for planner in (
        INDEPENDENT,
        FLOTILLA,
        FLOTILLA_LOCAL,
        DOUBLING,
        EXPLORATORY,
        FLUID,
        STATIC,
    )
}
FIXED = re.compile(r"fixed-(\d{1,6})")
"""Pattern of ``fixed-K``, for any K."""


def planner_named(name: str) -> Planner:
    """Return the planner with a name.

    Raises
    ------
    BadInputError
        If there is no such planner; the hint gives the nearest name.
    """
    found = FIXED.fullmatch(name)
    if found and int(found[1]) > 0:
        return by_type(fixed(int(found[1])))
    if name.startswith("fixed"):
        raise BadInputError(
            f"planner {name!r} lacks the number of GPUs of each member, at least 1",
            hint="for example fixed-4",
        )
    if name not in PLANNERS:
        raise BadInputError(f"unknown planner {name!r}", hint=nearest(name, {**PLANNERS, "fixed-K": fixed}))
    return PLANNERS[name]
