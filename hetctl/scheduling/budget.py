"""Limits of a run's budget: GPU-hours, rounds and jobs."""

from __future__ import annotations

from hetctl.model.run import Budget, Usage


def exceeded(budget: Budget, usage: Usage) -> str | None:
    """Return the limit that forbids another round, or None."""
    if budget.max_rounds is not None and usage.rounds >= budget.max_rounds:
        return f"--max-rounds {budget.max_rounds} is reached"
    hours = usage.gpu_seconds / 3600
    if budget.gpu_hours is not None and hours >= budget.gpu_hours:
        return f"--gpu-hours {budget.gpu_hours:g} is used up ({hours:.2f})"
    return None


def exceeded_by_jobs(budget: Budget, jobs: int) -> str | None:
    """Return the limit on jobs if it forbids another one, or None."""
    if budget.max_jobs is not None and jobs >= budget.max_jobs:
        return f"--max-jobs {budget.max_jobs} is reached"
    return None
