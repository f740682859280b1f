"""Layer profiles: what is read, and what is refused with its file, line and rule."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.app.pipeline import measured_profile
from hetctl.inputs.layer_profile import read_layers
from hetctl.model.errors import BadInputError

HEADER = "layer,gpu_type,forward_s,backward_s,activation_bytes,parameter_bytes"
TABLE = f"""{HEADER}
conv,V100,0.1,0.2,100,10
conv,K80,0.3,0.6,100,10
fc,V100,0.01,0.02,4,1000
fc,K80,0.1,0.1,4,1000
"""


def read(tmp_path, text):
    path = tmp_path / "layers"
    path.write_text(text)
    return read_layers(path)


def refused(tmp_path, text):
    with pytest.raises(BadInputError) as caught:
        read(tmp_path, text)
    return caught.value.message.replace(f"{tmp_path}/", "")


def test_a_table_has_a_row_for_each_layer_and_type(tmp_path):
    rows = read(tmp_path, TABLE)
    assert [(row.layer.name, row.gpu_type, row.layer.forward_s, row.layer.backward_s) for row in rows] == [
        ("conv", "V100", 0.1, 0.2),
        ("conv", "K80", 0.3, 0.6),
        ("fc", "V100", 0.01, 0.02),
        ("fc", "K80", 0.1, 0.1),
    ]
    layers = [row.layer for row in rows[1:3]]
    assert [(one.activation_bytes, one.parameter_bytes, one.held_bytes) for one in layers] == [
        (100, 10, None),
        (4, 1000, None),
    ]
    assert rows[2].place.line == 4


def test_a_workspace_is_one_of_the_bytes_that_may_be_given(tmp_path):
    rows = read(tmp_path, f"{HEADER},workspace_bytes\na,V,1,2,3,4,5\nb,V,1,2,3,4,\n")
    assert [row.layer.workspace_bytes for row in rows] == [5, 0]
    text = refused(tmp_path, f"{HEADER},workspace_bytes\na,V,1,2,3,4,-5\n")
    assert "layers:2: workspace_bytes: must be a whole number" in text


def test_types_and_held_bytes_may_be_left_out(tmp_path):
    text = "layer,forward_s,backward_s,activation_bytes,parameter_bytes,held_bytes\na,1,2,3,4,5\nb,1,2,3,4,\n"
    rows = read(tmp_path, text)
    assert [(row.gpu_type, row.layer.held_bytes) for row in rows] == [(None, 5), (None, None)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("0.3,0.6", "-0.3,0.6"), "layers:3: forward_s: must be a number of seconds, at least 0, got '-0.3'"),
        (("0.3,0.6", "0.3,nan"), "layers:3: backward_s: must be a number of seconds, at least 0, got 'nan'"),
        (
            ("4,1000\nfc,K80", "4.5,1000\nfc,K80"),
            "layers:4: activation_bytes: must be a whole number from 0 to 999,999,999,999,999",
        ),
        (("fc,K80", "fc,V100"), "layers:5: layer 'fc' on V100 is already in line 4"),
        (
            ("0.1,0.1,4", "0.1,0.1,5"),
            "layers:5: activation_bytes: must be the same in all rows of layer 'fc'",
        ),
        (("fc,K80,0.1,0.1,4,1000\n", ""), "layers:4: layer 'fc' has no row for gpu_type K80"),
        (("fc,K80", "fc,"), "layers:2: layer 'conv' has no row for gpu_type (empty)"),
        (("fc,K80", ",K80"), "layers:5: layer: must be printable text"),
        (("0.1,0.1,4", "0.1,4"), "layers:5: has 5 cells, the header has 6"),
        (("backward_s", "back_s"), "layers:1: column 'backward_s' is missing"),
        ((TABLE, ""), "layers:1: is empty"),
        ((TABLE, HEADER), "layers:1: has no rows below its header"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, change, message):
    assert message in refused(tmp_path, TABLE.replace(*change))


NODE = (
    "{} -- {} -- forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}\n"
)
RESIDUAL = (
    NODE.format("in", "Input", 5, 0, 7, 0)
    + NODE.format("c", "Conv2d(1, 2)", 1000, 2000, 40, 8)
    + NODE.format("r", "ReLU(inplace)", 1, 1, 40, 0)
    + NODE.format("b", "Conv2d(2, 2)", 10, 20, 30, 4)
    + NODE.format("add", "Add()", 0, 0, 30, 0)
    + "\tin -- c\n\tc -- r\n\tr -- b\n\tr -- add\n\tb -- add"
)


def test_a_graph_becomes_a_chain(tmp_path):
    rows = read(tmp_path, RESIDUAL)
    assert [row.layer.name for row in rows] == ["c Conv2d", "r ReLU", "b Conv2d", "add Add"]
    assert (rows[0].layer.forward_s, rows[0].layer.backward_s, rows[0].layer.parameter_bytes) == (1.0, 2.0, 8)
    assert [row.gpu_type for row in rows] == [None] * 4


def test_a_skip_connection_is_paid_at_every_cut_it_spans(tmp_path):
    assert [row.layer.activation_bytes for row in read(tmp_path, RESIDUAL)] == [40, 40, 40 + 30, 30]


def test_what_is_done_in_place_keeps_no_bytes_of_its_own(tmp_path):
    assert [row.layer.held_bytes for row in read(tmp_path, RESIDUAL)] == [40, 0, 30, 30]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("\tb -- add", "\tb -- add\n\tadd -- c"), "layers:11: edge closes a cycle: "),
        (("\tb -- add", "\tb -- b"), "layers:10: edge closes a cycle: b -- b"),
        (("\tb -- add", "\tb -- sum"), "layers:10: edge names node 'sum', which has no line of its own"),
        (
            ("forward_compute_time=10,", "forward_compute_time=-1,"),
            "layers:4: forward_compute_time: must be a number",
        ),
        (("activation_size=30,", "activation_size=much,"), "layers:4: activation_size: must be a number"),
        (("backward_compute_time=20, ", ""), "layers:4: backward_compute_time is missing"),
        (("\nb -- Conv2d", "\nc -- Conv2d"), "layers:4: node c is already in line 2"),
        (("\tb -- add", "\tb --> add"), "layers:10: is neither NODE -- WHAT -- VALUES nor NODE -- NODE"),
        ((RESIDUAL[RESIDUAL.index("\nc --") :], ""), "layers:1: has no layers"),
    ],
)
def test_a_wrong_graph_is_refused(tmp_path, change, message):
    assert message in refused(tmp_path, RESIDUAL.replace(*change))


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 12))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    sizes = draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
    names = draw(st.permutations([f"n{number}" for number in range(count)]))
    return names, sizes, edges


@settings(max_examples=50)
@given(graphs())
def test_cuts_cost_what_is_still_needed(tmp_path_factory, graph):
    names, sizes, edges = graph
    lines = [NODE.format(name, "Op", 1, 1, size, 1) for name, size in zip(names, sizes, strict=True)]
    lines += [f"\t{names[a]} -- {names[b]}\n" for a, b in edges]
    rows = read(tmp_path_factory.getbasetemp(), "".join(lines))
    at = {row.layer.name.split()[0]: number for number, row in enumerate(rows)}
    assert sorted(at) == sorted(names)
    assert all(at[names[a]] < at[names[b]] for a, b in edges)
    for number, row in enumerate(rows[:-1]):
        over = {a for a, b in edges if at[names[a]] <= number < at[names[b]]}
        assert row.layer.activation_bytes == sum(sizes[a] for a in over)


def test_an_optimizer_without_a_size_has_that_of_momentum(tmp_path):
    rows = read(tmp_path, f"{HEADER},optimizer_bytes\na,V,1,2,3,4,0\nb,V,1,2,3,4,\n")
    assert [row.layer.optimizer_bytes for row in rows] == [0, None]
    assert measured_profile(rows).slot_bytes.tolist() == [0, 4]
