"""Charts of a run: learning curves, times, balanced batches, hops, stages, and the trials of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from hetctl.model.hops import DONE, HopStatus, slots_in
from hetctl.model.pipelines import PipelineEpoch, StageReport
from hetctl.model.plan import USUAL_PLANNER
from hetctl.model.run_status import (
    BalanceHistory,
    Comparison,
    MemberStatus,
    RunStatus,
    TaskSpan,
    TimeShares,
)
from hetctl.model.searches import SearchStatus, TrialStatus
from hetctl.model.training_progress import EpochResult
from hetctl.model.values import dataclass
from hetctl.reports.figures import Tips, draw_svg, is_narrow, panels, set_margins, shortened, time_unit
from hetctl.reports.gantt import HOPS, gantt_section
from hetctl.reports.sections import Section
from hetctl.reports.style import COLOURS, GREY, IDLE, INK, RULE, colours_of, ink_on
from hetctl.reports.summary import Spans, describe_config, one_round, prediction_error, ranked
from hetctl.reports.units import device_word, format_metric, format_percent, format_seconds

LOSS = "loss"
BOLD_MEMBERS = 20
BARS = 20
NUMBERED_DOTS = 40
TOLERANCE = 0.2
CLUSTER_COLOURS = (RULE, COLOURS[13])
"""Colours of the baseline and of `fluid`."""
END_MARKERS = {"converged": "o", "failed": "X"}


@dataclass(frozen=True)
class _Axis:
    """Horizontal axis of curves.

    Parameters
    ----------
    label : str
        Its name, with the unit.
    places : callable
        Function that returns the places of a member's epochs.
    """

    label: str
    places: Callable[[MemberStatus, Sequence[EpochResult]], Sequence[float]]


def _axes_of(status: RunStatus) -> dict[str, _Axis]:
    """Return the axes of learning curves by name."""
    histories = [history for history in status.history.values() if history]
    start = min(done.finished_at - done.duration_s for history in histories for done in history[:1])
    unit, length = time_unit(max(history[-1].finished_at for history in histories) - start)
    found = {
        "epochs": _Axis("epoch", lambda _, history: [done.epoch for done in history]),
        "time": _Axis(
            f"time since the first epoch began ({unit})",
            lambda _, history: [(done.finished_at - start) / length for done in history],
        ),
    }
    if all(member.samples_per_epoch for member in status.members if status.history.get(member.member)):
        found["samples"] = _Axis(
            "samples",
            lambda member, history: [done.epoch * (member.samples_per_epoch or 0) for done in history],
        )
    hours = f"{device_word(status.device, 1)}-hours"
    found[hours] = _Axis(
        f"{hours} of training",
        lambda member, history: list(accumulate(_gpu_hours(member, history))),
    )
    return found


def _gpu_hours(member: MemberStatus | None, history: Sequence[EpochResult]) -> list[float]:
    """Return the GPU-hours of each epoch; of those on shared GPUs, parts of what the member used there."""
    whole_s = [done.gpus * done.duration_s for done in history]
    shared_s = math.fsum(done.duration_s for done in history if not done.gpus)
    used_s = 0.0 if member is None else max(0.0, member.gpu_seconds - math.fsum(whole_s))
    share = min(1.0, used_s / shared_s) if shared_s else 0.0
    return [(done.gpus or share) * done.duration_s / 3600 for done in history]


MOST_POINTS = 20_000
"""Largest number of epochs that are drawn over all axes: each is a chart of its own."""


def learning_svgs(status: RunStatus, colours: Mapping[str, str], prefix: str = "") -> dict[str, str]:
    """Draw each stop metric and the training loss over each axis; a dot ends a converged member.

    Parameters
    ----------
    prefix : str
        Beginning of the figures' names, which keeps those of several runs apart in a page.
    """
    reported = {metric for epochs in status.history.values() for epoch in epochs for metric in epoch.metrics}
    wanted = dict.fromkeys([*(member.metric for member in status.members), LOSS])
    metrics = [metric for metric in wanted if metric in reported]

    def drawn(name: str, axis: _Axis) -> str:
        def draw(figure: Figure, tips: Tips) -> None:
            for axes, metric in zip(panels(figure, len(metrics), 3.4), metrics, strict=True):
                _draw_metric(axes, status, metric, colours, tips, axis)
            set_margins(figure, 0.56, 0.17, 0.3, 0.48, (0.13, 0.35))

        title = f"{', '.join(metrics)} over {name}, by member"
        return draw_svg(f"{prefix}learning-{name}", title, 3.4, draw)

    axes = _axes_of(status)
    few = sum(map(len, status.history.values())) <= MOST_POINTS
    return {name: drawn(name, axis) for name, axis in axes.items() if few or name == next(iter(axes))}


def _draw_metric(
    axes: Axes, status: RunStatus, metric: str, colours: Mapping[str, str], tips: Tips, axis: _Axis
) -> None:
    order = ranked(status)
    prominent = {m.member for m in (order or status.members)[:BOLD_MEMBERS]}
    seen: list[float] = []
    for member in sorted(status.members, key=lambda m: m.member in prominent):
        if metric not in (member.metric, LOSS):
            continue
        history = status.history.get(member.member, ())
        places = zip(axis.places(member, history), history, strict=True)
        points = [(place, done.metrics[metric]) for place, done in places if metric in done.metrics]
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
    axes.set_xlabel(axis.label, loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(integer=axis.label == "epoch"))


def _draw_curve(
    axes: Axes,
    member: MemberStatus,
    points: Sequence[tuple[float, float]],
    colour: str,
    prominent: bool,
    tips: Tips,
) -> None:
    places, values = zip(*points, strict=True)
    width, alpha = (1.7, 1.0) if prominent else (0.7, 0.35)
    tip = f"{member.member} · {member.metric} {format_metric(member.best)} at best · {len(points)} epochs"
    (line,) = axes.plot(places, values, color=colour, linewidth=width, alpha=alpha, solid_joinstyle="round")
    line.set_gid(tips.add(tip))
    marker = END_MARKERS.get(member.state, "o" if len(points) == 1 else "")
    if marker and prominent:
        axes.plot(places[-1], values[-1], marker, color=colour, markersize=5, markeredgecolor="white")


def best_so_far(status: RunStatus, metric: str, mode: str, axis: str) -> list[tuple[float, float]]:
    """Return places at which the best value of all members became better, and the values.

    Parameters
    ----------
    axis : str
        `TIME`, in seconds since the first epoch began, or `HOURS`, of all GPUs in training.
    """
    rows = {member.member: member for member in status.members}
    done = sorted(
        (
            (each, used_h)
            for name, history in status.history.items()
            for each, used_h in zip(history, _gpu_hours(rows.get(name), history), strict=True)
            if metric in each.metrics
        ),
        key=lambda one: one[0].finished_at,
    )
    start = min((each.finished_at - each.duration_s for each, _ in done), default=0.0)
    found: list[tuple[float, float]] = []
    hours = 0.0
    for each, used_h in done:
        hours += used_h
        value, place = each.metrics[metric], each.finished_at - start if axis == TIME else hours
        if not found or (value > found[-1][1] if mode == "max" else value < found[-1][1]):
            found.append((place, value))
    return (
        [*found, (done[-1][0].finished_at - start if axis == TIME else hours, found[-1][1])] if found else []
    )


TIME, HOURS = "time", "hours"


def best_so_far_svgs(statuses: Sequence[RunStatus], metric: str, mode: str) -> dict[str, str]:
    """Draw the best value so far of each run over time and over the hours of its GPUs."""
    colours = colours_of(status.run for status in statuses)
    hours = f"{device_word(statuses[0].device, 1)}-hours"
    lines = {
        name: {status.run: best_so_far(status, metric, mode, axis) for status in statuses}
        for name, axis in (("time", TIME), (hours, HOURS))
    }
    unit, length = time_unit(max([line[-1][0] for line in lines["time"].values() if line], default=0.0))

    def drawn(name: str, label: str, scale: float) -> str:
        def draw(figure: Figure, tips: Tips) -> None:
            axes = figure.add_subplot()
            for run, line in lines[name].items():
                if line:
                    places, values = [place / scale for place, _ in line], [value for _, value in line]
                    (drawn,) = axes.plot(places, values, color=colours[run], drawstyle="steps-post")
                    drawn.set_gid(tips.add(f"{run} · {metric} {format_metric(values[-1])} at best"))
            axes.set_title(f"best {metric} so far")
            axes.set_xlabel(label, loc="right")
            set_margins(figure, 0.67, 0.17, 0.28, 0.48)

        return draw_svg(f"best-{name}", f"best {metric} so far over {name}, by run", 2.8, draw)

    return {
        "time": drawn("time", f"time since the first epoch began ({unit})", length),
        hours: drawn(hours, f"{hours} of training", 1.0),
    }


SHARES: dict[str, tuple[str, Callable[[TimeShares], float]]] = {
    "start, imports": (COLOURS[4], lambda one: one.startup_s),
    "steps": (COLOURS[0], lambda one: one.steps_s),
    "waiting for data": (COLOURS[2], lambda one: one.data_s),
    "evaluation": (COLOURS[1], lambda one: one.evaluate_s),
    "waiting for checkpoints": (COLOURS[6], lambda one: one.save_s),
    "rest": (IDLE, lambda one: one.rest_s),
}
"""Parts of a member's time in tasks in the order of a bar, with colours, and their seconds."""
MOST_SHARES = 40
"""Members whose time is divided in the chart."""


