"""Names of the planners for display; help texts import nothing else of planning, which takes a second."""

from __future__ import annotations

from hetctl.scheduling.planners import PLANNERS


def planner_names() -> list[str]:
    """Return the names of the planners, sorted."""
    return sorted([*PLANNERS, "fixed-K (K GPUs)"])
