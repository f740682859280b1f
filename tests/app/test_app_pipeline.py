"""Layers and a cluster, brought together from their files."""

import pytest

from hetctl.app.pipeline import cluster_of, profile_of
from hetctl.inputs.layer_profile import read_cluster, read_layers
from hetctl.model.errors import BadInputError, InfeasibleError

UNTYPED = "layer,forward_s,backward_s,activation_bytes,parameter_bytes\na,1,2,100,10\nb,3,4,50,400\n"
TYPED = "layer,gpu_type,forward_s,backward_s,activation_bytes,parameter_bytes\na,V,1,2,100,10\n"
CLUSTER = """\
gpu_types:
  V: {memory: 1000}
  Q: {memory: 1700, time_ratio: 2}
nodes:
  - {Q: 2}
links:
  intra_node: {bytes_per_s: 100, points: [[50, 1], [100, 2]]}
  inter_node: {points: [[100, 3], [200, 5]]}
"""


@pytest.fixture
def read(tmp_path):
    def read_both(layers, cluster):
        (tmp_path / "layers.csv").write_text(layers)
        (tmp_path / "cluster.yaml").write_text(cluster)
        file = read_cluster(tmp_path / "cluster.yaml")
        return profile_of(read_layers(tmp_path / "layers.csv"), file), cluster_of(file)

    return read_both


def test_times_of_no_type_are_scaled_to_those_of_the_cluster(read):
    layers, cluster = read(UNTYPED, CLUSTER)
    assert [dict(layer.forward_s) for layer in layers.layers] == [{"Q": 2.0}, {"Q": 6.0}]
    assert cluster.nodes == (("Q", "Q"),)
    assert cluster.memory_bytes["Q"] == 1700


def test_links_are_fitted_to_their_points(read):
    links = read(UNTYPED, CLUSTER)[1].links
    assert links.seconds(100, same_node=True) == pytest.approx(2)
    assert links.seconds(50, same_node=False) == pytest.approx(2)


def test_a_type_without_times_is_refused(read):
    with pytest.raises(BadInputError, match=r"cluster.yaml:3: gpu_types.Q: .*layers.csv"):
        read(TYPED, CLUSTER)
    with pytest.raises(BadInputError, match=r"cluster.yaml:2: gpu_types.V: time_ratio"):
        read(UNTYPED, CLUSTER.replace("{Q: 2}", "{V: 2}"))


def test_a_layer_larger_than_every_gpu_is_refused(read):
    with pytest.raises(InfeasibleError, match=r"layers.csv:3: .*1,650.*1,600"):
        read(UNTYPED, CLUSTER.replace("1700", "1600"))


def test_layers_that_take_no_time_are_refused(read):
    with pytest.raises(BadInputError, match=r"layers.csv:2:"):
        read("layer,forward_s,backward_s,activation_bytes,parameter_bytes\na,0,0,1,1\n", CLUSTER)


def test_layers_that_need_more_than_all_gpus_have_are_refused(read):
    many = UNTYPED + "".join(f"c{number},1,1,0,400\n" for number in range(3))
    with pytest.raises(InfeasibleError, match=r"cluster.yaml:4: nodes: .*3,400.* 6,"):
        read(many, CLUSTER)
