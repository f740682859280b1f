"""Mappings of arrays as inputs become records, and records mappings of arrays."""

import numpy as np
import pytest

from hetctl.model.errors import BadInputError
from hetctl.partitions import read
from hetctl.runtime.data.named_arrays import NamedArrays, fields_of, refuse_named
from hetctl.runtime.data.partition_files import ARRAYS, described, write
from hetctl.runtime.data.partitioned_data import joined
from hetctl.runtime.data.sources import as_source, as_sources
from hetctl.runtime.data.write_partitions import DividedSamples
from hetctl.runtime.worker.hop_resources import _bytes_of

INPUTS = {
    "image": np.arange(60, dtype=np.float32).reshape(10, 3, 2),
    "age": np.arange(10) * 1.5,
    "sex": np.arange(10) % 2 == 0,
}
Y = np.arange(10)


def equal(records, numbers):
    fields = fields_of(records)
    assert fields.keys() == INPUTS.keys()
    for name, values in INPUTS.items():
        assert fields[name].dtype == values.dtype
        assert fields[name].flags.c_contiguous
        assert fields[name].flags.aligned
        np.testing.assert_array_equal(fields[name], values[numbers])


class NamedSamples:
    def __len__(self):
        return len(Y)

    def __getitem__(self, number):
        return {name: values[number] for name, values in INPUTS.items()}, Y[number]


@pytest.mark.parametrize("value", [(INPUTS, Y), NamedSamples()], ids=["arrays", "dataset"])
def test_samples_of_all_kinds_have_all_fields(value):
    source = as_source(value, "training")
    assert len(source) == 10
    for number in (7, 0):
        x, y = source.prepare(number)
        equal(x, number)
        assert y == number


def test_rows_come_in_the_order_asked_for():
    source = as_source((INPUTS, Y), "training")
    for numbers in ([4, 0, 9, 4], []):
        equal(source.x[np.array(numbers, int)], np.array(numbers, int))
    equal(joined([source]).x, np.arange(10))


@pytest.mark.parametrize("value", [(INPUTS, Y), NamedSamples()], ids=["arrays", "dataset"])
def test_equal_samples_give_equal_parts(value, tmp_path):
    numbers = np.array([3, 8, 1])
    divided = DividedSamples(as_source(value, "training"), (numbers,))
    first, again = (dict(zip(ARRAYS, divided.of(0) * 2, strict=True)) for _ in range(2))
    assert described(first) == described(again)
    with (tmp_path / "0.npz").open("wb") as file:
        write(file, first)
    (x, y), _ = read(tmp_path / "0.npz")
    source = as_source((x, y), "training")
    equal(source.x[np.array([2, 0])], [1, 3])


def test_arrays_of_one_input_stay_as_they_are():
    x = np.ones((2, 3))
    assert fields_of(x) is x
    refuse_named(x, "a pipeline")


def test_some_of_the_inputs_may_be_on_the_disk(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["image"] = INPUTS["image"]
    with h5py.File(tmp_path / "a.h5", "r") as file:
        source = as_source(({**INPUTS, "image": file["image"]}, Y), "training")
        equal(source.x[np.array([8, 1, 8])], [8, 1, 8])


def test_their_memory_counts_where_partitions_are_kept():
    source = as_source((INPUTS, Y), "training")
    assert _bytes_of([(source, source)]) == sum(array.nbytes for array in (*INPUTS.values(), Y))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (({"a": Y, "b": Y[:9]}, Y), "arrays of x of training have different lengths: a 10, b 9"),
        (({"a": Y}, Y[:9]), "10 training inputs and 9 targets"),
        (({}, Y), r"x of training is a mapping with the keys \[\]"),
        (({1: Y}, Y), r"x of training is a mapping with the keys \[1\]"),
        (({"a": 3}, Y), "a of x of training is int"),
        ((Y, {"a": Y}), "y of training is a mapping"),
        (({"a": np.array([None] * 10)}, Y), "x of training sample 0 is of type .* no fixed size"),
    ],
)
def test_other_mappings_are_refused(data, said):
    with pytest.raises(BadInputError, match=said):
        as_sources((data, data))


def test_a_pipeline_refuses_named_inputs_by_their_names():
    with pytest.raises(BadInputError, match="the inputs image, age, sex, and a pipeline takes one array"):
        refuse_named(NamedArrays(INPUTS, "x")[[0]], "a pipeline")
