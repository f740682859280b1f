"""Commands of a project: ``init``, ``partition``, ``catalog``, ``schema`` and ``completion``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from hetctl.cli.options import ensemble_option, this_project
from hetctl.cli.output import json_option, show


@click.command("init")
@click.argument("folder", type=click.Path(path_type=Path), default=".")
@click.option(
    "--example",
    metavar="NAME",
    help="Copy this example.  [default: that of FOLDER's name, or one that trains with what is installed]",
)
def init_command(folder: Path, example: str | None) -> None:
    """Create a project in FOLDER, by default this one, from an example.

    \b
    Example: hetctl init demo --example digits
    """
    from hetctl.app.project import start_project

    for path in start_project(folder, example):
        click.echo(f"wrote {path}")
    enter = "" if folder.samefile(".") else f"cd {shlex.quote(str(folder))}; "
    click.echo(f"next: {enter}hetctl submit --wait")


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
def partition_command(
    folder: Path, ensemble: str | None, count: int | None, seed: int, replicas: int | None
) -> None:
    """Shuffle the samples of input_fn(data), and divide them into partitions in FOLDER.

    \b
    Example: hetctl partition data/partitions --count 16

    Prints the lines for the ensemble file. Existing partitions are kept.
    """
    from hetctl.app.partition_data import partition_data
    from hetctl.reports.setup_tables import ensemble_lines, partition_files_table

    made = partition_data(this_project().ensemble(ensemble), folder, count, seed, replicas)
    lines = f"\nfor the ensemble file:\n{ensemble_lines(made.samples, made.partitions)}"
    show(made, lambda _: [partition_files_table(made.files, made.written), lines])


@click.group("catalog")
def catalog_command() -> None:
    """Make the catalog of a project anew.

    \b
    Example: hetctl catalog rebuild
    """


@catalog_command.command("rebuild")
@json_option
def rebuild() -> None:
    """Make the catalog anew from its newest sound copy and the files of runs and profiling jobs.

    \b
    Example: hetctl catalog rebuild

    Jobs that are queued or running go on, and none is submitted twice.
    """
    from hetctl.app.rebuild_catalog import rebuild_catalog

    done = rebuild_catalog(this_project())
    lines = [
        f"rebuilt {done.path}, beginning with {done.beginning or 'an empty one'}",
        f"runs: {', '.join(done.runs) or 'none'}; profiling jobs: {done.profiles}",
        *([f"the catalog before is kept as {done.replaced}"] if done.replaced else []),
    ]
    show(done, lines)


@click.command("schema")
@click.argument("kind", type=click.Choice(["ensemble", "site"]))
def schema_command(kind: str) -> None:
    """Print the JSON Schema of ensemble or site files, for checks in editors.

    \b
    Example: hetctl schema ensemble > ensemble.schema.json
    """
    from hetctl.inputs.ensemble_file import ensemble_schema
    from hetctl.inputs.site_file import site_schema

    click.echo(json.dumps({"ensemble": ensemble_schema, "site": site_schema}[kind](), indent=2))


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(context: click.Context, /, shell: str) -> None:
    """Print the script with which a shell completes commands, options, runs, members and sites.

    \b
    Example: hetctl completion bash > ~/.local/share/bash-completion/completions/hetctl
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "hetctl", "_HETCTL_COMPLETE").source())
