"""Parallel coordinates of a search: a line for each trial, over the keys of its config to its best value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hetctl.model.searches import SearchStatus, TrialStatus
from hetctl.reports.figures import Tips, draw_svg
from hetctl.reports.palette import GREY, RULE
from hetctl.reports.summary import describe_config
from hetctl.reports.units import format_metric

HEIGHT = 3.6
TICKS, MOST_MARKED = 5, 6
"""Labels of an axis, and most values that have one each."""
LOGARITHMIC_FROM = 30.0
"""Least ratio of the largest to the smallest of positive values whose axis is logarithmic."""
COLOURS = colormaps["viridis"]


class Scale:
    """Axis of one key: the height of a value between 0 and 1, and labelled values.

    Parameters
    ----------
    values : sequence
        Values of all trials.
    """

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        self.name = name
        self._height: Callable[[Any], float]
        if all(_is_number(value) for value in values):
            self._of_numbers([float(value) for value in values])
        else:
            self._of_choices(sorted({str(value) for value in values}))

    def height(self, value: Any) -> float:
        """Return the height of a value."""
        return self._height(value)

    def _of_numbers(self, values: list[float]) -> None:
        low, high = min(values), max(values)
        change = math.log if low > 0 and high >= LOGARITHMIC_FROM * low else float
        start, length = change(low), change(high) - change(low)
        self._height = lambda value: (change(float(value)) - start) / length if length else 0.5
        back = math.exp if change is math.log else float
        distinct = sorted(set(values))
        even = [back(start + length * i / (TICKS - 1)) for i in range(TICKS)]
        marks = distinct if len(distinct) <= MOST_MARKED else even
        self.ticks = [(self._height(mark), f"{mark:.3g}") for mark in marks]

    def _of_choices(self, names: list[str]) -> None:
        heights = {name: i / (len(names) - 1) if len(names) > 1 else 0.5 for i, name in enumerate(names)}
        self._height = lambda value: heights[str(value)]
        self.ticks = [(height, name) for name, height in heights.items()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def search_svg(search: SearchStatus) -> str | None:
    """Draw the trials of a search, the best on top; None if configs do not differ."""
    trials, keys = search.measured, search.varied_keys
    if len(trials) < 2 or not keys:
        return None
    scales = [Scale(key, [trial.config[key] for trial in trials]) for key in keys]
    result = Scale(f"best {search.metric}", [trial.best for trial in trials])

    def draw(figure: Figure, tips: Tips) -> None:
        axes = figure.add_subplot()
        _draw_axes(axes, [*scales, result])
        for at, trial in reversed(list(enumerate(trials))):
            heights = [scale.height(trial.config[scale.name]) for scale in scales]
            colour = COLOURS(at / (len(trials) - 1))
            (line,) = axes.plot([*heights, result.height(trial.best)], color=colour, alpha=0.8, linewidth=1.2)
            line.set_gid(tips.add(_tip(trial, search.metric)))
        figure.subplots_adjust(left=0.06, right=0.94, top=0.97, bottom=0.1)

    return draw_svg("trials", f"configs and best {search.metric} of the trials", HEIGHT, draw)


def _draw_axes(axes: Axes, scales: Sequence[Scale]) -> None:
    for at, scale in enumerate(scales):
        axes.axvline(at, color=RULE, linewidth=1.0)
        for height, label in scale.ticks:
            text = axes.annotate(
                label, (at, height), (4, 0), textcoords="offset points", va="center", zorder=3
            )
            text.set(color=GREY, size=8, bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1})
    axes.set_xticks(range(len(scales)), [scale.name for scale in scales])
    axes.set_yticks([])
    axes.set_xlim(-0.05, len(scales) - 0.8)
    axes.set_ylim(-0.05, 1.05)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _tip(trial: TrialStatus, metric: str) -> str:
    best = f"{metric} {format_metric(trial.best)} at best"
    return f"{trial.member} · {best} · {trial.epochs} epochs · {describe_config(trial.config)}"
