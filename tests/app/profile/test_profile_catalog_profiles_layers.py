"""Measured layers and links, as files would give them."""

import io
from dataclasses import replace

import pytest

from hetctl.app.pipeline import fitted
from hetctl.app.profile.catalog_profiles import links_between, rows_of
from hetctl.inputs.layer_profile import read_layers, write_layers
from hetctl.model.profile import INTER_NODE, INTRA_NODE, Hardware, LayerPoint, LinkPoint, MeasuredLayer
from hetctl.model.site import Queue, Site

V100, P100 = (Hardware(name, "1", "fake 1") for name in ("V100", "P100"))
LAYERS = MeasuredLayer("a", 0.1, 0.2, 64, 128, 256, 512), MeasuredLayer("b", 0.3, 0.4, 32, 16, 8, 4)
ON_V100 = LayerPoint("m", "f", 8, 1000.0, V100, 100, 2**20, LAYERS)
SLOWER = tuple(replace(layer, forward_s=1.0, held_bytes=300, workspace_bytes=1) for layer in LAYERS)
ON_P100 = replace(ON_V100, machine=P100, layers=SLOWER, measured_at=2000.0)
WITHIN = LinkPoint(INTRA_NODE, ("n0", "n0"), 1.0, ((100.0, 0.02), (1000.0, 0.1)))
BETWEEN = LinkPoint(INTER_NODE, ("n0", "n1"), 1.0, ((100.0, 1.0), (1000.0, 1.9)))


def site(nodes, gpus_per_node):
    return Site("s", "slurm", "srun", nodes, gpus_per_node, 8, 2**30, (Queue("q"),))


def test_bytes_are_the_largest_of_all_types():
    rows = rows_of([ON_V100, ON_P100])
    assert [(row.layer.name, row.gpu_type, row.layer.forward_s) for row in rows] == [
        ("a", "V100", 0.1),
        ("a", "P100", 1.0),
        ("b", "V100", 0.3),
        ("b", "P100", 1.0),
    ]
    layers = [row.layer for row in rows]
    assert [(one.held_bytes, one.workspace_bytes) for one in layers] == [(300, 512)] * 2 + [(300, 4)] * 2
    assert str(rows[2].place) == "measured layers of m:2"


def test_a_type_with_other_layers_than_the_newest_is_left_out():
    older = replace(ON_V100, layers=LAYERS[:1])
    assert {row.gpu_type for row in rows_of([older, ON_P100])} == {"P100"}


def test_an_exported_profile_is_read_as_it_was_measured(tmp_path):
    file, rows = io.StringIO(), rows_of([ON_V100, ON_P100])
    write_layers(rows, file)
    path = tmp_path / "layers.csv"
    path.write_text(file.getvalue())
    assert [replace(row, place=rows[0].place) for row in read_layers(path)] == [
        replace(row, place=rows[0].place) for row in rows
    ]


def test_links_are_fitted_to_what_was_measured():
    found = links_between([WITHIN, BETWEEN], site(2, 2))
    links = fitted(found)
    assert links.seconds(1000, same_node=True) == pytest.approx(0.1, rel=0.05)
    assert links.seconds(550, same_node=False) == pytest.approx(1.45)


@pytest.mark.parametrize(
    ("nodes", "gpus_per_node", "points", "known"),
    [
        (2, 2, [WITHIN], False),
        (2, 2, [BETWEEN], False),
        (2, 2, [], False),
        (1, 2, [WITHIN], True),
        (2, 1, [BETWEEN], True),
    ],
)
def test_links_are_known_if_each_kind_of_the_site_is(nodes, gpus_per_node, points, known):
    assert (links_between(points, site(nodes, gpus_per_node)) is not None) == known
