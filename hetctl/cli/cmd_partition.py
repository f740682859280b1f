"""``hetctl partition``."""

from __future__ import annotations

from pathlib import Path

import click

from hetctl.cli.options import ensemble_option, json_option, this_project
from hetctl.cli.output import print_json, print_table

MOST_PARTITIONS = 10_000


@click.command("partition")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@ensemble_option
@click.option(
    "--count",
    metavar="N",
    type=click.IntRange(1, MOST_PARTITIONS),
    help="Make N partitions.  [default: as many as in the ensemble file]",
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed random choices.",
)
@click.option(
    "--replicas",
    metavar="K",
    type=click.IntRange(1),
    help="Have each job copy each partition to the own disks of K nodes.",
)
@json_option
def command(
    folder: Path, ensemble: str | None, count: int | None, seed: int, replicas: int | None, as_json: bool
) -> None:
    """Shuffle the samples of input_fn(data), and divide them into partitions in FOLDER.

    \b
    Example: hetctl partition data/partitions --count 16

    Prints the lines for the ensemble file. Existing partitions are kept.
    """
    from hetctl.app.partition_data import partition_data

    made = partition_data(this_project().ensemble(ensemble), folder, count, seed, replicas)
    if as_json:
        print_json(made)
        return
    from hetctl.reports.partition_files_table import ensemble_lines, partition_files_table

    print_table(partition_files_table(made.files, made.written))
    click.echo(f"\nfor the ensemble file:\n{ensemble_lines(made.samples, made.partitions)}")