def shares_svg(shares: Sequence[TimeShares]) -> str:
    """Draw a bar for each member, the longest first, with the parts of its time."""
    shown = sorted(shares, key=lambda one: -one.total_s)[:MOST_SHARES]
    unit, length = time_unit(max(one.total_s for one in shown))
    height = 0.6 + 0.26 * len(shown)

    def draw(figure: Figure, tips: Tips) -> None:
        axes = figure.add_subplot()
        for row, one in enumerate(shown):
            seconds = {part: (colour, of(one)) for part, (colour, of) in SHARES.items()}
            _draw_bar(axes, row, one.member, seconds, length, tips)
        axes.set_yticks(range(len(shown)), [shortened(one.member) for one in shown], size=8, color=INK)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlabel(f"time in tasks ({unit})", loc="right")
        axes.grid(visible=False, axis="y")
        set_margins(figure, 1.9, 0.17, 0.05, 0.45)

    return draw_svg("shares", "parts of the time in tasks, by member", height, draw)


def _draw_bar(
    axes: Axes, row: float, name: str, parts: Mapping[str, tuple[str, float]], unit_s: float, tips: Tips
) -> None:
    """Draw parts of a time side by side, from colours and seconds by part; the axis is in `unit_s`."""
    left, total_s = 0.0, math.fsum(seconds for _, seconds in parts.values())
    for part, (colour, seconds) in parts.items():
        width = seconds / unit_s
        (bar,) = axes.barh(row, width, 0.8, left, color=colour, edgecolor=RULE, linewidth=0.4)
        share = format_percent(seconds / (total_s or 1.0))
        bar.set_gid(tips.add(f"{name} · {part} {format_seconds(seconds)}, {share}"))
        left += width


