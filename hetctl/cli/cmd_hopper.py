"""``hetctl hopper`` and its sub-command."""

from __future__ import annotations

from pathlib import Path

import click

from hetctl.cli.options import run_argument, this_project
from hetctl.cli.output import json_option, show, write_text
from hetctl.cli.parameter_types import OutputFile


@click.group("hopper")
def hopper_command() -> None:
    """Show what members of runs did that hopped over partitioned data.

    \b
    Example: hetctl hopper trace digits-001 -o hops.jsonl
    """


@hopper_command.command("trace")
@run_argument
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=OutputFile(),
    default="hops.jsonl",
    show_default=True,
    help="Write this file.",
)
@json_option
def trace(run: str | None, output: Path) -> None:
    """Write the visits of RUN (default: the newest) as a trace, which --replay repeats.

    \b
    Example: hetctl hopper trace digits-001 -o hops.jsonl
    """
    from hetctl.app.hopper import trace_of_run

    name, lines = trace_of_run(this_project(), run)
    write_text(output, "".join(lines))
    show(
        {"run": name, "path": str(output.resolve()), "visits": len(lines)},
        f"wrote {output}: {len(lines):,} visits of run {name}",
    )
