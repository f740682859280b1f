"""``hetctl catalog``."""

from __future__ import annotations

import click

from hetctl.cli.options import json_option, this_project
from hetctl.cli.output import print_json


@click.group("catalog")
def command() -> None:
    """Make the catalog of a project anew.

    \b
    Example: hetctl catalog rebuild
    """


@command.command("rebuild")
@json_option
def rebuild(as_json: bool) -> None:
    """Make the catalog anew from its newest sound copy and the files of runs and profiling jobs.

    \b
    Example: hetctl catalog rebuild

    Jobs that are queued or running go on, and none is submitted twice.
    """
    from hetctl.app.rebuild_catalog import rebuild_catalog

    done = rebuild_catalog(this_project())
    if as_json:
        print_json(done)
        return
    click.echo(f"rebuilt {done.path}, beginning with {done.beginning or 'an empty one'}")
    click.echo(f"runs: {', '.join(done.runs) or 'none'}; profiling jobs: {done.profiles}")
    if done.replaced:
        click.echo(f"the catalog before is kept as {done.replaced}")
