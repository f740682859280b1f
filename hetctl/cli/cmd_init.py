"""``hetctl init``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click


@click.command("init")
@click.argument("folder", type=click.Path(path_type=Path), default=".")
@click.option("--example", metavar="NAME", default="digits", show_default=True, help="Copy this example.")
def command(folder: Path, example: str) -> None:
    """Create a project in FOLDER, by default this one, from an example.

    \b
    Example: hetctl init demo --example digits
    """
    from hetctl.app.project import start_project

    paths = start_project(folder, example)
    for path in paths:
        click.echo(f"wrote {path}")
    rates = "profile import rates.csv" if folder / "rates.csv" in paths else "profile"
    enter = "" if folder.samefile(".") else f"cd {shlex.quote(str(folder))}; "
    click.echo(f"next: {enter}hetctl {rates}")
