"""Command ``ensemble``."""

from __future__ import annotations

from pathlib import Path

import click

from hetctl.cli.completions import complete_runs
from hetctl.cli.options import this_project
from hetctl.cli.output import json_option, show
from hetctl.model.exports import AVERAGES, GREEDY, SOUPS


@click.command("ensemble")
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option(
    "--soups",
    is_flag=True,
    help="Average weights, too, of members with one shape: their networks run here, without a GPU.",
)
@click.option(
    "--way",
    type=click.Choice([*AVERAGES, *SOUPS]),
    default=GREEDY,
    show_default=True,
    help="Ensemble that -o writes.",
)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write this folder, new."
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@json_option
def ensemble_command(run: str | None, soups: bool, way: str, output: Path | None, force: bool) -> None:
    """Choose and average members of RUN (default: the newest), and show the gain over the best one.

    \b
    Example: hetctl ensemble digits-001 -o digits-ensemble

    Members are chosen by one half of the validation samples and judged by the other, and the other way
    round. The folder has the weights, and `predict.py` with `predict_fn`, which needs no hetctl.
    """
    from hetctl.app.run.combine import combine
    from hetctl.reports.run_tables import ensemble_sections

    found = combine(this_project(), run, way, output, soups=soups, force=force)
    show(found, lambda: ensemble_sections(found))
