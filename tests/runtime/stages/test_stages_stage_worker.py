"""Stages on real processes: their weights, the staleness of these, stops, and checkpoints of waves."""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from numpy_chain import DenseChain
from stage_ranks import layout_of, run_ranks
from wave_program import WaveProgram, equal_to

from hetctl.methods.pipeline.wsp import Bounds, staleness, violations
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.stages.stage_worker import EpochPart, PartHooks, StageWorker
from hetctl.runtime.worker.group import all_gather

SAMPLES, BATCH, SEED = 101, 5, 3
CHAIN = DenseChain([6, 8, 8, 8, 2])
RNG = np.random.default_rng(0)
X = RNG.standard_normal((SAMPLES, 6))
Y = np.tanh(X[:, :2])


def loader_of(worker, workers, count=SAMPLES):
    stream = Stream(count, BATCH * workers, SEED, rank=worker, ranks=workers)
    return ArrayLoader(ArraySource(X[:count], Y[:count], "training"), stream)


def batches_of(worker, workers, epoch=1, count=SAMPLES):
    batches = loader_of(worker, workers, count).batches(epoch, 0)
    return [samples for samples, chunk in batches if len(chunk.numbers)]


class SlowStage:
    """A stage whose forward passes take longer than others'."""

    def __init__(self, network, seconds):
        self._network, self._seconds = network, seconds

    def __getattr__(self, name):
        return getattr(self._network, name)

    def forward(self, minibatch, version, inputs):
        time.sleep(self._seconds(minibatch))
        return self._network.forward(minibatch, version, inputs)


def trained(layout, epochs=1, hooks=None, slow=None, evaluates=False, count=SAMPLES):
    """Train on real ranks; return by rank what the stages saved, logged and returned."""

    def work(rank):
        worker, stage = layout.place_of(rank.transport.rank)
        plan = layout.workers[worker][stage]
        network = CHAIN.build(range(plan.first, plan.last + 1))
        if slow and worker == slow[0] and stage == 0:
            network = SlowStage(network, slow[1])
        records, results, saved, first_wave = [], [], [], 0
        own = StageWorker(network, layout, rank.transport, records.append)
        own.waves.begin()
        scores = None
        for epoch in range(1, epochs + 1):
            part = EpochPart(epoch - 1, epoch, 0, count, BATCH * len(layout.workers), first_wave)
            feed = loader_of(worker, len(layout.workers), count).batches(epoch, 0) if stage == 0 else None
            given = hooks(saved) if hooks else PartHooks()
            run = own.train(part, feed, given)
            results.append(SimpleNamespace(minibatches=run.minibatches, times=run.times))
            first_wave += run.waves
            all_gather(rank.group, True)
            if evaluates:
                held_out = (
                    ((X[at::7], Y[at::7]), len(X[at::7])) for at in range(worker, 7, len(layout.workers))
                )
                scores = own.evaluate(held_out if stage == 0 else None)
        return network.save(), records, results, saved, scores

    return run_ranks(layout, work, nodes=["node1", "node2"] * layout.layers)


def weights_by(layout, records, batches):
    """Return the weights of the sequential program after one part."""
    program = WaveProgram(layout, CHAIN.build)
    program.train(records, batches)
    stages = program.stages[0]
    return {
        name: weight
        for stage in stages
        for name, weight in zip(stage.weight_names, stage.weights(), strict=True)
    }


def final_weights(ranks, layout, worker=0):
    found = {}
    for plan in layout.workers[worker]:
        found.update(ranks[plan.rank][0])
    return found


def test_one_minibatch_in_flight_equals_training_in_one_process():
    layout = layout_of(1, 3, 4, in_flight=1)
    ranks = trained(layout, epochs=2)
    whole = CHAIN.build(range(4))
    for epoch in (1, 2):
        for number, (x, y) in enumerate(batches_of(0, 1, epoch)):
            whole.forward_backward(number, whole.version(), x, y)
            whole.update(number)
    saved = final_weights(ranks, layout)
    assert all(np.array_equal(saved[name], array) for name, array in whole.save().items())


def test_waves_of_one_minibatch_equal_data_parallel_steps():
    layout, count = layout_of(2, 2, 4, in_flight=1), 100
    saved = final_weights(trained(layout, epochs=2, count=count), layout)
    # Updates are added: together they are the step of a group whose rate grows with its GPUs.
    group = CHAIN.build(range(4))
    group.scale_learning_rate(2)
    for epoch in (1, 2):
        own = (batches_of(worker, 2, epoch, count) for worker in (0, 1))
        for number, batches in enumerate(zip(*own, strict=True)):
            x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
            group.forward_backward(number, group.version(), x, y)
            group.update(number)
    assert equal_to(dict(zip(group.weight_names, group.weights(), strict=True)), saved, 1e-12) == []


@pytest.mark.parametrize(
    ("workers", "stages", "in_flight", "distance"),
    [(1, 4, 3, 0), (2, 2, 2, 0), (2, 2, 4, 2), (3, 2, 3, 1), (2, 1, 1, 0), (2, 1, 3, 1)],
)
def test_weights_are_those_of_a_program_that_follows_the_log(workers, stages, in_flight, distance):
    layout = layout_of(workers, stages, 4, in_flight, distance)
    ranks = trained(layout)
    records = [record for rank in ranks for record in rank[1]]
    bounds = Bounds(in_flight, distance)
    assert violations(records, bounds) == []
    batches = [batches_of(worker, workers) for worker in range(workers)]
    assert sum(len(record.completed) for record in records) == stages * sum(map(len, batches))
    expected = weights_by(layout, records, batches)
    for worker in range(workers):
        assert equal_to(expected, final_weights(ranks, layout, worker), 1e-12) == []


