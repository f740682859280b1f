"""Commands of a run: ``submit``, ``render``, ``advance``, ``status``, ``cancel`` and ``report``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetctl.cli.options import (
    ensemble_option,
    explicit_options,
    json_option,
    mode_options,
    plan_request,
    planner_options,
    predict_option,
    sharing_option,
    site_options,
    this_project,
    warn,
)
from hetctl.cli.output import print_json, write_text
from hetctl.cli.parameter_types import FiniteRange
from hetctl.model.job import UNDER_WAY

if TYPE_CHECKING:
    from hetctl.app.plan.planning import PlanRequest
    from hetctl.app.project import Project
    from hetctl.app.run.continue_run import RequestedOptions
    from hetctl.app.run.lifecycle import RunTransition
    from hetctl.model.ensemble import Ensemble
    from hetctl.model.run import Budget


SITE_AND_SIZE = {"ensemble", "site", "account", "launch", "gpus", "time", "queue"}
NOT_OF_PLANNERS = {*SITE_AND_SIZE, "planner", "sharing", "mode", "predict_rates"}
"""Options of planning that are not the planner's own."""
OF_RUNS = {"retries", "chain", "replay"}
"""Options that planning does not have."""


@click.command("submit")
@ensemble_option
@site_options
@planner_options
@sharing_option
@mode_options
@predict_option
@click.option("--dry-run", is_flag=True, help="Print the script and the submit command; write nothing.")
@click.option("--wait", is_flag=True, help="Follow the run to its end; Ctrl-C leaves it running.")
@click.option("--new", is_flag=True, help="Start a new run even if an unfinished one could continue.")
@click.option("--chain", is_flag=True, help="Queue each next job behind the running one.")
@click.option(
    "--retries",
    metavar="N",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Forgive each member N failures until it finishes an epoch.",
)
@click.option("--max-jobs", metavar="N", type=click.IntRange(min=1), help="Stop after N jobs.")
@click.option("--max-rounds", metavar="N", type=click.IntRange(min=1), help="Stop after N rounds.")
@click.option(
    "--gpu-hours", metavar="H", type=FiniteRange(min=0, min_open=True), help="Stop after H GPU-hours."
)
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Repeat the visits of a trace, with --mode hopper, as far as the job has its workers.",
)
@click.option(
    "--modules",
    type=click.Choice(["kept", "edited"]),
    help="Continue an unfinished run with the modules of its submission, or with those edited since.",
)
@json_option
@click.pass_context
def submit_command(
    context: click.Context,
    /,
    dry_run: bool,
    wait: bool,
    new: bool,
    max_jobs: int | None,
    max_rounds: int | None,
    gpu_hours: float | None,
    modules: str | None,
    ensemble: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Start a run: jobs with as many rounds as fit, one after the other, until all members have converged.

    \b
    Example: hetctl submit --site slurm --gpus 16 --time 2h --wait

    If the ensemble has an unfinished run, that one continues from its checkpoints, with the options given
    now that may change.
    """
    from hetctl.app.run.lifecycle import continue_run, submit
    from hetctl.app.run.select_run import unfinished_run
    from hetctl.model.run import Budget

    project = this_project()
    requested = replace(
        _requested(context, options, Budget(max_jobs, max_rounds, gpu_hours)), modules=modules
    )
    members = project.ensemble(ensemble)
    run = None if new else unfinished_run(project, members.name)
    if run is not None and dry_run:
        _preview_next(project, run, members, requested, as_json=as_json)
    elif run is not None:
        _print_outcome(project, continue_run(project, run, members, requested), wait=wait, as_json=as_json)
    else:
        of_plan = {name: value for name, value in options.items() if name not in OF_RUNS}
        plan, _ = plan_request(project, members, budget=requested.budget, **of_plan)
        if dry_run:
            _preview(project, plan, requested, as_json=as_json)
            return
        outcome = submit(project, plan, requested, new=new)
        warn(project, plan)
        _print_outcome(project, outcome, wait=wait, as_json=as_json)


def _requested(context: click.Context, options: Mapping[str, Any], budget: Budget) -> RequestedOptions:
    """Return the options given for a run, without the defaults."""
    from hetctl.app.run.continue_run import RequestedOptions

    explicit = {name: context.params[name] for name in explicit_options(context)}
    return RequestedOptions(
        site=explicit.get("site"),
        account=explicit.get("account"),
        launch=explicit.get("launch"),
        gpus=explicit.get("gpus"),
        wall_s=explicit.get("time"),
        queue=explicit.get("queue"),
        planner=explicit.get("planner"),
        sharing=explicit.get("sharing"),
        mode=explicit.get("mode"),
        replay=explicit.get("replay"),
        options={
            name: explicit[name] for name in options.keys() & explicit.keys() - NOT_OF_PLANNERS - OF_RUNS
        },
        retries=explicit.get("retries"),
        chain=explicit.get("chain"),
        budget=budget,
    )


def _preview(project: Project, plan: PlanRequest, requested: RequestedOptions, *, as_json: bool) -> None:
    from hetctl.app.run.spec import preview

    submission = preview(project, plan, requested)
    if as_json:
        print_json(submission_fields(submission))
    else:
        print_submission(submission)


def _preview_next(
    project: Project, run: str, ensemble: Ensemble, requested: RequestedOptions, *, as_json: bool
) -> None:
    """Print the next job of an unfinished run; only its script goes to stdout."""
    from hetctl.app.run.spec import preview_next
    from hetctl.model.serialization import encode

    shown = preview_next(project, run, ensemble, requested)
    if as_json:
        print_json({**submission_fields(shown.submission), "changed": encode(shown.changed)})
        return
    for change in shown.changed:
        click.echo(f"# {change}", err=True)
    if shown.behind:
        click.echo(f"# {shown.behind} must be over before `hetctl submit` goes on with run {run}", err=True)
    print_submission(shown.submission)


def _print_outcome(project: Project, outcome: RunTransition, *, wait: bool, as_json: bool) -> None:
    """Print the changes and the submitted job; with `wait`, follow the run."""
    if as_json and not wait:
        print_json(outcome)
        return
    if not as_json:
        for change in outcome.changed:
            click.echo(str(change))
    if wait:
        from hetctl.cli.watch import follow

        follow(project, outcome.run, as_json=as_json, advancing=True, changed=outcome.changed)
    else:
        click.echo(f"run {outcome.run}: {outcome.reason}")
        if outcome.state in UNDER_WAY:
            click.echo("follow it with: hetctl status --watch")


@click.command("render")
@ensemble_option
@site_options
@planner_options
@sharing_option
@click.option(
    "--run", metavar="NAME", default="preview", show_default=True, help="Name the run in the script."
)
@json_option
def render_command(ensemble: str | None, run: str, as_json: bool, **options: Any) -> None:
    """Print the batch script of a run's first job, and the command that would submit it.

    \b
    Example: hetctl render --site summit --gpus 24 --time 2h --account ABC123

    Nothing is written, and no machine is queried: any site's script can be rendered anywhere.
    """
    from hetctl.app.run.spec import render
    from hetctl.inputs.validation import NAME_RULE, SAFE_NAME

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


@click.command("advance")
@click.argument("run", required=False)
@click.option("--after-job", metavar="N", type=int, help="Go on after job N, which calls this at its end.")
@click.option(
    "--queue-next-after",
    metavar="N",
    type=int,
    help="Queue a job behind job N, which calls this at its start.",
)
@json_option
def advance_command(
    run: str | None, after_job: int | None, queue_next_after: int | None, as_json: bool
) -> None:
    """Submit the next job of RUN (default: the newest) if one is needed.

    \b
    Example: hetctl advance

    Job scripts call this at their end, so that a run needs no login session; those of a run that was
    submitted with --chain call it at their start, too.
    """
    from hetctl.app.rebuild_catalog import rebuilding_if_needed
    from hetctl.app.run.lifecycle import advance, chain

    project = this_project()
    if queue_next_after is not None:
        if run is None:
            raise click.UsageError("--queue-next-after needs RUN")
        outcome = rebuilding_if_needed(project, lambda: chain(project, run, queue_next_after))
    elif after_job is not None:
        outcome = rebuilding_if_needed(project, lambda: advance(project, run, after_job=after_job))
    else:
        outcome = advance(project, run)
    if as_json:
        print_json(outcome)
    else:
        click.echo(f"run {outcome.run}: {outcome.state}: {outcome.reason}")


@click.command("status")
@click.argument("run", required=False)
@click.option("--watch", is_flag=True, help="Update the display until the run ends.")
@json_option
def status_command(run: str | None, watch: bool, as_json: bool) -> None:
    """Show the progress of RUN (default: the newest), member by member.

    \b
    Example: hetctl status --watch
    """
    from hetctl.app.run.status import run_status
    from hetctl.cli.watch import follow, most_shown, show

    project = this_project()
    status = run_status(project, run, most_shown(as_json=as_json))
    if watch:
        follow(project, status.run, as_json=as_json, advancing=False)
    else:
        show(status, as_json=as_json)


@click.command("cancel")
@click.argument("run", required=False)
@json_option
def cancel_command(run: str | None, as_json: bool) -> None:
    """Cancel the jobs of RUN (default: the newest); `hetctl submit` continues from the checkpoints.

    \b
    Example: hetctl cancel digits-001
    """
    from hetctl.app.run.lifecycle import cancel

    outcome = cancel(this_project(), run)
    if as_json:
        print_json(outcome)
    else:
        click.echo(f"run {outcome.run}: {outcome.state}: {outcome.reason}")


@click.command("report")
@click.argument("run", required=False)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    default="report.html",
    show_default=True,
    help="Write this file.",
)
@json_option
def report_command(run: str | None, output: Path, as_json: bool) -> None:
    """Write one self-contained HTML page about RUN (default: the newest).

    \b
    Example: hetctl report -o report.html
    """
    from hetctl.app.run.status import compared_status, search_in
    from hetctl.model.serialization import encode

    project = this_project()
    status = compared_status(project, run)
    # Matplotlib takes half a second, which a refusal does not need.
    from hetctl.reports.run_page import render_page
    from hetctl.reports.summary import describe_comparison

    write_text(output, render_page(status, search_in(project, status)))
    if as_json:
        print_json(
            {"run": status.run, "path": str(output.resolve()), "comparison": encode(status.comparison)}
        )
    else:
        click.echo(f"wrote {output}")
        if status.comparison:
            click.echo(describe_comparison(status))
