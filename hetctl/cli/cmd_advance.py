"""``hetctl advance``."""

from __future__ import annotations

import click

from hetctl.cli.options import json_option, this_project
from hetctl.cli.output import print_json


@click.command("advance")
@click.argument("run", required=False)
@click.option("--after-job", metavar="N", type=int, help="Go on after job N, which calls this at its end.")
@click.option(
    "--queue-next-after",
    metavar="N",
    type=int,
    help="Queue a job behind job N, which calls this at its start.",
)
@json_option
def command(run: str | None, after_job: int | None, queue_next_after: int | None, as_json: bool) -> None:
    """Submit the next job of RUN (default: the newest) if one is needed.

    \b
    Example: hetctl advance

    Job scripts call this at their end, so that a run needs no login session; those of a run that was
    submitted with --chain call it at their start, too.
    """
    from hetctl.app.rebuild_catalog import rebuilding_if_needed
    from hetctl.app.run.lifecycle import advance, chain

    project = this_project()
    if queue_next_after is not None:
        if run is None:
            raise click.UsageError("--queue-next-after needs RUN")
        outcome = rebuilding_if_needed(project, lambda: chain(project, run, queue_next_after))
    elif after_job is not None:
        outcome = rebuilding_if_needed(project, lambda: advance(project, run, after_job=after_job))
    else:
        outcome = advance(project, run)
    if as_json:
        print_json(outcome)
    else:
        click.echo(f"run {outcome.run}: {outcome.state}: {outcome.reason}")
