"""``hetctl doctor``."""

from __future__ import annotations

import click

from hetctl.cli.options import json_option
from hetctl.cli.output import leave, print_json, print_table


@click.command("doctor")
@click.option("-s", "--site", metavar="NAME|FILE", envvar="HETCTL_SITE", help="The site to examine.")
@click.option("--queue", envvar="HETCTL_QUEUE", help="Queue or partition.")
@click.option("--account", envvar="HETCTL_ACCOUNT", help="Project that pays.")
@click.option("--job", is_flag=True, help="Run a short job on two nodes, too, and wait for it.")
@json_option
def command(site: str | None, queue: str | None, account: str | None, job: bool, as_json: bool) -> None:
    """Examine a site and say what to fix: commands, queue, limits, account, folders, Python.

    With --job, a short job also tries whether steps start, find one another by MPI and get their GPUs.

    Example: hetctl doctor --site slurm --job
    """
    from hetctl.report.site_tables import findings_table
    from hetctl.runner.doctor import examine
    from hetctl.runner.project import Project

    examination = examine(Project.here(), site, account, queue, job=job)
    if as_json:
        print_json(examination, examination.failure)
    else:
        print_table(findings_table(examination.site, examination.findings))
    leave(examination.failure, as_json=as_json)
