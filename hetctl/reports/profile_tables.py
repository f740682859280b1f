"""A profile as sections: rates by number of GPUs, other times of a step, layers, and links."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rich.console import RenderableType
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
from hetctl.reports.sections import Section, stacked
from hetctl.reports.units import (
    NONE,
    counted,
    device_word,
    format_bytes,
    format_ms,
    format_percent,
    format_rate,
    format_seconds,
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
    blocks = [counts[i : i + COUNTS_PER_BLOCK] for i in range(0, len(counts), COUNTS_PER_BLOCK)] or [[]]
    title = f"Training rate in samples/s, by {device_word(device)}"
    parts = [_rates(title if block is blocks[0] else "", points, stale, block) for block in blocks]
    notes = list(_doubts(points))
    if stale:
        notes.insert(0, "* stale: measured elsewhere or before the member changed; profile it again")
    machines = sorted({point.machine.gpu_type for point in points})
    return stacked(
        [
            *parts,
            *([Section(notes=[(note, "yellow") for note in notes])] if notes else []),
            _costs(points),
            *([_preprocessing(preprocess)] if preprocess else []),
            Section(notes=[(f"Measured on {', '.join(machines) or 'nothing yet'}", "dim")]),
        ]
    )


def shapes_text(shapes: Sequence[RateShape]) -> Section:
    """Return a line with the number of shapes, and one for each that several members share."""
    members = sum(1 + len(shape.shared_by) for shape in shapes)
    title = f"{counted(members, 'member')} of {counted(len(shapes), 'shape')}"
    shared = [
        f"  {shape.member} is measured for {some_of(shape.shared_by, SHARING_NAMED)}"
        for shape in shapes
        if shape.shared_by
    ]
    return Section(notes=[(line, "") for line in (title, *shared)])


def _doubts(points: Sequence[ProfilePoint]) -> Iterator[str]:
    """Yield texts on the points whose steps varied in time."""
    inexact = [
        f"{point.member} on {point.gpus} ±{format_percent(point.rate_error)}"
        for point in points
        if point.rate_error is not None and point.rate_error > WANTED_ERROR
    ]
    if inexact:
        yield f"not known within {WANTED_ERROR:.0%}, as steps vary: {'; '.join(inexact)}"
    slow = [
        f"{point.member} on {point.gpus}: {', '.join(f'{seconds:.2g} s' for seconds in point.slow_steps_s)}"
        for point in points
        if point.slow_steps_s
    ]
    if slow:
        yield f"steps that took far too long and do not count: {'; '.join(slow)}"


def _rates(
    title: str, points: Sequence[ProfilePoint], stale: Collection[tuple[str, int]], counts: Sequence[int]
) -> Section:
    rates = {(point.member, point.gpus): point.rate for point in points}
    rows = [
        (name, *(format_rate(rates.get((name, n))) + ("*" if (name, n) in stale else " ") for n in counts))
        for name in dict.fromkeys(point.member for point in points)
    ]
    headers = ("member", *(f">{count} " for count in counts))
    return Section(title, headers=headers, rows=rows, fold="member", gap=0)


def _costs(points: Sequence[ProfilePoint]) -> Section:
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
    headers = ("member", ">batch", ">start-up", ">evaluate", ">checkpoint", ">memory")
    title = "Costs of a step besides training, the largest measured"
    return Section(title, headers=headers, rows=rows, fold="member")


def _preprocessing(preprocess: Sequence[PreprocessPoint]) -> Section:
    headers = ("cores", *(f">{point.cores}" for point in preprocess))
    rates = ("rate", *(format_rate(point.rate) for point in preprocess))
    return Section("Preprocessing in samples/s, by cores", headers=headers, rows=[rates])


def layers_table(
    layers: Sequence[LayerPoint], links: Sequence[LinkPoint], device: str = "gpu"
) -> RenderableType:
    """Return a table for each member and type of GPU, and one of the links."""
    parts = [_layers(point, device_word(device, 1)) for point in layers]
    return stacked(
        [
            *(parts or [Section(notes=[("No layers are measured yet", "")])]),
            *([_links(links)] if links else []),
        ]
    )


def _layers(point: LayerPoint, device: str) -> Section:
    headers = (
        *("layer", ">forward\nms", ">backward\nms"),
        *(">activations", ">parameters", ">optimizer", ">held", ">workspace"),
    )
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
    context = format_bytes(point.context_bytes)
    note = f"with {point.batch_size} samples; the framework alone takes {context} of a {device}"
    title = f"{point.member} on one {device}: {point.machine.gpu_type}"
    return Section(title, headers=headers, rows=[*rows, whole], fold="layer", gap=0, notes=[(note, "dim")])


def _optimizer_bytes(layers: Sequence[MeasuredLayer]) -> str:
    """Return the bytes of the optimizer's state; old measurements have none."""
    known = [layer.optimizer_bytes for layer in layers if layer.optimizer_bytes is not None]
    return format_bytes(sum(known)) if len(known) == len(layers) else NONE


def _links(links: Sequence[LinkPoint]) -> Section:
    sizes = sorted({size for link in links for size, _ in link.points})
    rows = []
    for link in links:
        taken = dict(link.points)
        where = "within a node" if link.link == INTRA_NODE else "between nodes"
        times = (format_ms(taken[size]) if size in taken else "" for size in sizes)
        rows.append((where, *times, ", ".join(dict.fromkeys(link.nodes))))
    headers = ("ms for", *(f">{format_bytes(int(size))}" for size in sizes), "nodes")
    return Section("Links", headers=headers, rows=rows, fold="nodes", gap=0)