def clusters_svg(comparison: Comparison) -> str:
    """Draw the simulated times on each cluster: with the baseline, and with `fluid`."""
    clusters = comparison.clusters
    unit, length = time_unit(max(max(one.baseline_s, one.fluid_s) for one in clusters))

    def draw(figure: Figure, tips: Tips) -> None:
        axes = figure.add_subplot()
        for row, one in enumerate(clusters):
            for offset, planner, seconds in (
                (-0.2, comparison.baseline, one.baseline_s),
                (0.2, USUAL_PLANNER, one.fluid_s),
            ):
                (bar,) = axes.barh(row + offset, seconds / length, 0.36, color=CLUSTER_COLOURS[offset > 0])
                bar.set_gid(tips.add(f"{one.gpus} GPUs · {planner} · {format_seconds(seconds)}"))
                text = f"{format_seconds(seconds)} · {planner}"
                if offset > 0:
                    text += f" · {one.baseline_s / seconds:.2f} times as fast"
                end = (seconds / length, row + offset)
                axes.annotate(text, end, (5, 0), textcoords="offset points", va="center", color=INK)
        labels = [f"{one.nodes} x {one.gpus // one.nodes} GPUs" for one in clusters]
        axes.set_yticks(range(len(clusters)), labels)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        # Labels stand to the right of the bars.
        axes.set_xlim(0, (2.6 if is_narrow(figure) else 1.35) * axes.get_xlim()[1])
        axes.set_xlabel(unit, loc="right")
        set_margins(figure, 0.84, 0.17, 0.07, 0.4)

    height = 0.5 + 0.66 * len(clusters)
    return draw_svg("clusters", "simulated times on clusters, by planner", height, draw)


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
        names_in = 0.6 + 0.06 * min(24, max([len(member.member) for member in members], default=0))
        if is_narrow(figure):
            figure.set_figheight(7.4)
            scatter, errors = figure.subplots(2, 1)
            set_margins(figure, names_in, 0.3, 0.3, 0.48, (0, 0.3))
        else:
            scatter, errors = figure.subplots(1, 2, width_ratios=(1, 1.25))
            set_margins(figure, 0.56, 0.34, 0.3, 0.48, (names_in / 4.6, 0))
        _draw_scatter(scatter, members, colours, tips)
        _draw_errors(errors, members, colours, tips)

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
    names = [shortened(member.member) for member in shown]
    axes.set_yticks(range(len(shown)), names, size=8 if len(shown) > 12 else 9, color=INK)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-0.6, max(len(shown), 6) - 0.4)
    few = len(shown) < len(members)
    axes.set_title(f"error of the prediction, % of measured{f' (the {BARS} largest)' if few else ''}")
    axes.set_xlabel("too short ← 0 → too long", loc="center")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


