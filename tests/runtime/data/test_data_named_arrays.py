"""Inputs of several named arrays, and samples of any kind in batches."""

import numpy as np
import pytest
from ensembles import sequences

from hetctl.model.errors import BadInputError
from hetctl.partitions import read
from hetctl.runtime.data.named_arrays import NamedArrays, fields_of, refuse_named
from hetctl.runtime.data.partition_files import ARRAYS, described, write
from hetctl.runtime.data.partitioned_data import joined
from hetctl.runtime.data.sources import as_source, as_sources
from hetctl.runtime.data.write_partitions import DividedSamples
from hetctl.runtime.worker.hop_resources import _bytes_of
from hetctl.samples import Collated

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


PAIRS = [(np.full(2, number, np.float32), number) for number in range(6)]


def stacked(samples):
    return np.stack([x for x, _ in samples]), np.array([y for _, y in samples])


@pytest.mark.parametrize("kind", ["kind://map-style", "kind://huggingface"])
def test_mappings_of_several_lengths_become_padded_rows(kind):
    training, _ = sequences.input_fn(kind)
    source = as_source(training, "training")
    assert len(source) == sequences.SAMPLES
    for numbers in ([7], [3, 50, 3, 100]):
        x, y = source.batch(numbers)
        wanted, labels = sequences.collate([sequences.sequence(number) for number in numbers])
        fields = fields_of(x)
        assert fields.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_array_equal(fields[name], wanted[name])
        assert y.tolist() == labels.tolist()


def test_tensors_of_pytorch_are_taken():
    from torch.utils.data import Subset, default_collate

    x, y = as_source(Collated(Subset(PAIRS, [5, 4, 3, 2]), default_collate), "training").batch([0, 3])
    assert (x.tolist(), y.tolist()) == ([[5, 5], [2, 2]], [5, 2])


def test_a_collator_of_hugging_face_is_taken():
    tokenizers, transformers = map(pytest.importorskip, ("tokenizers", "transformers"))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "b": 2}, "a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    texts = [{**tokenizer(text, return_token_type_ids=False), "label": len(text)} for text in ("b", "a b b")]
    padded = transformers.DataCollatorWithPadding(tokenizer)

    def collate(samples):
        batch = padded(samples)
        labels = batch.pop("labels")
        return batch, labels

    x, y = as_source(Collated(texts, collate), "training").batch([1, 0])
    assert x["input_ids"].tolist() == [[1, 2, 2], [2, 0, 0]]
    assert x["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert y.tolist() == [5, 1]


class Fetched(list):
    """A dataset that is read a batch at a time."""

    def __getitem__(self, _number):
        raise AssertionError

    def __getitems__(self, numbers):
        return [list.__getitem__(self, number) for number in numbers]


def test_a_dataset_may_be_read_a_batch_at_a_time():
    x, _ = as_source(Collated(Fetched(PAIRS), stacked), "training").batch([4, 1])
    assert x[:, 0].tolist() == [4, 1]


BAD = {
    r"samples 0 is dict, not a pair \(x, y\)": lambda samples: {"x": np.zeros(len(samples))},
    r"x of validation samples 0 has shape \(2,\), with 1": lambda _: (np.zeros(2), np.zeros(1)),
    r"a of validation samples 0 has shape \(\)": lambda _: ({"a": 1.0}, np.zeros(1)),
    "y of validation samples 0 is a mapping": lambda _: (np.zeros(1), {"y": np.zeros(1)}),
    "of type object": lambda _: (np.array([None]), np.zeros(1)),
    "collating validation samples 0: KeyError: 'words'": lambda _: {}["words"],
}


@pytest.mark.parametrize("problem", BAD)
def test_what_is_no_batch_is_refused_by_its_samples(problem):
    with pytest.raises(BadInputError, match=problem) as caught:
        as_source(Collated(PAIRS, BAD[problem]), "validation")
    assert "collate_fn must return (x, y)" in caught.value.hint


def test_a_failure_names_a_few_samples_of_the_batch():
    def collate(samples):
        assert len(samples) < 5
        return stacked(samples)

    with pytest.raises(BadInputError, match=r"training samples 0, 1, 2, 3, \.\.: AssertionError"):
        as_source(Collated(PAIRS, collate), "training").batch(range(5))


@pytest.mark.parametrize("dataset", [iter(PAIRS), 7], ids=["iterator", "number"])
def test_samples_without_numbers_are_refused(dataset):
    with pytest.raises(BadInputError, match="cannot be read by number"):
        Collated(dataset, stacked)


def test_an_empty_dataset_and_no_function_are_refused():
    with pytest.raises(BadInputError, match="returned 0 training samples"):
        as_source(Collated([], stacked), "training")
    with pytest.raises(BadInputError, match="collate_fn of Collated is str"):
        Collated(PAIRS, "stacked")
