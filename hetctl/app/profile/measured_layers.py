"""Measured layers and links in the forms that files give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetctl.app.project import Project
from hetctl.inputs.input_errors import SourceLine
from hetctl.inputs.layer_profile import LayerRow
from hetctl.model.profile import INTER_NODE, INTRA_NODE, LayerPoint, LinkPoint
from hetctl.model.serialization import encode
from hetctl.model.site import InterNode, IntraNode, NodeLinks, Site, SiteKey


def rows_of(points: Sequence[LayerPoint]) -> list[LayerRow]:
    """Return the layers of a member as rows of a layer profile, of each layer one for each type of GPU.

    A type on which the network had other layers than in the newest measurement is left out. Bytes that are
    kept or used in passes are the largest of all types.

    Parameters
    ----------
    points : sequence of LayerPoint
        Measurements of one member, at least one.
    """
    last = max(points, key=lambda point: point.measured_at)
    names = [layer.name for layer in last.layers]
    alike = [point for point in points if [layer.name for layer in point.layers] == names]
    source = Path(f"measured layers of {last.member}")
    return [
        LayerRow(
            SourceLine(source, number),
            point.machine.gpu_type,
            replace(
                on_types[0],
                forward_s=layer.forward_s,
                backward_s=layer.backward_s,
                held_bytes=max(one.kept_bytes for one in on_types),
                workspace_bytes=max(one.workspace_bytes for one in on_types),
            ),
        )
        for number, on_types in enumerate(zip(*(point.layers for point in alike), strict=True), start=1)
        for point, layer in zip(alike, on_types, strict=True)
    ]


def links_between(points: Sequence[LinkPoint], site: Site) -> NodeLinks | None:
    """Return measured links as the links of a site; None if a kind was not measured that the site has."""
    measured = {point.link: point.points for point in points}
    needed = {INTRA_NODE: site.gpus_per_node > 1, INTER_NODE: site.nodes > 1}
    if not measured or any(needed[kind] and kind not in measured for kind in needed):
        return None
    # Of the kind that a site does not have no figure is used, but there must be one.
    intra = measured.get(INTRA_NODE) or measured[INTER_NODE]
    inter = measured.get(INTER_NODE) or intra
    peak = max(size / seconds for size, seconds in intra)
    return NodeLinks(IntraNode(peak, points=intra), InterNode(points=inter))


def traced_site(project: Project, name: str) -> tuple[Site, tuple[SiteKey, ...]]:
    """Return a site with the source of each of its keys; links are measured ones where its file has none."""
    site, keys = project.traced_site(name)
    if site.links is not None or not project.home.catalog.exists():
        return site, keys
    with project.reading() as catalog:
        points = catalog.links(site.name)
    links = links_between(points, site)
    if links is None:
        return site, keys
    measured = SiteKey("links", encode(links), measured_at=max(point.measured_at for point in points))
    return replace(site, links=links), tuple(measured if key.key == "links" else key for key in keys)
