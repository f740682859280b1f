"""Shards of the packages that people stream from: each sample once, on several ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from ensembles import sequences

from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.shard_loader import ShardLoader
from hetctl.runtime.data.sources import as_sources


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
