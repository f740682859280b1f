"""Chart of balanced batches: batch of each worker, and the time of an iteration beside t*, over the run."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hetctl.model.run_status import BalanceCourse
from hetctl.reports.figures import Tips, draw_svg, time_unit
from hetctl.reports.palette import COLOURS, GREY, INK

MOST_COURSES = 6
"""Members that are drawn, those with the most time gained first."""
ROW_INCHES = 2.3
MOST_NAMED = 8
"""Workers whose names are written at their lines."""


def balance_svg(courses: Sequence[BalanceCourse]) -> str:
    """Draw the courses of members, one row for each, from the first balanced step on."""
    start = min(course.points[0].time for course in courses)
    last_s = max(course.points[-1].time for course in courses) - start
    unit, length = time_unit(last_s)
    height = ROW_INCHES * len(courses) + 0.4

    def draw(figure: Figure, tips: Tips) -> None:
        for row, course in enumerate(courses):
            times = [(point.time - start) / length for point in course.points]
            batches = figure.add_subplot(len(courses), 2, 2 * row + 1)
            _draw_batches(batches, course, times, tips)
            _draw_seconds(figure.add_subplot(len(courses), 2, 2 * row + 2), course, times, tips)
        for axes in figure.axes[-2:]:
            axes.set_xlabel(f"time ({unit})", loc="right")
        figure.subplots_adjust(left=0.05, right=0.985, top=1 - 0.3 / height, bottom=0.48 / height)
        figure.subplots_adjust(wspace=0.13, hspace=0.45)

    return draw_svg("balance", "batch sizes of workers and iteration time, by member", height, draw)


def _draw_batches(axes: Axes, course: BalanceCourse, times: Sequence[float], tips: Tips) -> None:
    for worker, name in enumerate(course.workers):
        sizes = [point.batches[worker] for point in course.points]
        colour = COLOURS[worker % len(COLOURS)]
        (line,) = axes.plot(times, sizes, color=colour, drawstyle="steps-post", marker=_marker(times), ms=3)
        line.set_gid(tips.add(f"{name} · {sizes[0]:,} samples at first, {sizes[-1]:,} at last"))
        if len(course.workers) <= MOST_NAMED:
            axes.annotate(
                name,
                (times[-1], sizes[-1]),
                (3, 0),
                textcoords="offset points",
                size=7,
                color=INK,
                va="center",
            )
    axes.set_title(f"{course.member}: samples of each worker in a step")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.tick_params(length=0)


def _draw_seconds(axes: Axes, course: BalanceCourse, times: Sequence[float], tips: Tips) -> None:
    seconds = [point.iteration_s for point in course.points]
    (line,) = axes.plot(times, seconds, color=COLOURS[0], marker=_marker(times), ms=3)
    line.set_gid(tips.add(f"{course.member} · {course.iteration_s:.4g} s per iteration on average"))
    (bound,) = axes.plot(times, [point.t_star_s for point in course.points], color=GREY, linestyle="--")
    bound.set_gid(tips.add("t*, the least time of any split of the batch, as estimated"))
    axes.set_title(f"seconds of the slowest worker; dashed: t*; gain {course.gain:.2f}")
    axes.set_ylim(bottom=0)
    axes.tick_params(length=0)


def _marker(times: Sequence[float]) -> str:
    """Return a marker for a line of one point, which would be invisible."""
    return "o" if len(times) == 1 else ""
