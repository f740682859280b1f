"""Commands of a run: ``submit``, ``render``, ``advance``, ``status``, ``cancel`` and ``report``."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hetctl.cli.cmd_members import request
from hetctl.cli.completions import complete_members, complete_runs
from hetctl.cli.options import (
    ensemble_option,
    given_options,
    mode_options,
    plan_request,
    planner_options,
    run_argument,
    sharing_option,
    site_options,
    this_project,
    warn,
)
from hetctl.cli.output import as_json, json_option, show, write_text
from hetctl.cli.parameter_types import FiniteRange
from hetctl.cli.watch import follow, forward, most_shown, show_status
from hetctl.model.errors import BadInputError
from hetctl.model.job import UNDER_WAY
from hetctl.model.serialization import encode

if TYPE_CHECKING:
    from hetctl.app.plan.planning import PlanRequest
    from hetctl.app.project import Project
    from hetctl.app.run.continue_run import Choice, RequestedOptions
    from hetctl.app.run.lifecycle import RunTransition
    from hetctl.app.run.submission import Submission
    from hetctl.model.ensemble import Ensemble


SITE_AND_SIZE = {"ensemble", "site", "account", "job_options", "launch", "gpus", "time", "queue"}
NOT_OF_PLANNERS = {*SITE_AND_SIZE, "planner", "sharing", "mode"}
"""Options of planning that are not the planner's own."""
OF_RUNS = {"retries", "chain", "replay", "track"}
"""Options that a run stores, and planning does not have."""
OF_BUDGET = ("max_jobs", "max_rounds", "gpu_hours", "node_hours")
OF_SUBMIT = {"ensemble", "dry_run", "wait", "new", "modules", *OF_BUDGET, *OF_RUNS}
"""Options of ``submit`` that planning does not have."""


@click.command("submit")
@ensemble_option
@site_options
@planner_options
@sharing_option
@mode_options
@click.option("--dry-run", is_flag=True, help="Print the script and the submit command; write nothing.")
@click.option("--wait", is_flag=True, help="Follow the run to its end; Ctrl-C leaves it running.")
@click.option("--new", is_flag=True, help="Start a new run even if another could continue.")
@click.option(
    "--chain",
    metavar="[N]",
    type=click.IntRange(min=1),
    is_flag=False,
    flag_value=1,
    help="Queue each next job behind the running one; with N, queue N jobs now, each behind the one before.",
)
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
    "--node-hours",
    metavar="H",
    type=FiniteRange(min=0, min_open=True),
    help="Keep the jobs within H node-hours, as sites charge them.",
)
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Repeat the visits of a trace, with --mode hopper, as far as the job has its workers.",
)
@click.option(
    "--track",
    type=click.Choice(["mlflow", "wandb"]),
    help="Forward epochs to this tracker with each look at the run.",
)
@click.option(
    "--modules",
    type=click.Choice(["kept", "edited"]),
    help="Continue a run with the modules of its submission, or with those edited since.",
)
@json_option
@click.pass_context
def submit_command(
    context: click.Context, /, dry_run: bool, wait: bool, ensemble: str | None, **_: Any
) -> None:
    """Start a run: jobs with as many rounds as fit, one after the other, until all members have converged.

    \b
    Example: hetctl submit --site slurm --gpus 16 --time 2h --wait

    If the newest run of the ensemble has work left, it continues from its checkpoints, with the options
    given now that may change. So does one that has ended, if its stop rules were raised or members added.
    """
    project = this_project()
    members = project.ensemble(ensemble)
    if dry_run:
        _preview(context, project, members)
    else:
        outcome, choice = begin(context, project, members)
        _print_outcome(project, outcome, choice, wait=wait)
        if (context.params["chain"] or 1) > 1 and shutil.which("scrontab") and not as_json():
            here = shlex.quote(str(project.folder))
            click.echo("to queue more by Slurm when these are over, add with `scrontab -e`:")
            click.echo(f"#SCRON --time=00:05:00\n*/30 * * * * cd {here} && hetctl advance {outcome.run}")


def begin(context: click.Context, project: Project, members: Ensemble) -> tuple[RunTransition, Choice]:
    """Start or continue a run as the options of a `submit` say."""
    from hetctl.app.run.lifecycle import continue_run, submit

    choice, requested = _choose(context, project, members)
    if choice.run is not None:
        return continue_run(project, choice.run, members, requested), choice
    plan = _plan_request(context, project, members, requested)
    outcome = submit(project, plan, requested, new=context.params["new"])
    warn(project, plan)
    return outcome, choice


