"""Chart of a pipeline's stages: the shares of their time in passes, in waits for waves, and idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from hetctl.model.pipelines import PipelineEpoch, StageReport
from hetctl.reports.figures import Tips, draw_svg
from hetctl.reports.palette import COLOURS, IDLE, RULE
from hetctl.reports.units import format_percent, format_seconds

MOST_PIPELINES = 6
"""Members whose stages are drawn."""
MOST_DRAWN = 64
"""Stages of a member that are drawn."""
ROW_INCHES = 0.24
PARTS: dict[str, tuple[str, Callable[[StageReport], float]]] = {
    "forward": (COLOURS[1], lambda stage: stage.forward_s),
    "backward": (COLOURS[0], lambda stage: stage.backward_s),
    "waiting for waves": (COLOURS[4], lambda stage: stage.wave_wait_s),
    "idle": (IDLE, lambda stage: stage.idle_s),
}
"""Parts of a stage's time in the order of a bar, with colours, and their seconds."""


def stage_svg(number: int, member: str, epoch: PipelineEpoch) -> str:
    """Draw a horizontal bar for each stage, those of a virtual worker together, the first on top.

    Parameters
    ----------
    number : int
        Number of the figure in the page.
    """
    stages = epoch.stages[:MOST_DRAWN]
    height = ROW_INCHES * (len(stages) + 0.5 * stages[-1].virtual_worker) + 0.45

    def draw(figure: Figure, tips: Tips) -> None:
        axes = figure.add_subplot()
        _draw_bars(axes, stages, tips)
        figure.subplots_adjust(left=0.22, right=0.985, top=1 - 0.05 / height, bottom=0.4 / height)

    return draw_svg(f"stages-{number}", f"shares of time of {member}, by stage", height, draw)


def _draw_bars(axes: Axes, stages: Sequence[StageReport], tips: Tips) -> None:
    rows = [at + 0.5 * stage.virtual_worker for at, stage in enumerate(stages)]
    for row, stage in zip(rows, stages, strict=True):
        left = 0.0
        for part, (colour, seconds_of) in PARTS.items():
            seconds = seconds_of(stage)
            share = seconds / (stage.total_s or 1.0)
            (bar,) = axes.barh(row, share, 0.8, left, color=colour, edgecolor=RULE, linewidth=0.4)
            bar.set_gid(
                tips.add(f"{stage.worker} · {part} {format_percent(share)}, {format_seconds(seconds)}")
            )
            left += share
    axes.set_yticks(rows, [_label(stage) for stage in stages])
    axes.set_ylim(rows[-1] + 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="y")
    axes.tick_params(length=0)


def _label(stage: StageReport) -> str:
    first, last = stage.layers
    return f"{stage.virtual_worker}.{stage.stage} · {stage.worker} · layers {first}..{last}"
