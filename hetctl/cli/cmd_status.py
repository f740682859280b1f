"""``hetctl status``."""

from __future__ import annotations

import click

from hetctl.cli.options import json_option, this_project


@click.command("status")
@click.argument("run", required=False)
@click.option("--watch", is_flag=True, help="Update the display until the run ends.")
@json_option
def command(run: str | None, watch: bool, as_json: bool) -> None:
    """Show the progress of RUN (default: the newest), member by member.

    \b
    Example: hetctl status --watch
    """
    from hetctl.app.run.status import run_status
    from hetctl.cli.watch import follow, most_shown, show

    project = this_project()
    status = run_status(project, run, most_shown(as_json=as_json))
    if watch:
        follow(project, status.run, as_json=as_json, advancing=False)
    else:
        show(status, as_json=as_json)
