"""Table of ensembles of trained members: what they reach, and what they gain over the best member."""

from __future__ import annotations

from collections.abc import Mapping

from hetctl.model.ensemble_results import BEST_MEMBER, Combination, EnsembleResult
from hetctl.model.profile import some_of
from hetctl.reports.sections import Note, Section
from hetctl.reports.units import NONE, format_metric

MOST_NAMED = 4
"""Members that a cell names."""
JUDGED = "judged by samples that had no part in the choice; 95 % by the paired bootstrap over them"


def ensemble_sections(found: EnsembleResult) -> list[Section]:
    """Return the table."""
    has_loss = any(one.loss is not None for one in found.combinations)
    headers = ("ensemble", f">{found.metric}", ">gain", ">95 %", "members")
    losses = (">log-loss", ">scaled\nlog-loss") if has_loss else ()
    rows = [(*_row(one)[:4], *(_losses(one) if has_loss else ()), _row(one)[4]) for one in found.combinations]
    notes: list[Note] = [(JUDGED, "dim")]
    if found.left_out:
        names = [f"{name} ({reason})" for name, reason in found.left_out.items()]
        notes += [(f"left out: {some_of(names, MOST_NAMED)}", "yellow")]
    if found.path is not None:
        notes += [(f"wrote {found.path}: from predict import predict_fn", "")]
    return [
        Section(
            f"run {found.run}: {len(found.candidates)} members, {found.samples:,} validation samples",
            headers=(*headers[:4], *losses, headers[4]),
            rows=rows,
            fold=("ensemble", "members"),
            notes=notes,
        )
    ]


def _row(one: Combination) -> tuple[str, ...]:
    gain, interval = NONE, NONE
    if one.gain is not None:
        gain = f"{one.gain.mean:+.4f}"
        interval = f"{one.gain.low:+.4f} .. {one.gain.high:+.4f}"
    return one.way, format_metric(one.value), gain, interval, _named(one.way, one.weights)


def _losses(one: Combination) -> tuple[str, ...]:
    return format_metric(one.loss), format_metric(one.scaled_loss)


def _named(way: str, weights: Mapping[str, float]) -> str:
    ordered = sorted(weights, key=lambda name: -weights[name])
    if way == BEST_MEMBER:
        return ordered[0]
    return some_of([f"{name} {weights[name]:.2g}" for name in ordered], MOST_NAMED)