MOST_HISTORIES = 6
"""Members that are drawn, those with the most time gained first."""
HISTORY_INCHES = 2.3
MOST_NAMED = 8
"""Workers whose names are written at their lines."""


def balance_svg(histories: Sequence[BalanceHistory]) -> str:
    """Draw the histories of members, one row for each, from the first balanced step on."""
    start = min(history.points[0].time for history in histories)
    last_s = max(history.points[-1].time for history in histories) - start
    unit, length = time_unit(last_s)

    def draw(figure: Figure, tips: Tips) -> None:
        shown = panels(figure, 2 * len(histories), HISTORY_INCHES + 0.4 / len(histories))
        for history, batches, seconds in zip(histories, shown[::2], shown[1::2], strict=True):
            times = [(point.time - start) / length for point in history.points]
            _draw_batches(batches, history, times, tips)
            _draw_seconds(seconds, history, times, tips)
        for axes in shown[-2:]:
            axes.set_xlabel(f"time ({unit})", loc="right")
        set_margins(figure, 0.56, 0.17, 0.3, 0.48, (0.13, 0.45))

    return draw_svg("balance", "batch sizes of workers and iteration time, by member", HISTORY_INCHES, draw)


def _draw_batches(axes: Axes, history: BalanceHistory, times: Sequence[float], tips: Tips) -> None:
    for worker, name in enumerate(history.workers):
        sizes = [point.batches[worker] for point in history.points]
        colour = COLOURS[worker % len(COLOURS)]
        (line,) = axes.plot(times, sizes, color=colour, drawstyle="steps-post", marker=_marker(times), ms=3)
        line.set_gid(tips.add(f"{name} · {sizes[0]:,} samples at first, {sizes[-1]:,} at last"))
        if len(history.workers) <= MOST_NAMED:
            axes.annotate(
                name,
                (times[-1], sizes[-1]),
                (3, 0),
                textcoords="offset points",
                size=7,
                color=INK,
                va="center",
            )
    axes.set_title(f"{history.member}: samples of each worker in a step")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _draw_seconds(axes: Axes, history: BalanceHistory, times: Sequence[float], tips: Tips) -> None:
    seconds = [point.iteration_s for point in history.points]
    (line,) = axes.plot(times, seconds, color=COLOURS[0], marker=_marker(times), ms=3)
    line.set_gid(tips.add(f"{history.member} · {history.iteration_s:.4g} s per iteration on average"))
    (bound,) = axes.plot(times, [point.t_star_s for point in history.points], color=GREY, linestyle="--")
    bound.set_gid(tips.add("t*, the least time of any split of the batch, as estimated"))
    axes.set_title(f"seconds of the slowest worker; dashed: t*; gain {history.gain:.2f}")
    axes.set_ylim(bottom=0)


def _marker(times: Sequence[float]) -> str:
    """Return a marker for a line of one point, which is invisible without one."""
    return "o" if len(times) == 1 else ""


MOST_VISITS = 20_000
"""Largest number of visits in a chart; more would be neither readable nor quick to load."""


