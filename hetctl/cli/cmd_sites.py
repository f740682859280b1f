"""``hetctl sites``."""

from __future__ import annotations

import click

from hetctl.cli.options import json_option
from hetctl.cli.output import print_json, print_table


@click.command("sites")
@json_option
def command(as_json: bool) -> None:
    """List the machines that hetctl knows: the project's, your own, and those that come with it.

    Example: hetctl sites
    """
    from hetctl.report.tables import sites_table
    from hetctl.runner.project import Project

    project = Project.here()
    sites = [(project.site(name), str(path)) for name, path in project.sites()]
    if as_json:
        print_json({"sites": [{"file": path, "site": site} for site, path in sites]})
    else:
        print_table(sites_table(sites))
