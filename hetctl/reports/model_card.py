"""Model card of exported weights, in Markdown: what they are, and how they came about."""

from __future__ import annotations

import json
import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hetctl.model.exports import Exported
from hetctl.reports.units import format_bytes

MOST_EPOCHS = 20
"""Rows of the table of metrics; of more epochs some are left out."""


def model_card(exported: Exported) -> str:
    """Return the card: the metrics of the first, the last and the wanted epochs, and of some between."""
    environment = Environment(
        loader=PackageLoader("hetctl.reports", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda value: str(value).replace("|", "\\|")
    history, wanted = exported.history, {exported.epoch, exported.best_epoch, exported.history[-1].epoch}
    every = -(-len(history) // MOST_EPOCHS)
    return environment.get_template("model_card.md.j2").render(
        exported=exported,
        member=exported.member,
        size=format_bytes(exported.bytes),
        facts=_facts(exported),
        config=json.dumps(dict(exported.member.config), indent=2, sort_keys=True),
        names=tuple(next(done for done in history if done.epoch == exported.epoch).metrics),
        shown=[done for at, done in enumerate(history) if at % every == 0 or done.epoch in wanted],
    )


def _facts(exported: Exported) -> dict[str, Any]:
    member, rule = exported.member, exported.member.stop
    return {
        "run": exported.run,
        "framework": exported.framework,
        **exported.functions,
        "command": shlex.join(member.command),
        "data": exported.data,
        "seed": str(member.seed),
        "batch size": member.global_batch_size or member.batch_size,
        "stop rule": f"{rule.metric}, {rule.mode}",
        "best epoch kept": exported.best_epoch,
        "digest of the code": exported.code,
        "git revision": exported.revision,
        "written with": ", ".join(f"{name} {number}" for name, number in exported.versions.items()),
    }
