"""``hetctl doctor``."""

from __future__ import annotations

import click

from hetctl.cli.options import json_option, this_project
from hetctl.cli.output import exit_on_failure, print_json, print_table
from hetctl.model.frameworks import FRAMEWORKS


@click.command("doctor")
@click.option(
    "-s",
    "--site",
    metavar="NAME|FILE",
    envvar="HETCTL_SITE",
    help="Check this site: a name, or a file.  [default: the site of this machine]",
)
@click.option("--queue", metavar="NAME", envvar="HETCTL_QUEUE", help="Check this queue or partition.")
@click.option("--account", metavar="NAME", envvar="HETCTL_ACCOUNT", help="Check this account.")
@click.option("--job", is_flag=True, help="Run a short job on two nodes, too, and wait for it.")
@click.option(
    "--framework",
    type=click.Choice(tuple(FRAMEWORKS)),
    help="Measure the all-reduce of this framework with --job.  [default: the first that the nodes have]",
)
@json_option
def command(
    site: str | None, queue: str | None, account: str | None, job: bool, framework: str | None, as_json: bool
) -> None:
    """Check a site and report what to fix: commands, queue, limits, account, folders, Python.

    \b
    Example: hetctl doctor --site slurm --job

    With --job, a short job also tests whether ranks start, get their GPUs and connect, and how fast GPUs
    exchange data within a node and between nodes.
    """
    if framework and not job:
        raise click.UsageError("--framework requires --job")
    from hetctl.app.doctor.doctor import examine
    from hetctl.reports.site_tables import doctor_table

    examination = examine(this_project(), site, account, queue, job=job, framework=framework)
    if as_json:
        print_json(examination, examination.failure)
    else:
        print_table(doctor_table(examination.site, examination.checks))
    exit_on_failure(examination.failure, as_json=as_json)
