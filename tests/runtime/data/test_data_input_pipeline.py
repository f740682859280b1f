"""Members on a node share prepared samples, each in its own order."""

from __future__ import annotations

from contextlib import ExitStack
from multiprocessing import get_context

import numpy as np
import pytest
from numbered_samples import NumberedSamples, check_samples

from hetctl.model.errors import BadInputError
from hetctl.model.run import CACHED, NONE
from hetctl.runtime.data.input_pipeline import Sharing, open_pipeline
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import UNSHUFFLED, Stream, epoch_order
from hetctl.runtime.data.sharing import node_folder, store
from hetctl.runtime.data.sources import as_source

SAMPLES = 40


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(node_folder, "MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def trained(source, seed, mode, preprocessors=1, epochs=2):
    """Return the samples of a member in its epochs."""
    with ExitStack() as stack:
        open_loader = open_pipeline(source, Sharing(mode, "run", preprocessors), stack)
        loader = open_loader(Stream(len(source), 16, seed))
        stack.callback(loader.close)
        return [
            (np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches]))
            for epoch in range(1, epochs + 1)
            for batches in [[(x.copy(), y.copy()) for (x, y), _ in loader.batches(epoch, 0)]]
        ]


def check(seen, seed):
    for epoch, (x, y) in enumerate(seen, start=1):
        check_samples(x, y, epoch_order(SAMPLES, seed, epoch), seed, epoch)


@pytest.mark.parametrize("mode", [NONE, CACHED])
def test_members_see_their_own_orders_whether_they_share_or_not(tmp_path, mode):
    for seed in (3, 4):
        check(trained(NumberedSamples(SAMPLES, tmp_path / "log"), seed, mode, preprocessors=2), seed)


def member(log, seed, mode, barrier, results):
    with node_folder.node_folder("run"):  # as long as anybody trains
        barrier.wait()
        results.put((seed, trained(NumberedSamples(SAMPLES, log), seed, mode, preprocessors=2)))
        barrier.wait()


@pytest.mark.parametrize("mode", [NONE, CACHED])
def test_samples_prepared_by_one_member_serve_all(tmp_path, memory, mode):
    """Four members train two epochs each: without sharing a sample is prepared eight times, and ahead."""
    context = get_context("fork")
    barrier, results, log = context.Barrier(4), context.Queue(), tmp_path / "log"
    members = [context.Process(target=member, args=(log, seed, mode, barrier, results)) for seed in range(4)]
    for process in members:
        process.start()
    for seed, seen in [results.get(timeout=60) for _ in members]:
        check(seen, seed)
    for process in members:
        process.join()
    counts = NumberedSamples(SAMPLES, log).prepared()
    assert set(counts) == {1} if mode == CACHED else min(counts) >= 8
    assert list(memory.glob("hetctl-*/*")) == []


def test_members_prepare_their_own_samples_if_space_is_short(tmp_path, monkeypatch, capfd):
    def full(*_):
        raise BadInputError("there is no room")

    monkeypatch.setattr(store, "map_whole", full)
    source = NumberedSamples(SAMPLES, tmp_path / "log")
    check(trained(source, 3, CACHED), 3)
    assert min(source.prepared()) >= 2
    assert "samples are not shared: there is no room" in capfd.readouterr().err


def test_arrays_take_nothing_of_the_node(memory):
    source = as_source((np.arange(10.0), np.arange(10)), "training")
    with ExitStack() as stack:
        open_loader = open_pipeline(source, Sharing(CACHED, "run", 4), stack)
        assert isinstance(open_loader(Stream(10, 4, 3)), ArrayLoader)
    assert list(memory.iterdir()) == []


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("mode", [NONE, CACHED])
def test_validation_samples_are_equal_in_every_evaluation(tmp_path, mode):
    source = NumberedSamples(SAMPLES, tmp_path / "log")
    with ExitStack() as stack:
        open_loader = open_pipeline(source, Sharing(mode, "run", 1), stack, "validation")
        loader = open_loader(Stream(SAMPLES, 16, UNSHUFFLED))
        stack.callback(loader.close)
        evaluations = [[(x.copy(), y.copy()) for (x, y), _ in loader.batches(epoch, 0)] for epoch in (1, 2)]
    one, other = (np.concatenate([x for x, _ in batches]) for batches in evaluations)
    assert np.concatenate([y for _, y in evaluations[0]]).tolist() == list(range(SAMPLES))
    assert np.array_equal(one, other)
