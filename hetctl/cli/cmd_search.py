"""``hetctl search``."""

from __future__ import annotations

from pathlib import Path

import click

from hetctl.cli.options import json_option, this_project
from hetctl.cli.output import print_json, print_table, write_text

MOST_TRIALS = 20


@click.group("search")
def command() -> None:
    """Show or export the trials of a search.

    \b
    Example: hetctl search show
    """


@command.command("show")
@click.argument("run", required=False)
@click.option(
    "--best",
    metavar="N",
    type=click.IntRange(min=1),
    default=MOST_TRIALS,
    show_default=True,
    help="Number of trials to show; --json has all.",
)
@json_option
def show(run: str | None, best: int, as_json: bool) -> None:
    """Show the best trials of the search of RUN (default: the newest run).

    \b
    Example: hetctl search show --best 10
    """
    from hetctl.app.run.search_status import search_status
    from hetctl.reports.search_table import search_table

    found = search_status(this_project(), run)
    if as_json:
        print_json(found)
    else:
        print_table(search_table(found, best))


@command.command("export")
@click.argument("run", required=False)
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="CSV file; default: stdout."
)
@click.option(
    "--study",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a new SQLite database for Optuna instead, which its dashboard opens.",
)
@click.pass_context
def export(context: click.Context, run: str | None, output: Path | None, study: Path | None) -> None:
    """Write all trials of the search of RUN (default: the newest run) as CSV.

    \b
    Example: hetctl search export -o trials.csv
    """
    from hetctl.app.run.search_status import search_status, trials_as_csv

    if output and study:
        raise click.UsageError("give one of --output and --study", context)
    if study:
        from hetctl.app.run.search_study import export_study

        export_study(this_project(), run, study)
        click.echo(f"wrote {study}")
        return
    text = trials_as_csv(search_status(this_project(), run))
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)
