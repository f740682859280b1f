"""Batches come in the order of their stream from any loader, and errors have their cause."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numbered_samples import NumberedSamples, check_samples
from workbench import wait_for

from hetctl.model.errors import HetctlError, TransientInputError
from hetctl.model.run import CACHED
from hetctl.model.site import Timeouts
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.input_pipeline import Sharing, open_pipeline
from hetctl.runtime.data.loaders import (
    ArrayLoader,
    LockstepLoader,
    PreprocessorPool,
    RingLoader,
    slots_of,
)
from hetctl.runtime.data.preprocessors import Preprocessors
from hetctl.runtime.data.round_inputs import Lockstep
from hetctl.runtime.data.sampler import Stream, epoch_order
from hetctl.runtime.data.sharing import node_folder
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.worker.group import Group

SEED = 7


@pytest.fixture
def loader_of(tmp_path):
    """Return a function that opens a loader with its own preprocessors; it is closed after the test."""
    made = []

    def make(source, chunk=4, count=2, rank=0, ranks=1, **waits):
        stream = Stream(len(source), chunk, SEED, rank=rank, ranks=ranks)
        made.append(RingLoader(stream, PreprocessorPool(Preprocessors(source, count), tmp_path, **waits)))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
        loader._pool.preprocessors.stop()


def copied(batches):
    return [(x.copy(), y.copy(), chunk) for (x, y), chunk in batches]


@pytest.mark.parametrize("count", [1, 3])
def test_batches_are_those_that_one_process_would_prepare(loader_of, count, tmp_path):
    loader = loader_of(NumberedSamples(10), count=count)
    for epoch in (1, 2, 3):
        batches = copied(loader.batches(epoch, 0))
        assert [(chunk.start, chunk.stop) for *_, chunk in batches] == [(0, 4), (4, 8), (8, 10)]
        x, y = (np.concatenate(parts) for parts in list(zip(*batches, strict=True))[:2])
        check_samples(x, y, epoch_order(10, SEED, epoch), SEED, epoch)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind, even if we are killed now


CHANGES = {
    "few samples": [(10, 10), (11, 9), (12, 8), (11, 9), (10, 10), (9, 11)],
    "many samples": [(10, 10), (17, 3), (4, 16), (4, 16), (19, 1)],
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("samples", [100, 87])
def test_changing_sizes_give_the_samples_of_one_process(loader_of, changes, samples):
    source = NumberedSamples(samples)
    ranks = [loader_of(source, chunk=20, rank=rank, ranks=2) for rank in range(2)]
    step = 0
    for epoch in (1, 2):
        order = epoch_order(samples, SEED, epoch)
        parts = [rank.batches(epoch, 0) for rank in ranks]
        for start in range(0, samples, 20):
            sizes = changes[step % len(changes)]
            step += 1
            for rank in ranks:
                rank.split(sizes)
            # Views of the ring hold until the next batch of that rank.
            (one, first), (other, second) = (next(part) for part in parts)
            numbers = np.concatenate([first.numbers, second.numbers])
            assert sorted(numbers) == sorted(order[start : start + 20])
            if start + 20 <= samples:
                assert (len(first.numbers), len(second.numbers)) == sizes
            # A rank without samples has an example batch.
            held = [(part, len(chunk.numbers)) for part, chunk in ((one, first), (other, second))]
            x_of_both, y_of_both = (np.concatenate([p[i][:count] for p, count in held]) for i in (0, 1))
            check_samples(x_of_both, y_of_both, numbers, SEED, epoch)
        assert [next(part, None) for part in parts] == [None, None]


def test_small_changes_keep_what_preprocessors_have_prepared(loader_of):
    loader = loader_of(NumberedSamples(100), chunk=20, rank=0, ranks=2)
    parts = loader.batches(1, 0)
    next(parts)
    ring = loader._ring
    loader.split((11, 9))
    (x, _), chunk = next(parts)
    assert (loader._ring, len(x), len(chunk.numbers)) == (ring, 11, 11)
    loader.split((8, 12))
    (x, _), chunk = next(parts)
    assert (loader._ring, len(x)) == (ring, 8)
    assert not x.flags.owndata  # fewer samples are a view
    loader.split((15, 5))
    next(parts)
    assert loader._ring is not ring


def test_a_moved_sample_that_cannot_be_prepared_ends_training(loader_of):
    bad = int(epoch_order(80, SEED, 1)[40 + 38])
    loader = loader_of(NumberedSamples(80, bad=bad), chunk=40, rank=0, ranks=2)
    loader.split((30, 10))

    def train():
        for _ in loader.batches(1, 0):
            loader.split((32, 8))

    # Processes prepare ahead, so the error may come before the step that moves the sample.
    with pytest.raises(TransientInputError, match=f"preparing a sample: ValueError: sample {bad} is rotten"):
        train()


def test_an_interrupted_epoch_continues_in_its_middle(loader_of):
    whole = copied(loader_of(NumberedSamples(10)).batches(2, 0))
    rest = copied(loader_of(NumberedSamples(10)).batches(2, 4))
    assert [x.tolist() for x, *_ in rest] == [x.tolist() for x, *_ in whole[1:]]


def test_a_loader_restarts_at_the_position_of_training(loader_of):
    loader = loader_of(NumberedSamples(10))
    first = copied(loader.batches(1, 0))
    copied(loader.batches(2, 0))
    again = copied(loader.batches(1, 4))
    assert [y.tolist() for _, y, _ in again] == [y.tolist() for _, y, _ in first[1:]]


def test_preprocessors_go_on_from_epoch_to_epoch(loader_of):
    loader, rings = loader_of(NumberedSamples(10)), set()
    for epoch in (1, 2, 3):
        batches = Batches(loader, epoch, 0, Group(), lambda: False)
        assert [y for _, part in batches for y in part.tolist()] == epoch_order(10, SEED, epoch).tolist()
        rings.add(id(loader._ring))
    assert len(rings) == 1


def test_a_rank_without_a_share_of_a_batch_gets_one_sample(loader_of):
    shares = [copied(loader_of(NumberedSamples(9), rank=rank, ranks=3).batches(1, 0)) for rank in range(3)]
    last = [share[-1] for share in shares]
    assert [len(y) for _, y, _ in last] == [1, 1, 1]
    assert [len(chunk.numbers) for *_, chunk in last] == [1, 0, 0]
    whole = copied(loader_of(NumberedSamples(9)).batches(1, 0))
    for index, (x, *_) in enumerate(whole[:-1]):
        assert np.concatenate([share[index][0] for share in shares]).tolist() == x.tolist()


def test_arrays_need_no_preprocessors():
    x, y = np.arange(10.0), np.arange(10) ** 2
    loader = ArrayLoader(ArraySource(x, y, "training"), Stream(10, 4, SEED, rank=1, ranks=2))
    batches = copied(loader.batches(1, 4))
    order = epoch_order(10, SEED, 1)
    assert [y.tolist() for _, y, _ in batches] == [(order[6:8] ** 2).tolist(), (order[9:] ** 2).tolist()]


def test_an_unpreparable_sample_ends_training_with_its_cause(loader_of, capfd):
    loader = loader_of(NumberedSamples(10, bad=3))
    with pytest.raises(TransientInputError, match="ValueError: sample 3 is rotten"):
        copied(loader.batches(1, 0))
    assert "_read" in capfd.readouterr().err


def test_a_killed_preprocessor_ends_training(loader_of):
    # More samples than are prepared ahead.
    loader = loader_of(NumberedSamples(10_000), count=1, check_s=0.05)
    batches = loader.batches(1, 0)
    next(batches)
    (process,) = loader._pool.preprocessors._processes
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(HetctlError, match="preprocessor was killed"):
        copied(batches)


def test_a_preprocessor_that_hangs_is_given_up(loader_of):
    loader = loader_of(NumberedSamples(10), count=1, timeouts=Timeouts(samples_s=0.2))
    (process,) = loader._pool.preprocessors._processes
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(HetctlError, match=r"did not answer in 0\.2 s"):
        next(loader.batches(1, 0))


def test_preprocessors_end_with_their_trainer(tmp_path):
    pid_file = tmp_path / "pid"
    if (trainer := os.fork()) == 0:
        source = NumberedSamples(10)
        made = Preprocessors(source, 1)
        pid_file.write_text(str(made._processes[0].pid))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(trainer, 0)
    end = time.monotonic() + 60
    while Path(f"/proc/{pid_file.read_text()}/status").exists() and "State:\tZ" not in _status(pid_file):
        assert time.monotonic() < end
        time.sleep(0.02)


def _status(pid_file):
    try:
        return Path(f"/proc/{pid_file.read_text()}/status").read_text()
    except OSError:
        return "State:\tZ"


class SlowRows(NumberedSamples):
    """Samples that take a hundredth of a second each, and half of it again for the random part."""

    def prepare(self, number):
        time.sleep(0.01)
        return super().prepare(number)

    def augment(self, x, rng, out=None):
        time.sleep(0.005)
        return super().augment(x, rng, out)


def test_the_throughput_of_a_preprocessor_is_seen_while_several_work(loader_of):
    loader = loader_of(SlowRows(30), count=3)
    batches = loader.batches(1, 0)
    next(batches)
    assert loader.preparation_rate is None
    copied(batches)
    # No sleep is shorter; nor is the sum of three processes shown, or a machine that stands still.
    assert 0 < loader.preparation_rate <= 1 / 0.015


def test_samples_from_the_store_of_a_node_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(node_folder, "MEMORY", tmp_path)
    with ExitStack() as stack:
        open_loader = open_pipeline(SlowRows(30), Sharing(CACHED), stack)
        loader = open_loader(Stream(30, 4, SEED))
        stack.callback(loader.close)
        copied(loader.batches(1, 0))
        first = loader.preparation_rate
        copied(loader.batches(2, 0))
        assert 0 < first <= 1 / 0.015
        assert loader.preparation_rate <= 1 / 0.015


def test_trainers_in_lockstep_know_the_throughput_of_their_leader(loader_of):
    leader, idle = loader_of(SlowRows(30)), loader_of(NumberedSamples(30))
    lockstep = LockstepLoader(Stream(30, 4, SEED), idle._pool, Lockstep("r.ring", SEED, 4, 4, 0, 1))
    assert lockstep.preparation_rate is None
    copied(leader.batches(1, 0))

    def is_known():
        # Processes still prepare the samples of later batches.
        leader._pool.share_rate()
        return lockstep.preparation_rate == leader.preparation_rate is not None

    wait_for(is_known)


def test_slots_hold_samples_ahead_within_the_memory_limit():
    assert slots_of(32, 2**20) == 64
    assert slots_of(32, 2**24) == 16
    assert slots_of(4096, 2**20) == 3
