"""Terminal output of hops: their duration, distance from the bound, and cost by mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.report.table_style import ruled_table
from hetctl.report.units import format_percent, format_seconds, printable


@dataclass(frozen=True)
class HopperFigures:
    """Figures of a schedule of hops, or of its simulation; ``--json`` prints exactly these.

    Parameters
    ----------
    mode : str
        Mode of training: ``hopper``, ``hybrid`` or ``data-parallel``.
    configs, partitions, workers : int
        Numbers of each; groups of workers that train together count as one.
    makespan_s, lower_bound_s : float
        Times of all epochs, in seconds.
    ratio : float
        Makespan divided by the bound; 1 is optimal.
    gpu_busy_fraction : float
        Share of all workers' time until the makespan that was spent on completed units.
    lost_s : float
        Seconds of units whose results were lost by failures of workers, over all workers.
    plan_seconds : float
        Time that the scheduler took, in seconds.
    prices : mapping of str to float
        Planned makespan of an epoch in seconds, by mode, of all modes considered.
    """

    scheduler: str
    mode: str
    configs: int
    partitions: int
    workers: int
    epochs: int
    seed: int
    makespan_s: float
    lower_bound_s: float
    ratio: float
    gpu_busy_fraction: float
    lost_s: float
    plan_seconds: float
    prices: Mapping[str, float] = field(default_factory=dict)


def hopper_table(figures: HopperFigures) -> RenderableType:
    """Return a table of the figures."""
    table = ruled_table(
        ">makespan", ">lower\nbound", ">ratio", ">workers\nbusy", ">undone by\nfailures", ">planning", gap=1
    )
    table.add_row(
        format_seconds(figures.makespan_s),
        format_seconds(figures.lower_bound_s),
        f"{figures.ratio:.3f}",
        format_percent(figures.gpu_busy_fraction),
        format_seconds(figures.lost_s),
        f"{figures.plan_seconds:.3g} s",
    )
    parts: list[RenderableType] = [Text(printable(headline(figures)), "bold"), Text(), table]
    if len(figures.prices) > 1:
        prices = ", ".join(f"{mode} {format_seconds(price)}" for mode, price in figures.prices.items())
        parts += [Text(), Text(f"an epoch by mode: {prices}")]
    return Group(*parts)


def headline(figures: HopperFigures) -> str:
    """Return a description of the scheduled work and the scheduler."""
    counts = [(figures.configs, "configuration"), (figures.partitions, "partition")]
    counts += [(figures.workers, "worker"), (figures.epochs, "epoch")]
    words = [f"{count:,} {word}{'s' * (count != 1)}" for count, word in counts]
    what = f"{figures.scheduler}: {words[0]} on {words[1]} and {words[2]}, {words[3]}"
    return what if figures.mode == "hopper" else f"{what}, {figures.mode}"
