"""Commands ``bundle`` and ``reproduce``."""

from __future__ import annotations

from pathlib import Path

import click

from hetctl.cli.options import run_argument, this_project
from hetctl.cli.output import json_option, show
from hetctl.model.errors import BadInputError

MOST_DIFFERENCES = 50


@click.command("bundle")
@run_argument
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write this zip archive.  [default: RUN.crate.zip]",
)
@click.option("--checkpoints", is_flag=True, help="Include the checkpoint of each member's best epoch.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@json_option
def bundle_command(run: str | None, output: Path | None, checkpoints: bool, force: bool) -> None:
    """Write RUN (default: the newest) into an archive for others: an RO-Crate of its files.

    \b
    Example: hetctl bundle digits-001

    It has the specification, code, curves and results, digests of the data, and versions of packages.
    """
    from hetctl.app.run.bundle import bundle
    from hetctl.reports.units import format_bytes

    made = bundle(this_project(), run, output, checkpoints=checkpoints, force=force)
    show(
        made, lambda: f"wrote {made.path} ({format_bytes(made.bytes)}): {len(made.files)} files of {made.run}"
    )


@click.command("reproduce")
@click.argument("file", metavar="BUNDLE", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--check",
    is_flag=True,
    required=True,
    expose_value=False,
    help="Compare code, data and packages in this folder with those of the bundle.",
)
@json_option
def reproduce_command(file: Path) -> None:
    """Tell what differs here from a bundle of a run; train with `hetctl submit`.

    \b
    Example: hetctl reproduce --check digits-001.crate.zip
    """
    from hetctl.app.run.bundle import check_bundle

    found = check_bundle(this_project(), file)
    differ = found.differences
    lines = [
        f"{each.what}: {each.bundled} in the bundle, {each.here or 'none'} here"
        for each in differ[:MOST_DIFFERENCES]
    ]
    rest = len(differ) - MOST_DIFFERENCES
    failure = BadInputError(
        f"{len(differ)} of {found.compared} values of run {found.run} differ here", "take over what matters"
    )
    show(
        found,
        lambda: [
            *lines,
            *([f"and {rest} more, which `--json` has"] if rest > 0 else []),
            *([] if differ else [f"all {found.compared} values of run {found.run} are the same here"]),
        ],
        failure if differ else None,
    )
