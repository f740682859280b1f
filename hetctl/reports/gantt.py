"""Gantt chart of GPUs over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch

from hetctl.model.hops import numbers_by_value
from hetctl.model.run_status import RunStatus, TaskSpan
from hetctl.model.values import dataclass
from hetctl.reports.figures import LABEL_SIZE, Tips, draw_svg, fits, rectangles, shortened, time_unit
from hetctl.reports.page import IDLE_MARK, legend
from hetctl.reports.sections import Section
from hetctl.reports.style import GREY, IDLE, INK, RULE, ink_on
from hetctl.reports.summary import Spans, end_of, job_spans, now_s
from hetctl.reports.units import device_word, format_seconds

ROW, LEAST, MOST = 21.0, 46.0, 620.0  # points: height of a row, of the smallest and of the largest chart
TOP, BOTTOM, RIGHT = 22.0, 34.0, 8.0
UNUSED = "unused"
DETAILED_TASKS = 2000
HATCHED = Markup('<i class="hatched"></i>')

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Wording:
    """Texts and labels of a chart; names in braces are filled in.

    Parameters
    ----------
    task : str
        Tip of a bar.
    failed, hatched : str
        Outcome of a failed task, and what its bar stands for.
    rounds : bool
        True if the starts of rounds are marked.
    numbered : bool
        True if the rows of a node have the numbers of its GPUs.
    """

    title: str
    axis: str
    task: str
    failed: str
    hatched: str
    rounds: bool
    numbered: bool


RUN = Wording(
    title="{devices} over time, by member",
    axis="time since the first job started ({unit}); round numbers above",
    task="{task.member} · round {task.round} · {devices} of {task.node} · {length} · {outcome}",
    failed="failed with exit code {code}",
    hatched="failed task",
    rounds=True,
    numbered=True,
)
HOPS = Wording(
    title="workers over time, by configuration",
    axis="time since the start ({unit})",
    task="{task.member} · epoch {task.round} · worker {task.node} · {length} · {outcome}",
    failed="undone by a failure",
    hatched="undone by a failure, and repeated",
    rounds=False,
    numbered=False,
)


@dataclass(frozen=True)
class ChartLayout:
    """Rows by (node, GPU), and the extent of the chart in seconds and points.

    Parameters
    ----------
    seats : int
        Largest number of a seat on a shared GPU, whose row is divided by it.
    """

    rows: Mapping[tuple[str, int], int]
    span_s: float
    now_s: float
    left: float
    height: float
    whole_width: float
    seats: int = 1

    @property
    def width(self) -> float:
        """Width between the left and right ends of the axes, in points."""
        return self.whole_width - self.left - RIGHT

    @property
    def row_height(self) -> float:
        """Height of a row in points."""
        return self.height / max(1, len(self.rows))


@dataclass(frozen=True)
class Look:
    """Appearance of tasks that are drawn as one shape."""

    tip: str
    colour: str
    failed: bool
    running: bool


def gantt_section(
    title: str, about: str, spans: Spans | RunStatus, colours: Mapping[str, str], wording: Wording
) -> Section:
    """Draw members by GPU over time; a grey row is idle, a hatched bar failed.

    Rows of nodes that a job did not hold stay white, as does the time between jobs.
    """
    name = wording.title.format(devices=device_word(spans.device))

    def draw(figure: Figure, tips: Tips) -> None:
        layout = _layout(spans, 72 * figure.get_figwidth())
        width, height = layout.whole_width, layout.height + TOP + BOTTOM
        figure.set_figheight(height / 72)
        axes = figure.add_axes(
            (layout.left / width, BOTTOM / height, layout.width / width, layout.height / height)
        )
        _draw_idle(axes, spans, layout)
        _draw_tasks(axes, spans, colours, layout, tips, wording)
        if wording.rounds:
            _draw_rounds(axes, spans, layout)
        _label_rows(axes, layout, wording)
        _finish(axes, layout, wording)

    failed = [(HATCHED, wording.hatched)] if any(task.failed for task in spans.tasks) else []
    chart = draw_svg("gantt", name, MOST / 72, draw)
    return Section(title, about, chart, legend(colours, IDLE_MARK, *failed))


def _layout(spans: Spans | RunStatus, width: float) -> ChartLayout:
    used = {(task.node, gpu) for task in spans.tasks for gpu in task.gpus}
    ordered = sorted(used, key=lambda row: (numbers_by_value(row[0]), row[1]))
    ordered += [(UNUSED, i) for i in range(spans.gpus - len(used))]
    longest = max((len(node) for node, _ in ordered), default=0)
    now = now_s(spans)
    return ChartLayout(
        rows={row: i for i, row in enumerate(ordered)},
        span_s=max(now, 1.0),
        now_s=now,
        seats=max((task.seat for task in spans.tasks), default=1),
        left=min(longest, 24) * 5.6 + 28,
        height=min(max(len(ordered) * ROW, LEAST), MOST),
        whole_width=width,
    )


def _draw_idle(axes: Axes, spans: Spans | RunStatus, layout: ChartLayout) -> None:
    """Draw the GPUs of each job: all rows or, if these exceed its GPUs, the rows of its nodes."""
    same_nodes = len(layout.rows) <= spans.gpus
    jobs = {span.index: span.job for span in spans.rounds}
    nodes: dict[int, set[str]] = {job: set() for job in jobs.values()}
    for task in spans.tasks:
        nodes.get(jobs.get(task.round, -1), set()).add(task.node)
    boxes = [
        (start, row + 0.06, end, row + 0.94)
        for job, (start, end) in job_spans(spans).items()
        for (node, _), row in layout.rows.items()
        if same_nodes or node in nodes[job]
    ]
    axes.add_patch(PathPatch(rectangles(boxes), facecolor=IDLE, linewidth=0))


def _draw_tasks(
    axes: Axes,
    spans: Spans | RunStatus,
    colours: Mapping[str, str],
    layout: ChartLayout,
    tips: Tips,
    wording: Wording,
) -> None:
    # Tasks with equal tips are joined to one shape, which keeps the page of a large run small.
    detailed = len(spans.tasks) <= DETAILED_TASKS
    numbers = {member: str(number) for number, member in enumerate(colours, start=1)}
    shapes: dict[Look, list[Box]] = {}
    for task in spans.tasks:
        tip = _describe(task, layout, spans.device, wording) if detailed else task.member
        colour = colours.get(task.member, GREY)
        look = Look(tip, colour, task.failed, task.end_s is None)
        boxes = list(_boxes(task, layout))
        shapes.setdefault(look, []).extend(boxes)
        for box in boxes:
            _label_bar(axes, (task.member, numbers.get(task.member, "")), box, layout, look)
    edge = 0.6 if layout.row_height > 6 else 0.0
    for look, boxes in shapes.items():
        patch = PathPatch(
            rectangles(boxes),
            facecolor="white" if look.failed else look.colour,
            edgecolor=look.colour if look.failed else "white",
            hatch="/////" if look.failed else None,
            alpha=0.6 if look.running else None,
            linewidth=max(edge, 0.6 * look.failed),
        )
        patch.set_gid(tips.add(look.tip))
        axes.add_patch(patch)


def _describe(task: TaskSpan, layout: ChartLayout, device: str, wording: Wording) -> str:
    length = format_seconds(end_of(task, layout.now_s) - task.start_s)
    devices = f"{device_word(device, len(task.gpus))} {', '.join(map(str, task.gpus))}"
    outcome = "running" if task.end_s is None else "done"
    if task.failed:
        outcome = (
            "lost with its driver" if task.exit_code is None else wording.failed.format(code=task.exit_code)
        )
    return wording.task.format(task=task, devices=devices, length=length, outcome=outcome)


def _boxes(task: TaskSpan, layout: ChartLayout) -> Iterator[Box]:
    """Yield a box for every sequence of adjacent rows."""
    end = end_of(task, layout.now_s)
    rows = sorted(layout.rows[(task.node, gpu)] for gpu in task.gpus)
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            top, bottom = rows[first] + 0.06, rows[i - 1] + 0.94
            if task.seat:
                height = (bottom - top) / layout.seats
                top += height * (task.seat - 1)
                bottom = top + height
            yield task.start_s, top, end, bottom
            first = i


def _label_bar(axes: Axes, labels: Iterable[str], box: Box, layout: ChartLayout, look: Look) -> None:
    x0, y0, x1, y1 = box
    width = (x1 - x0) / layout.span_s * layout.width
    label = next((label for label in labels if fits(label, width)), "")
    if not label or (y1 - y0) * layout.row_height < 9:
        return
    text = axes.text((x0 + x1) / 2, (y0 + y1) / 2, label, size=LABEL_SIZE, ha="center", va="center_baseline")
    text.set_color(INK if look.failed else ink_on(look.colour))
    if look.failed:
        text.set_bbox({"facecolor": "white", "linewidth": 0, "pad": 1.2})


def _draw_rounds(axes: Axes, spans: Spans | RunStatus, layout: ChartLayout) -> None:
    free_from = 0.0
    for span in spans.rounds:
        axes.axvline(span.start_s, color=INK, linewidth=0.6, alpha=0.55)
        x = span.start_s / layout.span_s * layout.width
        if x >= free_from:
            axes.text(span.start_s, -3 / layout.row_height, str(span.index), color=GREY, size=8, ha="center")
            free_from = x + 7 * len(str(span.index)) + 6


def _label_rows(axes: Axes, layout: ChartLayout, wording: Wording) -> None:
    nodes: dict[str, list[int]] = {}
    for (node, _), row in layout.rows.items():
        nodes.setdefault(node, []).append(row)
    if layout.row_height >= 8 and wording.numbered:
        axes.set_yticks([row + 0.5 for row in layout.rows.values()])
        axes.set_yticklabels(["" if node == UNUSED else str(gpu) for node, gpu in layout.rows], size=8)
    else:
        axes.set_yticks([])
    free_from = 0.0
    for node, rows in nodes.items():
        middle = (rows[0] + rows[-1] + 1) / 2
        if rows[0]:
            axes.axhline(rows[0], color=RULE, linewidth=0.8)
        if middle * layout.row_height >= free_from:
            x = -(layout.left - 4) / layout.width
            axes.text(
                x, middle, shortened(node), transform=axes.get_yaxis_transform(), size=9, va="center_baseline"
            )
            free_from = middle * layout.row_height + 11


def _finish(axes: Axes, layout: ChartLayout, wording: Wording) -> None:
    unit, length = time_unit(layout.span_s)
    axes.set_xlim(0, layout.span_s)
    axes.set_ylim(max(1, len(layout.rows)), 0)
    locator = axes.xaxis.get_major_locator()
    ticks = [
        t * length for t in locator.tick_values(0, layout.span_s / length) if 0 <= t * length <= layout.span_s
    ]
    axes.set_xticks(ticks, [f"{tick / length:g}" for tick in ticks])
    axes.set_xlabel(wording.axis.format(unit=unit), loc="left")
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
