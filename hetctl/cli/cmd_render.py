"""``hetctl render``."""

from __future__ import annotations

import shlex
from typing import Any

import click

from hetctl.cli.options import (
    ensemble_option,
    json_option,
    plan_request,
    planner_options,
    sharing_option,
    site_options,
    this_project,
)
from hetctl.cli.output import print_json


@click.command("render")
@ensemble_option
@site_options
@planner_options
@sharing_option
@click.option(
    "--run", metavar="NAME", default="preview", show_default=True, help="Name the run in the script."
)
@json_option
def command(ensemble: str | None, run: str, as_json: bool, **options: Any) -> None:
    """Print the batch script of a run's first job, and the command that would submit it.

    \b
    Example: hetctl render --site summit --gpus 24 --time 2h --account ABC123

    Nothing is written, and no machine is queried: any site's script can be rendered anywhere.
    """
    from hetctl.app.run.spec import render
    from hetctl.inputs.names import NAME_RULE, SAFE_NAME

    if not SAFE_NAME.fullmatch(run):
        raise click.BadParameter(f"{run!r} {NAME_RULE}", param_hint="'--run'")
    project = this_project()
    submission = render(project, run, plan_request(project, project.ensemble(ensemble), **options)[0])
    if as_json:
        print_json(submission_fields(submission))
    else:
        print_submission(submission)


def submission_fields(submission: Any) -> dict[str, Any]:
    """Return a submission as a mapping for JSON."""
    return {
        "run": submission.run,
        "path": str(submission.request.script),
        "script": submission.script,
        "command": list(submission.request.command),
        "steps": [
            {"name": step.name, "argv": list(step.argv), "environment": dict(step.environment)}
            for step in submission.steps
        ],
        "packing": list(submission.packing),
    }


def print_submission(submission: Any) -> None:
    """Print a script on stdout, and its path, steps, packing and command as comments on stderr."""
    click.echo(f"# {submission.request.script}", err=True)
    click.echo(submission.script, nl=False)
    for step in submission.steps:
        words = (*(f"{name}={value}" for name, value in step.environment.items()), *step.argv)
        click.echo(f"# the driver starts the step {step.name}: {shlex.join(words)}", err=True)
    for line in submission.packing:
        click.echo(f"# first round, {line}", err=True)
    click.echo(f"# submit with: {shlex.join(submission.request.command)}", err=True)
