"""Commands on runs that are there: ``runs``, ``logs``, ``compare``, ``explain`` and ``rm``."""

from __future__ import annotations

import sys
from dataclasses import replace

import click

from hetctl.cli.completions import complete_members, complete_runs
from hetctl.cli.options import this_project
from hetctl.cli.output import as_json, console, json_option, show
from hetctl.reports.units import format_bytes


@click.command("runs")
@json_option
def runs_command() -> None:
    """List all runs of the project, the newest first.

    \b
    Example: hetctl runs
    """
    from hetctl.app.run.compare import runs_of
    from hetctl.reports.run_tables import runs_table

    lines = runs_of(this_project())
    show({"runs": lines}, lambda _: runs_table(lines))


@click.command("logs")
@click.argument("names", metavar="[RUN] [MEMBER]", nargs=-1, shell_complete=complete_members)
@click.option(
    "-f", "--follow", is_flag=True, help="Print what is appended, over rounds and jobs, until the run ends."
)
@click.option(
    "-n", "--lines", metavar="LINES", type=click.IntRange(min=0), help="Begin with the last LINES lines."
)
@click.option("--round", "index", metavar="N", type=click.IntRange(min=0), help="Print the log of round N.")
@click.option("--all", "every", is_flag=True, help="Print the log of all rounds.")
@click.option(
    "--driver", "job", metavar="N", type=click.IntRange(min=0), help="Print the log of job N and its driver."
)
@json_option
def logs_command(
    names: tuple[str, ...],
    follow: bool,
    lines: int | None,
    index: int | None,
    every: bool,
    job: int | None,
) -> None:
    """Print the log of MEMBER in its newest round, or list the logs of RUN (default: the newest).

    \b
    Example: hetctl logs digits-001 cnn -f
    """
    from hetctl.app.run.logs import appended, job_log, length_of, logs_of, member_log, text_of
    from hetctl.app.run.select_run import run_and_member

    project = this_project()
    run, member = run_and_member(project, names)
    if sum((follow, index is not None, as_json())) > 1 and follow:
        raise click.UsageError("-f goes with neither --round nor --json")
    if member is None and job is None:
        if follow or lines is not None or index is not None or every:
            raise click.UsageError("name a MEMBER, or a job by --driver")
        from hetctl.reports.run_tables import logs_table

        show(logs_of(project, run), logs_table)
        return
    if member is not None and job is not None:
        raise click.UsageError("--driver goes with no MEMBER")
    if member is not None:
        part = member_log(project, run, member, index, every=every)
    else:
        part = job_log(project, run, job or 0)
    end = length_of(part)
    part = part if part.end is not None else replace(part, end=end)
    if as_json():
        fields = {"run": part.run, "member": member, "job": job, "round": part.round, "path": str(part.path)}
        show({**fields, "lines": "".join(text_of(part, lines)).splitlines()}, None)
        return
    if not end and not follow:
        click.echo(f"{part.path} has nothing yet: what the ranks print goes there", err=True)
    for text in text_of(part, lines):
        click.echo(text, nl=False)
    for text in appended(project, part, end) if follow else ():
        click.echo(text, nl=False)


@click.command("compare")
@click.argument("runs", metavar="RUN RUN..", nargs=-1, required=True, shell_complete=complete_runs)
@json_option
def compare_command(runs: tuple[str, ...]) -> None:
    """Show runs beside each other: what differs in their input, and the results of their members.

    \b
    Example: hetctl compare digits-001 digits-002
    """
    from hetctl.app.run.compare import compare_runs
    from hetctl.reports.run_tables import comparison_tables

    if len({*runs}) < 2:
        raise click.UsageError("name two runs or more")
    show(compare_runs(this_project(), runs), comparison_tables)


@click.command("explain")
@click.argument("names", metavar="[RUN] MEMBER", nargs=-1, required=True, shell_complete=complete_members)
@json_option
def explain_command(names: tuple[str, ...]) -> None:
    """Explain why MEMBER of RUN (default: the newest) waits, has its GPUs, failed or is done.

    \b
    Example: hetctl explain digits-001 cnn
    """
    from hetctl.app.run.explain import explain_member
    from hetctl.app.run.select_run import run_and_member
    from hetctl.reports.run_tables import explanation_section

    run, member = run_and_member(this_project(), names)
    if member is None:
        raise click.UsageError("name a MEMBER")
    show(explain_member(this_project(), run, member), explanation_section)


yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


@click.command("rm")
@click.argument("runs", metavar="RUN..", nargs=-1, required=True, shell_complete=complete_runs)
@yes_option
@json_option
def rm_command(runs: tuple[str, ...], yes: bool) -> None:
    """Remove runs with their logs and checkpoints, after showing their sizes; what was profiled stays.

    \b
    Example: hetctl rm digits-001 digits-002
    """
    from hetctl.app.run.remove_run import remove_runs

    if not _agreed(runs, yes, "remove this for good?"):
        return
    removed = remove_runs(this_project(), runs)
    freed = format_bytes(sum(one.folder_bytes + one.checkpoint_bytes for one in removed))
    show({"removed": removed}, f"removed {', '.join(one.run for one in removed)}: {freed}")


@click.command("prune")
@click.argument("runs", metavar="RUN..", nargs=-1, required=True, shell_complete=complete_runs)
@click.option(
    "--keep-best",
    is_flag=True,
    required=True,
    expose_value=False,
    help="Keep the checkpoint of each best epoch.",
)
@yes_option
@json_option
def prune_command(runs: tuple[str, ...], yes: bool) -> None:
    """Delete checkpoints of runs that have ended, after showing their sizes; logs and results stay.

    \b
    Example: hetctl prune digits-001 --keep-best

    A member that trains more epochs later goes on from its best one. What a command has written stays.
    """
    from hetctl.app.run.remove_run import prune_runs

    if not _agreed(runs, yes, "delete all checkpoints but those of best epochs?"):
        return
    pruned = prune_runs(this_project(), runs)
    lines = [
        f"{one.run}: {format_bytes(one.freed_bytes)} freed, best epochs of {len(one.members)} members kept"
        for one in pruned
    ]
    show({"pruned": pruned}, lines)


def _agreed(runs: tuple[str, ...], yes: bool, question: str) -> bool:
    """Show the sizes of runs and ask; return false if the answer is no."""
    from hetctl.app.run.remove_run import removals
    from hetctl.reports.run_tables import removals_table

    if yes:
        return True
    if as_json() or not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here: --yes removes without a question")
    console().print(removals_table(removals(this_project(), runs)))
    agreed = click.confirm(question)
    if not agreed:
        click.echo("nothing was removed")
    return agreed
