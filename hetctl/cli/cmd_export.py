"""Command ``export``."""

from __future__ import annotations

from pathlib import Path

import click

from hetctl.cli.completions import complete_members
from hetctl.cli.options import this_project
from hetctl.cli.output import json_option, show, write_text


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
    from hetctl.reports.units import format_bytes

    if len(names) > 2:
        raise click.UsageError("at most RUN and MEMBER can be named")
    if not best and epoch is not None:
        raise click.UsageError("--last and --epoch do not go together")
    project = this_project()
    wanted = epoch or (BEST if best else LAST)
    exported = export(project, names, wanted, output, force=force)
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
    show(fields, lambda: [*lines, *([exported.note] if exported.note else [])])
