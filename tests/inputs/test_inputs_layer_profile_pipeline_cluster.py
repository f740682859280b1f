"""Cluster files of pipelines: what is read, and what is refused with its file, line and rule."""

import pytest

from hetctl.inputs.layer_profile import read_cluster
from hetctl.model.errors import BadInputError

CLUSTER = """\
gpu_types:
  V: {memory: 12GB, time_ratio: 1.0}
  Q: {memory: 8GiB, context_bytes: 400MiB}
nodes:
  - {V: 2}
  - {V: 1, Q: 2}
links:
  intra_node: {bytes_per_s: 15.75e9, scaling: 0.7}
  inter_node:
    points: [[1000, 0.1], [2000, 0.2]]
"""


def read(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return read_cluster(path)


def test_a_cluster_has_types_nodes_and_links(tmp_path):
    found = read(tmp_path, CLUSTER)
    assert found.types_of_nodes == (("V", "V"), ("V", "Q", "Q"))
    assert {name: kind.memory for name, kind in found.gpu_types.items()} == {"V": 12 * 10**9, "Q": 2**33}
    assert [kind.context_bytes for kind in found.gpu_types.values()] == [0, 400 * 2**20]
    assert [kind.time_ratio for kind in found.gpu_types.values()] == [1.0, None]
    assert (
        found.links.intra_node.bytes_per_s,
        found.links.intra_node.scaling,
        found.links.intra_node.points,
    ) == (15.75e9, 0.7, ())
    assert found.links.inter_node.points == ((1000, 0.1), (2000, 0.2))
    assert found.place(("gpu_types", "Q")).line == 3


def test_servers_may_take_time(tmp_path):
    assert read(tmp_path, CLUSTER).server_bytes_per_s is None
    assert read(tmp_path, f"{CLUSTER}server_bytes_per_s: 8e9").server_bytes_per_s == 8e9


def test_links_may_be_given_by_their_numbers(tmp_path):
    found = read(
        tmp_path, CLUSTER.replace("points: [[1000, 0.1], [2000, 0.2]]", "{latency_s: 0, bytes_per_s: 5e9}")
    )
    assert (found.links.inter_node.latency_s, found.links.inter_node.bytes_per_s) == (0, 5e9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("12GB", "-1"), "cluster.yaml:2: gpu_types.V.memory: -1 is not a size"),
        (("12GB", "0"), "cluster.yaml:2: gpu_types.V.memory: 0 is not a size"),
        (
            ("time_ratio: 1.0", "time_ratio: 0"),
            "cluster.yaml:2: gpu_types.V.time_ratio: must be greater than 0",
        ),
        (("400MiB", "-4"), "cluster.yaml:3: gpu_types.Q.context_bytes: -4 is not a size"),
        (
            ("400MiB", "8GiB"),
            "cluster.yaml:3: gpu_types.Q.context_bytes: must be less than memory (8,589,934,592 bytes)",
        ),
        (("{V: 2}", "{X: 2}"), "cluster.yaml:5: nodes[0].X: must be one of gpu_types"),
        (("{V: 2}", "{V: 0}"), "cluster.yaml:5: nodes[0].V: must be at least 1"),
        (("{V: 2}", "{}"), "cluster.yaml:5: nodes[0]: must have at least 1"),
        (("scaling: 0.7", "scaling: 1.7"), "cluster.yaml:8: links.intra_node.scaling: must be at most 1"),
        ((", scaling: 0.7", ""), "cluster.yaml:8: links.intra_node: must have either scaling or points"),
        (
            ("[2000, 0.2]", "[1000, 0.2]"),
            "cluster.yaml:10: links.inter_node.points: must be of at least two sizes",
        ),
        (
            ("[2000, 0.2]", "[2000, -0.2]"),
            "cluster.yaml:10: links.inter_node.points[1][1]: must be greater than 0",
        ),
        (("[2000, 0.2]", "2000"), "cluster.yaml:10: links.inter_node.points"),
        (
            ("points: [[1000, 0.1], [2000, 0.2]]", "latency_s: 1"),
            "cluster.yaml:9: links.inter_node: must have either",
        ),
        (("links:", "link:"), "cluster.yaml:7: link: unknown key 'link'; did you mean 'links'?"),
    ],
)
def test_a_wrong_cluster_is_refused(tmp_path, change, message):
    with pytest.raises(BadInputError) as caught:
        read(tmp_path, CLUSTER.replace(*change))
    assert message in caught.value.message.replace(f"{tmp_path}/", "")
