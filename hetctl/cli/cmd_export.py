"""Commands that give a run to others: ``export``, ``ensemble``, ``bundle`` and ``reproduce``."""

from __future__ import annotations

from pathlib import Path

import click

from hetctl.cli.completions import complete_members, complete_runs
from hetctl.cli.options import run_argument, this_project
from hetctl.cli.output import json_option, show, write_text
from hetctl.model.errors import BadInputError
from hetctl.model.exports import AVERAGES, GREEDY, SOUPS
from hetctl.reports.units import format_bytes


@click.command("export")
@click.argument("names", metavar="[RUN] [MEMBER]", nargs=-1, shell_complete=complete_members)
@click.option("--best/--last", default=True, help="Of the best epoch, which is the default, or of the last.")
@click.option("--epoch", metavar="N", type=click.IntRange(min=1), help="Of epoch N.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    required=True,
    help="Write this file, whose ending gives the format, or a file in this folder.",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@json_option
def export_command(names: tuple[str, ...], best: bool, epoch: int | None, output: Path, force: bool) -> None:
    """Write the weights of MEMBER (default: the best) of RUN (default: the newest) for use without hetctl.

    \b
    Example: hetctl export digits-001 cnn -o cnn.pt

    PyTorch: .pt (a state_dict) or .safetensors. Keras: .keras or .weights.h5. Of a command, its own
    checkpoint is copied. FILE.md is a model card.
    """
    from hetctl.app.run.export import export
    from hetctl.model.exports import BEST, LAST
    from hetctl.model.serialization import encode
    from hetctl.reports.model_card import model_card

    if len(names) > 2:
        raise click.UsageError("at most RUN and MEMBER can be named")
    if not best and epoch is not None:
        raise click.UsageError("--last and --epoch do not go together")
    project = this_project()
    exported = export(project, names, epoch or (BEST if best else LAST), output, force=force)
    card = Path(f"{exported.path}.md")
    write_text(card, model_card(exported))
    done = next(each for each in exported.history if each.epoch == exported.epoch)
    fields = {
        **{key: value for key, value in encode(exported).items() if key != "history"},
        "member": exported.member.name,
        "card": str(card),
        "metrics": dict(done.metrics),
    }
    name, metric = exported.member.name, exported.member.stop.metric
    lines = [
        f"wrote {exported.path} ({format_bytes(exported.bytes)}) and {card.name}:"
        f" {name} of {exported.run}, epoch {exported.epoch}, {metric} {done.metrics[metric]:.6g}"
    ]
    show(fields, [*lines, *([exported.note] if exported.note else [])])


@click.command("ensemble")
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option(
    "--soups",
    is_flag=True,
    help="Average weights, too, of members with one shape: their networks run here, without a GPU.",
)
@click.option(
    "--way",
    type=click.Choice([*AVERAGES, *SOUPS]),
    default=GREEDY,
    show_default=True,
    help="Ensemble that -o writes.",
)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write this folder, new."
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@json_option
def ensemble_command(run: str | None, soups: bool, way: str, output: Path | None, force: bool) -> None:
    """Choose and average members of RUN (default: the newest), and show the gain over the best one.

    \b
    Example: hetctl ensemble digits-001 -o digits-ensemble

    Members are chosen by one half of the validation samples and judged by the other, and the other way
    round. The folder has the weights, and `predict.py` with `predict_fn`, which needs no hetctl.
    """
    from hetctl.app.run.combine import combine
    from hetctl.reports.run_tables import ensemble_sections

    show(combine(this_project(), run, way, output, soups=soups, force=force), ensemble_sections)


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

    made = bundle(this_project(), run, output, checkpoints=checkpoints, force=force)
    show(made, f"wrote {made.path} ({format_bytes(made.bytes)}): {len(made.files)} files of {made.run}")


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
    if (rest := len(differ) - MOST_DIFFERENCES) > 0:
        lines.append(f"and {rest} more, which `--json` has")
    if not differ:
        show(found, f"all {found.compared} values of run {found.run} are the same here")
        return
    failure = f"{len(differ)} of {found.compared} values of run {found.run} differ here"
    show(found, lines, BadInputError(failure, "take over what matters"))
