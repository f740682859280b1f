"""Terminal output of measured layers, and of links between GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetctl.model.profile import INTRA_NODE, LayerPoint, LinkPoint, MeasuredLayer
from hetctl.reports.table_style import ruled_table
from hetctl.reports.units import NONE, device_word, format_bytes, format_ms, printable

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
    table = ruled_table(*HEADERS, fold="layer")
    for layer in point.layers:
        kept = (layer.held_bytes, layer.workspace_bytes)
        table.add_row(
            Text(printable(layer.name)),
            format_ms(layer.forward_s),
            format_ms(layer.backward_s),
            *map(format_bytes, (layer.activation_bytes, layer.parameter_bytes)),
            _optimizer_bytes([layer]),
            *map(format_bytes, kept),
        )
    table.add_row(
        Text("all", "bold"),
        format_ms(sum(layer.forward_s for layer in point.layers)),
        format_ms(sum(layer.backward_s for layer in point.layers)),
        "",
        format_bytes(sum(layer.parameter_bytes for layer in point.layers)),
        _optimizer_bytes(point.layers),
        format_bytes(sum(layer.held_bytes for layer in point.layers)),
        format_bytes(max(layer.workspace_bytes for layer in point.layers)),
    )
    return table


def _optimizer_bytes(layers: Sequence[MeasuredLayer]) -> str:
    """Return the bytes of layers' slots, which earlier versions did not measure."""
    known = [layer.optimizer_bytes for layer in layers if layer.optimizer_bytes is not None]
    return format_bytes(sum(known)) if len(known) == len(layers) else NONE


def _link_table(links: Sequence[LinkPoint]) -> Table:
    sizes = sorted({size for link in links for size, _ in link.points})
    table = ruled_table("ms for", *(f">{format_bytes(int(size))}" for size in sizes), "nodes", fold="nodes")
    for link in links:
        taken = dict(link.points)
        where = "within a node" if link.link == INTRA_NODE else "between nodes"
        times = (format_ms(taken[size]) if size in taken else "" for size in sizes)
        table.add_row(where, *times, Text(printable(", ".join(dict.fromkeys(link.nodes)))))
    return table
