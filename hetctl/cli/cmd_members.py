"""Commands on members of a run: ``add``, ``drop``, ``change``, ``pause``, ``resume`` and ``retry``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from hetctl.cli.completions import complete_members, complete_new_members, complete_trials
from hetctl.cli.options import ensemble_option, given_options, job_option, this_project
from hetctl.cli.output import json_option, show
from hetctl.cli.parameter_types import FiniteNumber, duration

if TYPE_CHECKING:
    from hetctl.app.project import Project
    from hetctl.app.run.lifecycle import RunTransition

RULE = {"max_epochs", "patience", "target"}
"""Options of ``change`` that are keys of stop rules."""

members_argument = click.argument(
    "names", metavar="[RUN] MEMBER...", nargs=-1, required=True, shell_complete=complete_members
)


@click.command("pause")
@members_argument
@json_option
def pause_command(names: tuple[str, ...]) -> None:
    """Pause members of RUN (default: the newest): they leave their GPUs with a checkpoint.

    \b
    Example: hetctl pause wide deep
    """
    request(names, "pause")


@click.command("resume")
@members_argument
@json_option
def resume_command(names: tuple[str, ...]) -> None:
    """Train paused or cancelled members of RUN (default: the newest) again, from their checkpoints.

    \b
    Example: hetctl resume wide deep
    """
    request(names, "resume")


@click.command("retry")
@members_argument
@json_option
def retry_command(names: tuple[str, ...]) -> None:
    """Train failed members of RUN (default: the newest) again; their failures count anew.

    \b
    Example: hetctl retry digits-001 wide
    """
    request(names, "retry")


def request(names: Sequence[str], want: str) -> None:
    """Record a request about members of a run, and say what follows."""
    from hetctl.app.run import edit_run
    from hetctl.model.events import Request

    outcome = edit_run.request(this_project(), names, Request(want))
    show(outcome, f"run {outcome.run}: {outcome.reason}")


@click.command("add")
@click.argument("names", metavar="[RUN] [MEMBER]...", nargs=-1, shell_complete=complete_new_members)
@ensemble_option
@click.option(
    "--from-trial",
    metavar="RUN:TRIAL",
    shell_complete=complete_trials,
    help="Add a member with the config of this trial.",
)
@click.option("--name", metavar="NAME", help="With --from-trial: the member's name.  [default: the trial's]")
@json_option
def add_command(
    names: tuple[str, ...], ensemble: str | None, from_trial: str | None, name: str | None
) -> None:
    """Add members to RUN (default: the newest): all new ones of the ensemble file, or the named ones.

    \b
    Example: hetctl add digits-001 wider
             hetctl add digits-001 --from-trial search-002:trial-007 --name best

    A running job trains them beside the others; `hetctl submit` continues a run that has ended.
    """
    from hetctl.app.run.edit_run import add_members, add_trial
    from hetctl.inputs.validation import NAME_RULE, SAFE_NAME

    project = this_project()
    if from_trial is None:
        if name is not None:
            raise click.UsageError("--name goes with --from-trial")
        _show(add_members(project, names, project.ensemble(ensemble)))
        return
    if len(names) > 1 or ensemble is not None:
        raise click.UsageError("--from-trial adds one member to RUN: name nothing else")
    if name is not None and not SAFE_NAME.fullmatch(name):
        raise click.BadParameter(f"{name!r} {NAME_RULE}", param_hint="'--name'")
    _show(add_trial(project, names[0] if names else None, from_trial, name))


@click.command("drop")
@members_argument
@json_option
def drop_command(names: tuple[str, ...]) -> None:
    """Take members out of RUN (default: the newest); their checkpoints stay, and `hetctl add` undoes it.

    \b
    Example: hetctl drop digits-001 wide deep
    """
    from hetctl.app.run.edit_run import drop_members

    _show(drop_members(this_project(), names))


@click.command("change")
@click.argument("names", metavar="[RUN] [MEMBER]...", nargs=-1, shell_complete=complete_members)
@ensemble_option
@click.option("--account", metavar="NAME", help="Charge this account from the next job on.")
@job_option
@click.option("--queue", metavar="NAME", help="Submit the next jobs to this queue or partition.")
@click.option("--gpus", metavar="N", type=click.IntRange(min=1), help="Request N GPUs for each next job.")
@click.option(
    "--nodes", metavar="N", type=click.IntRange(min=1), help="Request all GPUs of N nodes for each."
)
@click.option("--time", "wall_s", type=duration, help="Limit each next job to this wall-clock time.")
@click.option("--retries", metavar="N", type=click.IntRange(min=0), help="Forgive each member N failures.")
@click.option("--max-epochs", metavar="N", type=click.IntRange(min=1), help="Train at most N epochs.")
@click.option("--patience", metavar="N", type=click.IntRange(min=1), help="Stop N epochs after the best.")
@click.option("--target", metavar="VALUE", type=FiniteNumber(), help="Stop at this value of the metric.")
@json_option
@click.pass_context
def change_command(context: click.Context, /, names: tuple[str, ...], **_: Any) -> None:
    """Change the next jobs of RUN (default: the newest), and when its members, or MEMBERs alone, stop.

    \b
    Example: hetctl change digits-001 --time 4h --account ml-43
             hetctl change digits-001 wide deep --max-epochs 40

    Without an option, members and jobs follow the edited ensemble file and site file. Members that train heed
    a change at once; jobs that are queued or running keep their size, account and queue.
    """
    given = {*given_options(context)} - {"names"}
    if "ensemble" in given and len(given) > 1:
        raise click.UsageError("--ensemble goes with no other option: the edits of the file are the changes")
    if {"gpus", "nodes"} <= given:
        raise click.UsageError("--nodes stands for all GPUs of so many nodes: give it or --gpus")
    _show(change(this_project(), names, context.params))


def change(project: Project, names: Sequence[str], options: Mapping[str, Any]) -> RunTransition:
    """Change a run as the options of ``change`` say."""
    from hetctl.app.run.continue_run import RequestedOptions
    from hetctl.app.run.edit_run import change_run

    given = {name: value for name, value in options.items() if value is not None and name != "names"}
    file = given.pop("ensemble", None)
    rule = {name: given.pop(name) for name in RULE & given.keys()}
    edited = None if rule or given else project.ensemble(file)
    return change_run(project, names, RequestedOptions(**given), rule, edited)


def _show(outcome: RunTransition) -> None:
    show(outcome, [*map(str, outcome.changed), f"run {outcome.run}: {outcome.reason}"])
