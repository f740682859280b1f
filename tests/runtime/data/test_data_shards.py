"""Shards of the packages that people stream from: each sample once, on several ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from ensembles import sequences
from hypothesis import given
from hypothesis import strategies as st

from hetctl.runtime.data.input_pipeline import ShardLoader
from hetctl.runtime.data.sampler import Stream, epoch_order, parts_of
from hetctl.runtime.data.shards import ShardPlan, ShardReader, Shards, ShardSource
from hetctl.runtime.data.sources import as_sources

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def trained(plan, chunks, lanes, size, total):
    """Take chunks from a plan; count the samples."""
    seen = Counter()
    for _ in range(chunks):
        for lane, count in enumerate(parts_of(min(size, total - plan.start), (1,) * lanes)):
            for span in plan.assign(lane, count):
                seen.update((span.shard, number) for number in range(span.start, span.stop))
    return seen


@given(st.data(), SIZES, st.integers(1, 6), st.integers(1, 6), st.integers(1, 20))
def test_other_lanes_go_on_to_the_sample(data, sizes, before, after, chunk):
    total = sum(sizes)
    chunks = -(-total // chunk)
    stop = data.draw(st.integers(0, chunks))
    plan = ShardPlan((7, 3), sizes, before)
    seen = trained(plan, stop, before, chunk, total)
    assert plan.order[:2] == (7, 3)
    resumed = ShardPlan(plan.order, sizes, after)
    assert resumed.start == plan.start == seen.total()
    seen += trained(resumed, chunks, after, chunk, total)
    assert seen == Counter((shard, number) for shard, size in enumerate(sizes) for number in range(size))
    assert resumed.order == (7, 3, len(sizes))


def test_lanes_read_shards_of_their_own_until_none_is_left():
    one, two, three = epoch_order(3, 7, 1).tolist()
    plan = ShardPlan((7, 1), [10, 10, 10], 2)
    assert [span.shard for lane in (0, 1) for span in plan.assign(lane, 4)] == [one, two]
    copy = plan.copy()
    assert [(s.shard, s.start, s.stop) for s in plan.assign(0, 8)] == [(one, 4, 10), (three, 0, 2)]
    # The second half of what the other lane has left.
    plan.assign(1, 6)
    assert [(s.shard, s.start, s.stop) for s in plan.assign(1, 2)] == [(three, 6, 8)]
    assert copy.start == 8


def test_a_reader_goes_back_within_what_it_keeps():
    opened = []

    def read(shard):
        opened.append(shard)
        return ((number, number) for number in range(50))

    reader = ShardReader(ShardSource(Shards([0], read, 50), "training"), 0)
    opened.clear()
    places = [(0, 20, 80), (4, 5, 4), (3, 4, 4), (30, 40, 20), (32, 50, 20), (10, 12, 20)]
    for start, stop, kept in places:
        assert [x for x, _ in reader.read(start, stop, kept)] == list(range(start, stop))
    assert len(opened) == 3


# WebDataset leaves it to the garbage collector to close a tar that was read to its end.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "package"), [("webdataset", "webdataset"), ("tfrecord", "tensorflow"), ("stream", "datasets")]
)
def test_each_sample_of_a_package_is_trained_once(kind, package, tmp_path):
    pytest.importorskip(package)
    sequences.write_shards(tmp_path / kind)
    training, validation = as_sources(sequences.input_fn(str(tmp_path / kind)))
    for source, first in ((training, 0), (validation, 1000)):
        stream = Stream(len(source), 16, 5, ranks=2)
        loaders = [
            ShardLoader(source, Stream(stream.samples, 16, 5, rank=rank, ranks=2), 60.0) for rank in (0, 1)
        ]
        seen = Counter(
            number
            for loader in loaders
            for (x, y), _ in loader.batches(1, 0)
            for number in x["number"].tolist()
            if len(y) == len(x["words"])
        )
        assert seen == Counter(range(first, first + len(source)))
        for loader in loaders:
            loader.close()
