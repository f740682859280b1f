"""Hops in the terminal: how long, how near to the limit, at what price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.report.table_style import ruled_table
from hetctl.report.units import format_percent, format_seconds, printable


@dataclass(frozen=True)
class HopperFigures:
    """What a schedule of hops, or its simulation, came to; ``--json`` prints just this.

    Parameters
    ----------
    mode : str
        ``hopper``, ``hybrid`` or ``data-parallel``.
    configs, partitions, workers : int
        How many; groups of workers that train together count as one.
    makespan_s, lower_bound_s : float
        Seconds of all epochs.
    ratio : float
        The makespan over the bound; 1 is the limit.
    gpu_busy_fraction : float
        Seconds of units that were done, over all workers' until the makespan.
    lost_s : float
        Of units that a worker's failure undid, over all workers.
    plan_seconds : float
        What the scheduler took.
    prices : mapping of str to float
        Planned makespan of an epoch by mode, of all that were looked at.
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
    """Show the figures."""
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
    """Say what was scheduled, and how."""
    counts = [(figures.configs, "configuration"), (figures.partitions, "partition")]
    counts += [(figures.workers, "worker"), (figures.epochs, "epoch")]
    words = [f"{count:,} {word}{'s' * (count != 1)}" for count, word in counts]
    what = f"{figures.scheduler}: {words[0]} on {words[1]} and {words[2]}, {words[3]}"
    return what if figures.mode == "hopper" else f"{what}, {figures.mode}"
