"""Model card of exported weights, in Markdown: what they are, and how they came about."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence

from hetctl.model.exports import Exported
from hetctl.model.training_progress import EpochResult
from hetctl.reports.units import format_bytes

MOST_EPOCHS = 20
"""Rows of the table of metrics; of more epochs some are left out."""


def model_card(exported: Exported) -> str:
    """Return the card."""
    return "\n".join(_lines(exported)) + "\n"


def _lines(exported: Exported) -> Iterator[str]:
    member = exported.member
    done = next(each for each in exported.history if each.epoch == exported.epoch)
    yield f"# {member.name}, epoch {exported.epoch}"
    yield ""
    yield f"`{exported.path.rpartition('/')[2]}`, {format_bytes(exported.bytes)}, trained by hetctl."
    if exported.note:
        yield f"Note: {exported.note}."
    yield ""
    yield from _table(("", ""), [(name, f"`{value}`") for name, value in _facts(exported) if value])
    yield ""
    yield "## Config"
    yield ""
    yield "```json"
    yield json.dumps(dict(member.config), indent=2, sort_keys=True)
    yield "```"
    yield ""
    yield "## Metrics"
    yield ""
    names = tuple(done.metrics)
    rows = [
        (
            f"**{each.epoch}**" if each.epoch == done.epoch else str(each.epoch),
            *(_number(each, name) for name in names),
        )
        for each in _shown(exported.history, {exported.epoch, exported.best_epoch})
    ]
    yield from _table(("epoch", *names), rows)


def _facts(exported: Exported) -> Iterator[tuple[str, str]]:
    member, rule = exported.member, exported.member.stop
    yield "run", exported.run
    yield "framework", exported.framework
    yield from exported.functions.items()
    yield "command", shlex.join(member.command)
    yield "data", exported.data or ""
    yield "seed", str(member.seed)
    yield "batch size", str(member.global_batch_size or member.batch_size)
    yield "stop rule", f"{rule.metric}, {rule.mode}"
    yield "best epoch kept", "" if exported.best_epoch is None else str(exported.best_epoch)
    yield "digest of the code", exported.code
    yield "git revision", exported.revision
    yield "written with", ", ".join(f"{name} {number}" for name, number in exported.versions.items())


def _shown(history: Sequence[EpochResult], wanted: set[int | None]) -> Iterator[EpochResult]:
    """Yield the first, the last and the wanted epochs, and some between them."""
    every = -(-len(history) // MOST_EPOCHS)
    for place, done in enumerate(history):
        if place % every == 0 or place == len(history) - 1 or done.epoch in wanted:
            yield done


def _number(done: EpochResult, name: str) -> str:
    return repr(float(done.metrics[name])) if name in done.metrics else ""


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