def hop_section(hops: HopStatus, colours: Mapping[str, str]) -> Section:
    """Draw the visits by worker over time, unless there are none or too many for a chart."""
    title = "Workers over time"
    if not 0 < len(hops.spans) <= MOST_VISITS:
        return Section(
            title,
            f"{len(hops.spans):,} visits: there is no chart of none, or of more than {MOST_VISITS:,};"
            " hetctl hopper trace writes them to a file.",
        )
    end_s = max(visit.ended_at for visit in hops.spans)
    # A visit to a group fills the row of each of its GPUs.
    tasks = [
        TaskSpan(
            *(visit.member, visit.epoch, slot, (0,), visit.began_at, visit.ended_at),
            exit_code=0 if visit.state == DONE else 1,
        )
        for visit in hops.spans
        for slot in slots_in(visit.worker)
    ]
    spans = Spans("slot", len(hops.workers), end_s, tasks, one_round(end_s))
    about = (
        "One row for each worker; a bar is a member's visit to a partition, with its name or number. After"
        " each epoch of training the member is evaluated."
    )
    return gantt_section(title, about, spans, colours, HOPS)


MOST_PIPELINES = 6
"""Members whose stages are drawn."""
MOST_STAGES = 64
"""Stages of a member that are drawn."""
STAGE_INCHES = 0.24
PARTS: dict[str, tuple[str, Callable[[StageReport], float]]] = {
    "forward": (COLOURS[1], lambda stage: stage.forward_s),
    "backward": (COLOURS[0], lambda stage: stage.backward_s),
    "waiting for waves": (COLOURS[4], lambda stage: stage.wave_wait_s),
    "idle": (IDLE, lambda stage: stage.idle_s),
}
"""Parts of a stage's time in the order of a bar, with colours, and their seconds."""


def stage_svg(number: int, member: str, epoch: PipelineEpoch) -> str:
    """Draw a bar for each stage, grouped by virtual worker, the first on top.

    Parameters
    ----------
    number : int
        Number of the figure in the page.
    """
    stages = epoch.stages[:MOST_STAGES]
    height = STAGE_INCHES * (len(stages) + 0.5 * stages[-1].virtual_worker) + 0.45

    def draw(figure: Figure, tips: Tips) -> None:
        axes = figure.add_subplot()
        _draw_bars(axes, stages, tips)
        set_margins(figure, 2.46, 0.17, 0.05, 0.4)

    return draw_svg(f"stages-{number}", f"shares of time of {member}, by stage", height, draw)


def _draw_bars(axes: Axes, stages: Sequence[StageReport], tips: Tips) -> None:
    rows = [at + 0.5 * stage.virtual_worker for at, stage in enumerate(stages)]
    for row, stage in zip(rows, stages, strict=True):
        seconds = {part: (colour, of(stage)) for part, (colour, of) in PARTS.items()}
        _draw_bar(axes, row, stage.worker, seconds, stage.total_s or 1.0, tips)
    axes.set_yticks(rows, [_stage_label(stage) for stage in stages])
    axes.set_ylim(rows[-1] + 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="y")


def _stage_label(stage: StageReport) -> str:
    first, last = stage.layers
    return f"{stage.virtual_worker}.{stage.stage} · {stage.worker} · layers {first}..{last}"


HEIGHT = 3.6
TICKS, MOST_MARKED = 5, 6
"""Labels of an axis, and most values that have one each."""
LOGARITHMIC_FROM = 30.0
"""Ratio of the largest to the smallest positive value from which on an axis is logarithmic."""
VIRIDIS = colormaps["viridis"]


