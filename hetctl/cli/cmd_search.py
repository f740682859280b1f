"""``hetctl search``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from hetctl.cli.options import run_argument, this_project
from hetctl.cli.output import json_option, show, write_text
from hetctl.cli.parameter_types import OutputFile

MOST_TRIALS = 20


@click.group("search")
def search_command() -> None:
    """Show or export the trials of a search.

    \b
    Example: hetctl search show
    """


@search_command.command("show")
@run_argument
@click.option(
    "--best",
    metavar="N",
    type=click.IntRange(min=1),
    default=MOST_TRIALS,
    show_default=True,
    help="Show N trials; --json has all.",
)
@json_option
def show_trials(run: str | None, best: int) -> None:
    """Show the best trials of the search of RUN (default: the newest run).

    \b
    Example: hetctl search show --best 10
    """
    from hetctl.app.run.search_status import search_status
    from hetctl.reports.status_table import search_table

    show(search_status(this_project(), run), lambda found: search_table(found, best))


@search_command.command("export")
@run_argument
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write this CSV file.  [default: stdout]",
)
@click.option(
    "--study",
    type=OutputFile(),
    metavar="FILE",
    help="Write an SQLite database for Optuna instead, which its dashboard opens, or update it.",
)
@click.option("--watch", is_flag=True, help="Update the study until the run ends.")
@click.pass_context
def export(
    context: click.Context, run: str | None, output: Path | None, study: Path | None, watch: bool
) -> None:
    """Write all trials of the search of RUN (default: the newest run) as CSV.

    \b
    Example: hetctl search export -o trials.csv
    """
    from hetctl.app.run.search_status import export_study, search_status, trials_as_csv
    from hetctl.model.job import UNDER_WAY

    if output and study:
        raise click.UsageError("give one of --output and --study", context)
    if watch and not study:
        raise click.UsageError("--watch needs --study", context)
    project = this_project()
    if study:
        status = export_study(project, run, study)
        click.echo(f"wrote {study}")
        while watch and status.state in UNDER_WAY:
            time.sleep(project.waits.run_poll_s)
            status = export_study(project, status.run, study)
    elif output:
        write_text(output, trials_as_csv(search_status(project, run)))
    else:
        click.echo(trials_as_csv(search_status(project, run)), nl=False)
