"""``hetctl pipeline`` and its sub-command."""

from __future__ import annotations

import click

from hetctl.cli.options import run_argument, this_project
from hetctl.cli.output import json_option, show
from hetctl.model.errors import HetctlError


@click.group("pipeline")
def pipeline_command() -> None:
    """Check members of runs that trained as pipelines.

    \b
    Example: hetctl pipeline check vgg-001
    """


@pipeline_command.command("check")
@run_argument
@json_option
def check(run: str | None) -> None:
    """Compare the staleness of the weights that minibatches of RUN (default: the newest) met with its bounds.

    \b
    Example: hetctl pipeline check vgg-001
    """
    from hetctl.app.pipeline import check_run
    from hetctl.reports.pipeline_tables import wave_check_table

    name, checks = check_run(this_project(), run)
    count = sum(len(one.violations) for one in checks)
    failure = HetctlError(
        f"{count:,} passes of run {name} met older weights than the bounds allow",
        "keep its folder `waves`, and report the defect",
    )
    show({"run": name, "checks": checks}, lambda _: wave_check_table(checks), failure if count else None)
