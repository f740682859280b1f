"""``hetctl report``."""

from __future__ import annotations

from pathlib import Path

import click

from hetctl.cli.options import json_option, this_project
from hetctl.cli.output import print_json, write_text


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
def command(run: str | None, output: Path, as_json: bool) -> None:
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
