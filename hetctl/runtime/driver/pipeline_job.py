"""Pipelines in a job: members train one after another, each as a pipeline on all GPUs."""

from __future__ import annotations

from hetctl.methods.pipeline.layouts import Layouts, pipeline_planner
from hetctl.runtime.driver.job_modes import JobMode
from hetctl.scheduling.round_scheduler import RoundScheduler


class PipelineJob(JobMode):
    """Rounds of one pipeline each, laid out on the job's nodes."""

    has_pipelines = True

    def scheduler(self) -> RoundScheduler:
        """Return the scheduling of the run's pipelines."""
        find = Layouts(self.rounds.spec.pipelines, self.rounds.members.planned_like).find
        self.planner = pipeline_planner(find)
        return RoundScheduler(self.planner, self.options, self)