def _preview(context: click.Context, project: Project, members: Ensemble) -> None:
    """Print the next job of the run; only its script goes to stdout."""
    from hetctl.app.run.spec import preview, preview_next

    choice, requested = _choose(context, project, members)
    if choice.run is not None:
        shown = preview_next(project, choice.run, members, requested)
    else:
        shown = preview(project, _plan_request(context, project, members, requested), requested)
    run = shown.spec.run
    lines = [f"# {line}" for line in (*_says(run, choice), *shown.changed)]
    if shown.behind:
        lines.append(f"# {shown.behind} must be over before `hetctl submit` goes on with run {run}")
    _print_submission(shown.submission, lines, changed=encode(shown.changed), **_fields(choice))


def _choose(context: click.Context, project: Project, members: Ensemble) -> tuple[Choice, RequestedOptions]:
    from hetctl.app.run.continue_run import Choice, choose_run

    requested = _requested(context)
    if (track := requested.track) and find_spec(track) is None:
        raise BadInputError(
            f"--track {track} needs the package {track}, which is not installed",
            f"install hetctl with its extra {track}: pip install 'hetctl[{track}]'",
        )
    choice = Choice(None) if context.params["new"] else choose_run(project, members, requested)
    return choice, requested


def _plan_request(
    context: click.Context, project: Project, members: Ensemble, requested: RequestedOptions
) -> PlanRequest:
    of_plan = {name: value for name, value in context.params.items() if name not in OF_SUBMIT}
    return plan_request(project, members, budget=requested.budget, **of_plan)[0]


def _says(run: str, choice: Choice) -> list[str]:
    """Return whether a run continues or starts, and how to get the other."""
    return [f"{'continues' if choice.run else 'starts'} {run}", *([choice.note] if choice.note else [])]


def _fields(choice: Choice) -> dict[str, Any]:
    """Return the same for programs."""
    return {"continued": choice.run is not None, "note": choice.note}


def _requested(context: click.Context) -> RequestedOptions:
    """Return the options given for a run, without the defaults."""
    from hetctl.app.run.continue_run import RequestedOptions
    from hetctl.model.run import Budget

    # Defaults do not count: an unfinished run keeps what is not given now.
    # Options such as --json are no parameters of the command.
    said = given_options(context, also_variables=True)
    given = {name: context.params[name] for name in said if name in context.params}
    of_run = {*SITE_AND_SIZE - {"ensemble", "time"}, "planner", "sharing", "mode", *OF_RUNS}
    return RequestedOptions(
        **{name: given[name] for name in of_run & given.keys()},
        wall_s=given.get("time"),
        options={name: given[name] for name in given.keys() - NOT_OF_PLANNERS - OF_SUBMIT},
        budget=Budget(*(context.params[name] for name in OF_BUDGET)),
        modules=context.params["modules"],
    )


def _print_submission(submission: Submission, before: Sequence[str] = (), **fields: Any) -> None:
    """Print a script on stdout, and its path, steps, packing and command as comments on stderr."""
    command = submission.request.command
    if as_json():
        names = ("name", "argv", "environment")
        fields |= {
            "run": submission.run,
            "path": str(submission.request.script),
            "script": submission.script,
            "command": list(command),
            "steps": [{name: getattr(step, name) for name in names} for step in submission.steps],
            "packing": list(submission.packing),
        }
    else:
        for line in (*before, f"# {submission.request.script}"):
            click.echo(line, err=True)
    show(fields, submission.script.removesuffix("\n"))
    if as_json():
        return
    for step in submission.steps:
        words = (*(f"{name}={value}" for name, value in step.environment.items()), *step.argv)
        click.echo(f"# the driver starts the step {step.name}: {shlex.join(words)}", err=True)
    for line in submission.packing:
        click.echo(f"# first round, {line}", err=True)
    click.echo(f"# submit with: {shlex.join(command)}", err=True)


def _print_outcome(project: Project, outcome: RunTransition, choice: Choice, *, wait: bool) -> None:
    """Print the choice of the run, its changes and the submitted job; with `wait`, follow the run."""
    said = [*_says(outcome.run, choice), *(str(change) for change in outcome.changed)]
    if wait:
        if not as_json():
            click.echo("\n".join(said))
        follow(
            *(project, outcome.run),
            advancing=True,
            more={"changed": encode(outcome.changed), **_fields(choice)},
        )
        return
    following = ["follow it with: hetctl status --watch"] if outcome.state in UNDER_WAY else []
    show(
        {**encode(outcome), **_fields(choice)},
        [*said, f"run {outcome.run}: {outcome.reason}", *following],
    )


