"""Batch scripts rendered from templates, without any query to a machine."""

from __future__ import annotations

from hetctl.cluster.render.job_script import JobScript, render_job, submit_command

__all__ = ["JobScript", "render_job", "submit_command"]