def test_virtual_workers_end_each_epoch_with_equal_weights():
    layout = layout_of(3, 2, 4, in_flight=2, distance=1)
    ranks = trained(layout, epochs=2, evaluates=True)
    first = final_weights(ranks, layout)
    for worker in (1, 2):
        own = final_weights(ranks, layout, worker)
        shared = [name for name in own if name.endswith(("W", "b", "mean"))]
        assert len(shared) == 12
        assert all(np.array_equal(own[name], first[name]) for name in shared)
    scores = [ranks[stages[-1].rank][4] for stages in layout.workers]
    whole = CHAIN.build(range(4))
    whole.restore(first)
    whole.score(X, Y)
    mean = sum(one["val_loss"] * count for one, count in scores) / sum(count for _, count in scores)
    assert mean == pytest.approx(whole.scores()[0]["val_loss"])
    assert sum(count for _, count in scores) == SAMPLES


class Weights(list):
    """A version of weights, of which it is known whether it is in use."""


class WatchedStage(SlowStage):
    """A stage that notes at each update whether the newest version is still in use."""

    def __init__(self, network):
        super().__init__(network, lambda _: 0.0)
        self.in_use = []

    def version(self):
        newest = Weights(self._network.version())
        self._newest = weakref.ref(newest)
        return newest

    def update(self, minibatch):
        self.in_use.append(self._newest() is not None)
        self._network.update(minibatch)


def test_the_last_stage_updates_weights_that_nothing_uses():
    layout = layout_of(1, 2, 4, in_flight=2)

    def work(rank):
        plan = layout.workers[0][rank.transport.rank]
        network = WatchedStage(CHAIN.build(range(plan.first, plan.last + 1)))
        feed = loader_of(0, 1).batches(1, 0) if rank.transport.rank == 0 else None
        StageWorker(network, layout, rank.transport).train(EpochPart(0, 1, 0, SAMPLES, BATCH, 0), feed)
        return network.in_use

    first, last = run_ranks(layout, work)
    # The first stage has the next minibatch under way, with the weights that are updated.
    assert (any(first), any(last)) == (True, False)


@pytest.mark.parametrize("distance", [0, 2])
def test_a_slow_virtual_worker_lets_others_reach_the_bound(distance):
    layout = layout_of(2, 2, 4, in_flight=2, distance=distance)
    ranks = trained(layout, slow=(1, lambda _: 0.02))
    fast = [record for rank in ranks[:2] for record in rank[1]]
    bounds = Bounds(2, distance)
    assert violations(fast, bounds) == []
    assert staleness(fast, bounds)[1] == bounds.global_staleness
    assert ranks[0][2][0].times["wave_wait_s"] > 0.02


def test_a_stop_ends_all_virtual_workers_after_the_same_wave():
    layout = layout_of(2, 2, 4, in_flight=2, distance=1)
    seen = []

    def hooks(_saved):
        return PartHooks(should_stop=lambda: len(seen) >= 3, on_step=lambda *step: seen.append(step))

    ranks = trained(layout, hooks=hooks)
    (minibatches,) = {rank[2][0].minibatches for rank in ranks}
    assert 3 <= minibatches < len(batches_of(0, 2))
    assert minibatches % 2 == 0
    records = [record for rank in ranks for record in rank[1]]
    assert sum(len(record.completed) for record in records) == 2 * 2 * minibatches
    batches = [batches_of(worker, 2)[:minibatches] for worker in (0, 1)]
    expected = weights_by(layout, records, batches)
    assert equal_to(expected, final_weights(ranks, layout), 1e-12) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stop_at_the_beginning_ends_what_had_begun(workers):
    layout = layout_of(workers, 2, 4, in_flight=2, distance=1)
    ranks = trained(layout, hooks=lambda _saved: PartHooks(should_stop=lambda: True))
    (minibatches,) = {rank[2][0].minibatches for rank in ranks}
    # The other virtual worker may have begun as many as D permits before it was told.
    assert minibatches in ((0,), (0, 2, 4, 6))[workers - 1]
    if not minibatches:
        found, fresh = final_weights(ranks, layout), CHAIN.build(range(4)).save()
        assert all(np.array_equal(found[name], array) for name, array in fresh.items())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_saved_wave_has_all_updates_until_its_end(workers):
    layout = layout_of(workers, 2, 4, in_flight=2, distance=1)

    def hooks(saved):
        def keep(minibatch, arrays):
            saved.append((minibatch, arrays))

        return PartHooks(should_save=lambda: True, save=keep)

    ranks = trained(layout, hooks=hooks)
    records = [record for rank in ranks for record in rank[1]]
    saves = [ranks[plan.rank][3] for plan in layout.workers[0]]
    numbers = [minibatch for minibatch, _ in saves[0]]
    assert numbers == [minibatch for minibatch, _ in saves[1]]
    assert numbers == list(range(2, len(batches_of(0, workers)), 2))
    for at in (0, len(numbers) - 1):
        saved = {**saves[0][at][1], **saves[1][at][1]}
        batches = [batches_of(worker, workers) for worker in range(workers)]
        program = WaveProgram(layout, CHAIN.build)
        program.train(records, batches)
        for stage in (0, 1):
            expected = program.weights(0, stage, numbers[at], numbers[at] // 2)
            names = program.stages[0][stage].weight_names
            assert equal_to(dict(zip(names, expected, strict=True)), saved, 1e-12) == []
