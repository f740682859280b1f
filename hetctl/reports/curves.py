"""Learning curves, and predicted against measured time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from hetctl.model.run_status import MemberStatus, RunStatus
from hetctl.reports.figures import Tips, draw_svg, time_unit
from hetctl.reports.palette import GREY, INK, RULE, ink_on
from hetctl.reports.summary import prediction_error, ranked
from hetctl.reports.units import format_metric, format_seconds

LOSS = "loss"
BOLD_MEMBERS = 20
BARS = 20
NUMBERED_DOTS = 40
TOLERANCE = 0.2
END_MARKERS = {"converged": "o", "failed": "X"}


def learning_svg(status: RunStatus, colours: Mapping[str, str]) -> str:
    """Draw each stop metric and the training loss over the epochs; a dot ends a converged member."""
    metrics = list(dict.fromkeys([*(member.metric for member in status.members), LOSS]))
    rows = -(-len(metrics) // 2)

    def draw(figure: Figure, tips: Tips) -> None:
        for i, metric in enumerate(metrics):
            _draw_metric(figure.add_subplot(rows, 2, i + 1), status, metric, colours, tips)
        figure.subplots_adjust(left=0.05, right=0.985, top=1 - 0.3 / (3.4 * rows), bottom=0.48 / (3.4 * rows))
        figure.subplots_adjust(wspace=0.13, hspace=0.35)

    return draw_svg("learning", f"{', '.join(metrics)} over epochs, by member", 3.4 * rows, draw)


def _draw_metric(axes: Axes, status: RunStatus, metric: str, colours: Mapping[str, str], tips: Tips) -> None:
    order = ranked(status)
    prominent = {m.member for m in (order or status.members)[:BOLD_MEMBERS]}
    seen: list[float] = []
    for member in sorted(status.members, key=lambda m: m.member in prominent):
        if metric not in (member.metric, LOSS):
            continue
        points = [
            (r.epoch, r.metrics[metric]) for r in status.history.get(member.member, ()) if metric in r.metrics
        ]
        if points:
            _draw_curve(axes, member, points, colours[member.member], member.member in prominent, tips)
            seen += [value for _, value in points]
    positive = bool(seen) and min(seen) > 0
    # A logarithmic axis needs values above 0; on a linear one small losses could not be told apart.
    if metric == LOSS and positive and max(seen) > 20 * min(seen):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title("training loss" if metric == LOSS else metric)
    axes.set_xlabel("epoch", loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(which="both", length=0)


def _draw_curve(
    axes: Axes,
    member: MemberStatus,
    points: Sequence[tuple[int, float]],
    colour: str,
    prominent: bool,
    tips: Tips,
) -> None:
    epochs, values = zip(*points, strict=True)
    width, alpha = (1.7, 1.0) if prominent else (0.7, 0.35)
    tip = f"{member.member} · {member.metric} {format_metric(member.best)} at best · {len(points)} epochs"
    (line,) = axes.plot(epochs, values, color=colour, linewidth=width, alpha=alpha, solid_joinstyle="round")
    line.set_gid(tips.add(tip))
    marker = END_MARKERS.get(member.state, "o" if len(points) == 1 else "")
    if marker and prominent:
        axes.plot(epochs[-1], values[-1], marker, color=colour, markersize=5, markeredgecolor="white")


def comparable(status: RunStatus) -> list[MemberStatus]:
    """Return the members whose measured time is final, so that their prediction can be evaluated."""
    return [
        m for m in status.members if m.state == "converged" and m.predicted_s is not None and m.measured_s
    ]


def accuracy_svg(members: Sequence[MemberStatus], colours: Mapping[str, str]) -> str:
    """Draw predicted against measured time of members, and the worst predictions.

    Parameters
    ----------
    members : sequence of MemberStatus
        Members in the result of `comparable`.
    """

    def draw(figure: Figure, tips: Tips) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
        _draw_scatter(left, members, colours, tips)
        _draw_errors(right, members, colours, tips)
        longest = min(24, max([len(member.member) for member in members], default=0))
        wspace = 0.12 + 0.014 * longest
        figure.subplots_adjust(left=0.05, right=0.97, top=0.92, bottom=0.125, wspace=wspace)

    return draw_svg("accuracy", "predicted against measured time, by member", 3.9, draw)


def _draw_scatter(
    axes: Axes, members: Sequence[MemberStatus], colours: Mapping[str, str], tips: Tips
) -> None:
    times = [(member.predicted_s or 0.0, member.measured_s or 0.0) for member in members]
    most = 1.1 * max([time for pair in times for time in pair], default=1.0)
    unit, length = time_unit(most)
    edge = [0, most / length]
    axes.fill_between(
        edge,
        [0, edge[1] / (1 + TOLERANCE)],
        [0, edge[1] / (1 - TOLERANCE)],
        color=RULE,
        alpha=0.45,
        linewidth=0,
    )
    axes.plot(edge, edge, color=GREY, linewidth=0.8)
    numbers = {member: str(number) for number, member in enumerate(colours, start=1)}
    size = 11 if len(members) <= NUMBERED_DOTS else 6
    for member, (predicted, measured) in zip(members, times, strict=True):
        x, y, colour = predicted / length, measured / length, colours[member.member]
        (dot,) = axes.plot(x, y, "o", color=colour, markersize=size, markeredgecolor="white")
        dot.set_gid(tips.add(_describe(member)))
        if len(members) <= NUMBERED_DOTS:
            number = numbers[member.member]
            axes.text(x, y, number, color=ink_on(colour), size=6.5, ha="center", va="center_baseline")
    axes.set_xlim(*edge)
    axes.set_ylim(*edge)
    axes.set_title(f"measured over predicted time ({unit})")
    axes.set_xlabel("predicted; the band is 20 % to either side", loc="left")
    axes.tick_params(length=0)


def _describe(member: MemberStatus) -> str:
    times = f"predicted {format_seconds(member.predicted_s)}, measured {format_seconds(member.measured_s)}"
    return f"{member.member} · {times} · {_error(member) * 100:+.0f} %"


def _error(member: MemberStatus) -> float:
    return prediction_error(member.predicted_s, member.measured_s) or 0.0


def _draw_errors(axes: Axes, members: Sequence[MemberStatus], colours: Mapping[str, str], tips: Tips) -> None:
    worst = sorted(members, key=lambda member: -abs(_error(member)))[:BARS]
    shown = sorted(worst, key=_error)
    reach = max([abs(_error(member)) * 100 for member in shown], default=0.0) * 1.25 + 5
    for row, member in enumerate(shown):
        error = _error(member) * 100
        (bar,) = axes.barh(row, error, height=0.62, color=colours[member.member])
        bar.set_gid(tips.add(_describe(member)))
        side = 1 if error >= 0 else -1
        axes.text(
            error + side * reach / 90, row, f"{error:+.0f} %", size=8, va="center_baseline",
            ha="left" if error >= 0 else "right",
        )  # fmt: skip
    names = [m.member if len(m.member) <= 24 else f"{m.member[:11]}…{m.member[-12:]}" for m in shown]
    axes.set_yticks(range(len(shown)), names, size=8 if len(shown) > 12 else 9, color=INK)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-0.6, max(len(shown), 6) - 0.4)
    few = len(shown) < len(members)
    axes.set_title(f"error of the prediction, % of measured{f' (the {BARS} largest)' if few else ''}")
    axes.set_xlabel("too short ← 0 → too long", loc="center")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)
