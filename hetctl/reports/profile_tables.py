"""Terminal output of a profile: rates by number of GPUs, other times of a step, layers, and links."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetctl.model.profile import (
    INTRA_NODE,
    LayerPoint,
    LinkPoint,
    MeasuredLayer,
    PreprocessPoint,
    ProfilePoint,
    RateShape,
    some_of,
)
from hetctl.reports.style import ruled_table
from hetctl.reports.units import (
    NONE,
    device_word,
    format_bytes,
    format_ms,
    format_percent,
    format_rate,
    format_seconds,
    printable,
)

WANTED_ERROR = 0.03
"""Relative error of a rate above which its point is named in a warning."""
COUNTS_PER_BLOCK = 8
SHARING_NAMED = 20
"""Largest number of members of a shape that are named."""


def profile_table(
    points: Sequence[ProfilePoint],
    stale: Collection[tuple[str, int]],
    preprocess: Sequence[PreprocessPoint],
    device: str = "gpu",
) -> RenderableType:
    """Return tables of a profile: rates by number of GPUs, and the other times of a step.

    Parameters
    ----------
    stale : collection of (member, gpus)
        Points measured on another machine, or before the member was edited.
    """
    counts = sorted({point.gpus for point in points})
    blocks = [counts[i : i + COUNTS_PER_BLOCK] for i in range(0, len(counts), COUNTS_PER_BLOCK)]
    parts: list[RenderableType] = [Text(f"Training rate in samples/s, by {device_word(device)}", "bold")]
    for block in blocks:
        parts += [_rate_table(points, stale, block), Text()]
    if stale:
        note = "* stale: measured elsewhere or before the member changed; profile it again"
        parts += [Text(note, "yellow"), Text()]
    if doubts := _doubts(points):
        parts += [*(Text(printable(doubt), "yellow") for doubt in doubts), Text()]
    parts += [Text("Costs of a step besides training, the largest measured", "bold"), _cost_table(points)]
    if preprocess:
        parts += [Text(), Text("Preprocessing in samples/s, by cores", "bold"), _preprocess_table(preprocess)]
    machines = sorted({printable(point.machine.gpu_type) for point in points})
    return Group(*parts, Text(f"\nMeasured on {', '.join(machines) or 'nothing yet'}", "dim"))


def shapes_text(shapes: Sequence[RateShape]) -> RenderableType:
    """Return a line with the number of shapes, and one for each that several members share."""
    members = sum(1 + len(shape.shared_by) for shape in shapes)
    title = f"{_counted(members, 'member')} of {_counted(len(shapes), 'shape')}"
    shared = [
        Text(printable(f"  {shape.member} is measured for {some_of(shape.shared_by, SHARING_NAMED)}"))
        for shape in shapes
        if shape.shared_by
    ]
    return Group(Text(title), *shared)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _doubts(points: Sequence[ProfilePoint]) -> list[str]:
    """Return texts on the points whose steps varied in time."""
    inexact = [
        f"{point.member} on {point.gpus} ±{format_percent(point.rate_error)}"
        for point in points
        if point.rate_error is not None and point.rate_error > WANTED_ERROR
    ]
    slow = [
        f"{point.member} on {point.gpus}: {', '.join(f'{seconds:.2g} s' for seconds in point.slow_steps_s)}"
        for point in points
        if point.slow_steps_s
    ]
    return [
        f"{what}: {'; '.join(those)}"
        for what, those in (
            (f"not known within {WANTED_ERROR:.0%}, as steps vary", inexact),
            ("steps that took far too long and do not count", slow),
        )
        if those
    ]


def _rate_table(
    points: Sequence[ProfilePoint], stale: Collection[tuple[str, int]], counts: Sequence[int]
) -> Table:
    rates = {(point.member, point.gpus): point.rate for point in points}

    def cell(point: tuple[str, int]) -> str:
        return format_rate(rates.get(point)) + ("*" if point in stale else " ")

    members = dict.fromkeys(point.member for point in points)
    rows = ((member, *(cell((member, count)) for count in counts)) for member in members)
    return ruled_table(("member", *(f">{count} " for count in counts)), rows, fold="member")


def _cost_table(points: Sequence[ProfilePoint]) -> Table:
    headers = ("member", ">batch", ">start-up", ">evaluate", ">checkpoint", ">memory")
    rows = []
    for name in dict.fromkeys(point.member for point in points):
        mine = [point for point in points if point.member == name]
        memory = max(point.peak_memory_bytes for point in mine)
        times_s = (
            max(getattr(point, field) for point in mine)
            for field in ("startup_s", "evaluate_s", "checkpoint_s")
        )
        size = format_bytes(memory) if memory else NONE
        rows.append((name, str(mine[-1].batch_size), *map(format_seconds, times_s), size))
    return ruled_table(headers, rows, gap=1, fold="member")


def _preprocess_table(preprocess: Sequence[PreprocessPoint]) -> Table:
    rates = ("rate", *(format_rate(point.rate) for point in preprocess))
    return ruled_table(("cores", *(f">{point.cores}" for point in preprocess)), [rates], gap=1)


HEADERS = (
    *("layer", ">forward\nms", ">backward\nms"),
    *(">activations", ">parameters", ">optimizer", ">held", ">workspace"),
)


def layers_table(
    layers: Sequence[LayerPoint], links: Sequence[LinkPoint], device: str = "gpu"
) -> RenderableType:
    """Return a table for each member and type of GPU, and one of the links."""
    parts: list[RenderableType] = [part for point in layers for part in _parts(point, device)]
    if not layers:
        parts = [Text("No layers are measured yet"), Text()]
    if links:
        parts += [Text("Links", "bold"), _link_table(links)]
    return Group(*parts)


def _parts(point: LayerPoint, device: str) -> Iterator[RenderableType]:
    word = device_word(device, 1)
    yield Text(printable(f"{point.member} on one {word}: {point.machine.gpu_type}"), "bold")
    yield _layer_table(point)
    context = format_bytes(point.context_bytes)
    yield Text(f"with {point.batch_size} samples; the framework alone takes {context} of a {word}\n", "dim")


def _layer_table(point: LayerPoint) -> Table:
    rows: list[Sequence[str | Text]] = [
        (
            layer.name,
            *map(format_ms, (layer.forward_s, layer.backward_s)),
            *map(format_bytes, (layer.activation_bytes, layer.parameter_bytes)),
            _optimizer_bytes([layer]),
            *map(format_bytes, (layer.kept_bytes, layer.workspace_bytes)),
        )
        for layer in point.layers
    ]
    whole = (
        Text("all", "bold"),
        format_ms(sum(layer.forward_s for layer in point.layers)),
        format_ms(sum(layer.backward_s for layer in point.layers)),
        "",
        format_bytes(sum(layer.parameter_bytes for layer in point.layers)),
        _optimizer_bytes(point.layers),
        format_bytes(sum(layer.kept_bytes for layer in point.layers)),
        format_bytes(max(layer.workspace_bytes for layer in point.layers)),
    )
    return ruled_table(HEADERS, [*rows, whole], fold="layer")


def _optimizer_bytes(layers: Sequence[MeasuredLayer]) -> str:
    """Return the bytes of layers' slots, which earlier versions did not measure."""
    known = [layer.optimizer_bytes for layer in layers if layer.optimizer_bytes is not None]
    return format_bytes(sum(known)) if len(known) == len(layers) else NONE


def _link_table(links: Sequence[LinkPoint]) -> Table:
    sizes = sorted({size for link in links for size, _ in link.points})
    headers = ("ms for", *(f">{format_bytes(int(size))}" for size in sizes), "nodes")
    rows = []
    for link in links:
        taken = dict(link.points)
        where = "within a node" if link.link == INTRA_NODE else "between nodes"
        times = (format_ms(taken[size]) if size in taken else "" for size in sizes)
        rows.append((where, *times, ", ".join(dict.fromkeys(link.nodes))))
    return ruled_table(headers, rows, fold="nodes")