class Scale:
    """Axis of one key: the height of a value between 0 and 1, and labelled values.

    Parameters
    ----------
    values : sequence
        Values of all members that have the key.
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
        self.ticks = [(self._height(mark), f"{mark:.4g}") for mark in marks]

    def _of_choices(self, names: list[str]) -> None:
        heights = {name: i / (len(names) - 1) if len(names) > 1 else 0.5 for i, name in enumerate(names)}
        self._height = lambda value: heights[str(value)]
        self.ticks = [(height, name) for name, height in heights.items()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Configured = MemberStatus | TrialStatus
"""Member, or trial of a search: both have a config, a best value and a number of epochs."""


def configured(status: RunStatus, search: SearchStatus | None) -> tuple[list[Configured], str]:
    """Return the trials of a search, or the members with one metric, the best first, and their metric."""
    of_run = () if search else ranked(status)
    rows: Sequence[Configured] = search.trials if search else of_run
    found = [one for one in rows if one.best is not None and math.isfinite(one.best)]
    return found, search.metric if search else next((one.metric for one in of_run), "")


def varied_keys(found: Sequence[Configured]) -> list[str]:
    """Return the keys whose values differ; one that a config lacks differs, too."""
    keys = dict.fromkeys(key for one in found for key in one.config)
    return [key for key in keys if len({repr(one.config.get(key, MISSING)) for one in found}) > 1]


MISSING = object()
MOST_LINES = 2_000


def configs_svg(found: Sequence[Configured], metric: str) -> str | None:
    """Draw configs and best values, the best on top; None if configs do not differ."""
    found = found[:MOST_LINES]
    keys = varied_keys(found)
    if len(found) < 2 or not keys:
        return None
    scales = [Scale(key, [one.config[key] for one in found if key in one.config]) for key in keys]
    result = Scale(f"best {metric}", [one.best for one in found])

    def draw(figure: Figure, tips: Tips) -> None:
        axes = figure.add_subplot()
        _draw_axes(axes, [*scales, result])
        for at, one in reversed(list(enumerate(found))):
            # A line has a gap at a key that its config lacks.
            heights = [
                scale.height(one.config[scale.name]) if scale.name in one.config else math.nan
                for scale in scales
            ]
            colour = VIRIDIS(at / (len(found) - 1))
            places = [*heights, result.height(one.best)]
            (line,) = axes.plot(places, color=colour, alpha=0.8, linewidth=1.2, marker=".", markersize=4)
            line.set_gid(tips.add(_tip(one, metric)))
        slant = is_narrow(figure) and len(scales) > 2
        axes.tick_params(axis="x", rotation=25 if slant else 0)
        set_margins(figure, 0.3 if slant else 0.67, 0.67, 0.11, 0.8 if slant else 0.36)

    return draw_svg("trials", f"configs and best {metric}", HEIGHT, draw)


def pareto_svg(search: SearchStatus) -> str | None:
    """Draw the newest values of a search's metrics, its metric across, with the front of two metrics.

    Returns None unless the search has several metrics, and two trials have values of all.
    """
    trials = [t for t in search.measured if t.last is not None and t.also.keys() == search.also.keys()]
    if not search.also or len(trials) < 2:
        return None
    metrics = list(search.also)

    def draw(figure: Figure, tips: Tips) -> None:
        count = len(metrics)
        shape = (count, 1) if is_narrow(figure) else (1, count)
        figure.set_figheight(HEIGHT * shape[0])
        for axes, metric in zip(figure.subplots(*shape, squeeze=False).flat, metrics, strict=True):
            front = sorted((t.last, t.also[metric]) for t in trials if t.on_front)
            if len(metrics) == 1:
                axes.plot(*zip(*front, strict=True), color=GREY, linewidth=1.0)
            for trial in trials:
                colour = VIRIDIS(0.15) if trial.on_front else VIRIDIS(0.85)
                dot = axes.scatter(trial.last, trial.also[metric], s=34, color=colour, alpha=0.9, zorder=3)
                dot.set_gid(tips.add(_pareto_tip(trial, search.metric)))
            axes.set_xlabel(search.metric)
            axes.set_ylabel(metric)
        set_margins(figure, 0.9, 0.22, 0.11, 0.5, (0.25, 0.3))

    return draw_svg("front", f"{search.metric} and {', '.join(metrics)} of the trials", HEIGHT, draw)


def _pareto_tip(trial: TrialStatus, metric: str) -> str:
    values = [f"{name} {format_metric(value)}" for name, value in {metric: trial.last, **trial.also}.items()]
    return " · ".join((trial.member, *values, f"{trial.epochs} epochs", describe_config(trial.config)))


def _draw_axes(axes: Axes, scales: Sequence[Scale]) -> None:
    for at, scale in enumerate(scales):
        axes.axvline(at, color=RULE, linewidth=1.0)
        for height, label in scale.ticks:
            # No line runs on the left of the first axis.
            away, side = (-4, "right") if at == 0 else (4, "left")
            text = axes.annotate(label, (at, height), (away, 0), textcoords="offset points", zorder=3)
            text.set(ha=side, va="center")
            text.set(color=GREY, size=8, bbox={"facecolor": "white", "alpha": 0.9, "linewidth": 0, "pad": 1})
    axes.set_xticks(range(len(scales)), [scale.name for scale in scales])
    axes.set_yticks([])
    axes.set_xlim(-0.05, len(scales) - 0.8)
    axes.set_ylim(-0.05, 1.05)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _tip(one: Configured, metric: str) -> str:
    best = f"{metric} {format_metric(one.best)} at best"
    return f"{one.member} · {best} · {one.epochs} epochs · {describe_config(one.config)}"
