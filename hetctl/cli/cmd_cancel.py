"""``hetctl cancel``."""

from __future__ import annotations

import click

from hetctl.cli.options import json_option, this_project
from hetctl.cli.output import print_json


@click.command("cancel")
@click.argument("run", required=False)
@json_option
def command(run: str | None, as_json: bool) -> None:
    """Cancel the jobs of RUN (default: the newest); `hetctl submit` continues from the checkpoints.

    \b
    Example: hetctl cancel digits-001
    """
    from hetctl.app.run.lifecycle import cancel

    outcome = cancel(this_project(), run)
    if as_json:
        print_json(outcome)
    else:
        click.echo(f"run {outcome.run}: {outcome.state}: {outcome.reason}")
