"""Pipelines in a job: members train one after another, each as a pipeline on all GPUs."""

from __future__ import annotations

from hetctl.methods.pipeline.layouts import Layouts, pipeline_planner
from hetctl.runtime.driver.job_modes import JobMode
from hetctl.scheduling.round_scheduler import RoundScheduler


class PipelineJob(JobMode):
    """Rounds of one pipeline each, laid out on the job's nodes."""

    def scheduler(self) -> RoundScheduler:
        """Return the scheduling of the run's pipelines."""
        job = self.job
        planner = pipeline_planner(Layouts(job.spec.pipelines, job.members.planned_like).find)
        return RoundScheduler(planner, job.options, job.observer(planner, pipelines=True))