@click.command("render")
@ensemble_option
@site_options
@planner_options
@sharing_option
@click.option(
    "--run", metavar="NAME", default="preview", show_default=True, help="Name the run in the script."
)
@json_option
def render_command(ensemble: str | None, run: str, **options: Any) -> None:
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
    _print_submission(render(project, run, plan_request(project, project.ensemble(ensemble), **options)[0]))


@click.command("advance")
@run_argument
@click.option("--after-job", metavar="N", type=int, help="Go on after job N, which calls this at its end.")
@click.option(
    "--queue-next-after",
    metavar="N",
    type=int,
    help="Queue a job behind job N, which calls this at its start.",
)
@json_option
def advance_command(run: str | None, after_job: int | None, queue_next_after: int | None) -> None:
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
        # Scripts of jobs forward nothing: compute nodes may lack the network.
        forward(project, outcome)
    show(outcome, f"run {outcome.run}: {outcome.state}: {outcome.reason}")


@click.command("status")
@run_argument
@click.option("--watch", is_flag=True, help="Update the display until the run ends.")
@json_option
def status_command(run: str | None, watch: bool) -> None:
    """Show the progress of RUN (default: the newest), member by member.

    \b
    Example: hetctl status --watch
    """
    from hetctl.app.run.status import run_status

    project = this_project()
    status = run_status(project, run, most_shown())
    if watch:
        follow(project, status.run, advancing=False)
    else:
        forward(project, status)
        show_status(status)


@click.command("cancel")
@click.argument("names", metavar="[RUN] [MEMBER]...", nargs=-1, shell_complete=complete_members)
@json_option
def cancel_command(names: tuple[str, ...]) -> None:
    """Cancel the jobs of RUN (default: the newest), or stop training some of its members for good.

    \b
    Example: hetctl cancel digits-001
             hetctl cancel digits-001 wide deep

    `hetctl submit` continues a cancelled run from its checkpoints, `hetctl resume` a cancelled member.
    """
    from hetctl.app.run.edit_run import names_a_run
    from hetctl.app.run.lifecycle import cancel

    project = this_project()
    if names_a_run(project, names):
        outcome = cancel(project, names[0] if names else None)
        show(outcome, f"run {outcome.run}: {outcome.state}: {outcome.reason}")
    else:
        request(names, "cancel")


@click.command("report")
@click.argument("runs", metavar="[RUN..]", nargs=-1, shell_complete=complete_runs)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    default="report.html",
    show_default=True,
    help="Write this file.",
)
@click.option("--serve", is_flag=True, help="Show the page in a browser on this machine, and update it.")
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    default=0,
    help="Serve it from this port.  [default: a free one]",
)
@json_option
@click.pass_context
def report_command(
    context: click.Context, runs: tuple[str, ...], output: Path, serve: bool, port: int
) -> None:
    """Write one self-contained HTML page about RUN (default: the newest), or about several runs side by side.

    \b
    Example: hetctl report -o report.html
             hetctl report --serve
    """
    if serve:
        from hetctl.cli.live_page import serve_run

        if context.get_parameter_source("output") is not ParameterSource.DEFAULT:
            raise click.UsageError("--serve goes without -o")
        if len(runs) > 1:
            raise click.UsageError("--serve shows one run")
        serve_run(this_project(), next(iter(runs), None), port)
        return
    if port:
        raise click.UsageError("--port goes with --serve")
    from hetctl.app.run.compare import compare_runs
    from hetctl.app.run.status import compared_status, search_in

    project = this_project()
    if len(names := tuple(dict.fromkeys(runs))) > 1:
        compared = compare_runs(project, names)
        statuses = [compared_status(project, name) for name in names]
        for each in statuses:
            forward(project, each)
        from hetctl.reports.run_page import render_comparison

        write_text(output, render_comparison(statuses, compared))
        show({"runs": list(names), "path": str(output.resolve())}, f"wrote {output}")
        return
    status = compared_status(project, next(iter(names), None))
    forward(project, status)
    # Importing Matplotlib takes half a second, which a refusal need not wait for.
    from hetctl.reports.run_page import render_page
    from hetctl.reports.summary import comparison_lines

    write_text(output, render_page(status, search_in(project, status)))
    fields = {
        "run": status.run,
        "path": str(output.resolve()),
        "comparison": encode(status.comparison),
        "best_checkpoints": [
            {"member": member.member, "epoch": member.best_epoch, "path": member.best_checkpoint}
            for member in status.members
            if member.best_epoch is not None
        ],
    }
    show(fields, lambda _: [f"wrote {output}", *comparison_lines(status)])
