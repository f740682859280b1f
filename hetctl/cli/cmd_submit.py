"""``hetctl submit``."""

from __future__ import annotations

from typing import Any

import click

from hetctl.cli.options import (
    ensemble_option,
    json_option,
    plan_request,
    planner_options,
    sharing_option,
    site_options,
    warn,
)
from hetctl.cli.output import print_json


@click.command("submit")
@ensemble_option
@site_options
@planner_options
@sharing_option
@click.option("--dry-run", is_flag=True, help="Print the script and the submit command; write nothing.")
@click.option("--wait", is_flag=True, help="Follow the run to its end; Ctrl-C leaves it running.")
@click.option("--new", is_flag=True, help="Start a new run although an unfinished one could go on.")
@click.option("--chain", is_flag=True, help="Queue each next job behind the running one.")
@click.option("--retries", type=click.IntRange(min=0), default=2, show_default=True, help="Per member.")
@click.option("--max-jobs", type=click.IntRange(min=1), help="Stop after so many jobs.")
@click.option("--max-rounds", type=click.IntRange(min=1), help="Stop after so many rounds.")
@click.option("--gpu-hours", type=click.FloatRange(min=0, min_open=True), help="Stop after so much use.")
@json_option
def command(
    dry_run: bool,
    wait: bool,
    new: bool,
    chain: bool,
    retries: int,
    max_jobs: int | None,
    max_rounds: int | None,
    gpu_hours: float | None,
    as_json: bool,
    **wishes: Any,
) -> None:
    """Start a run: jobs that hold as many rounds as fit, one after the other, until all have converged.

    If the ensemble has an unfinished run, that one goes on from its checkpoints.

    Example: hetctl submit --site slurm --gpus 16 --time 2h --wait
    """
    from hetctl.cli.cmd_render import print_submission, submission_fields
    from hetctl.core.run import Budget
    from hetctl.runner.project import Project
    from hetctl.runner.rendering import SubmitRequest, preview
    from hetctl.runner.running import submit

    project = Project.here()
    budget = Budget(max_jobs, max_rounds, gpu_hours)
    plan, _ = plan_request(project, budget=budget, **wishes)
    request = SubmitRequest(plan, budget, retries, new, chain)
    if dry_run:
        submission = preview(project, request)
        if as_json:
            print_json(submission_fields(submission))
        else:
            print_submission(submission)
        return
    outcome = submit(project, request)
    warn(project, request.plan)
    if wait:
        from hetctl.cli.following import follow

        follow(project, outcome.run, as_json=as_json, advancing=True)
    elif as_json:
        print_json(outcome)
    else:
        click.echo(f"run {outcome.run}: {outcome.reason}")
        click.echo("follow it with: hetctl status --watch")
