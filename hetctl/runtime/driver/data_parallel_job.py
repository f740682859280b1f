"""Data-parallel training in a job: rounds of groups, with equal or with balanced batches."""

from __future__ import annotations

from hetctl.runtime.driver.job_modes import JobMode
from hetctl.scheduling.core import Core, JobOptions


class DataParallelJob(JobMode):
    """Rounds of groups as the run's planner decides."""

    def core(self) -> Core:
        """Return the scheduling by the run's planner."""
        planner, options = self.job.planner, self.job.options
        return Core(planner, options, JobOptions(), self.job.observer(planner))
