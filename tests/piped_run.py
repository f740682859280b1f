"""Runs whose members train as pipelines, and the sequential program that follows their logs."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
from wave_program import WaveProgram, limited

from hetctl.app.pipeline import read_waves
from hetctl.methods.pipeline.wsp import Bounds, violations
from hetctl.model.pipelines import PipelineLayout
from hetctl.model.serialization import decode
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import streams_of
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import load_functions
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import events_in

LAYERS = """\
layer,forward_s,backward_s,activation_bytes,parameter_bytes
pause,0.002,0.0001,8192,0
first,0.002,0.004,3072,12480
tanh,0.0001,0.0001,3072,0
second,0.001,0.002,1024,1600
tanh2,0.0001,0.0001,1024,0
last,0.001,0.002,640,680
"""


def layouts_of(events, member):
    """Return the layouts of a member's steps, by round."""
    return {
        event.round: decode(PipelineLayout, event.data["pipeline"])
        for event in events
        if event.kind == "task_started" and event.data["member"] == member
    }


def part_of(record):
    """Return the part of an epoch that a record belongs to."""
    return record.round, record.epoch, record.position


def kept(parts):
    """Return the parts without those that a later round has begun anew, since no checkpoint had them."""
    found = []
    for place, records in reversed(parts):
        if not found or place[1:] < found[-1][0][1:]:
            found.append((place, records))
    return found[::-1]


class FollowedRun:
    """A member's run, followed by a sequential program.

    Attributes
    ----------
    epochs : list of int
        Numbers of the epochs with a part in the log, in order.
    """

    def __init__(self, folder, spec, name):
        self.folder, self.member = folder, spec.ensemble.member(name)
        self.functions = load_functions(spec.ensemble)
        self.framework = load_framework(spec.ensemble.framework)
        self.layouts = layouts_of(events_in(folder), name)
        records = sorted(read_waves(folder, name), key=part_of)
        self.parts = kept([(place, list(own)) for place, own in groupby(records, part_of)])
        self.samples, _ = self.functions.input_fn(spec.ensemble.data)
        self.program = None

    def build(self, layers):
        """Return a fresh stage, as a rank builds it."""
        self.framework.prepare((0,), None, self.member.seed)
        sample = self.samples[0][:1], self.samples[1][:1]
        return self.framework.chain(self.member, self.functions).build(layers, sample)

    def network(self):
        """Return the whole network, as a rank builds it that trains without others."""
        self.framework.prepare((0,), None, self.member.seed)
        sample = self.samples[0][:1], self.samples[1][:1]
        return self.framework.build(self.member, self.functions, Group(), sample)

    def all_batches(self, epoch):
        """Return the batches of an epoch of the whole network."""
        loader = self._loader(0, 1)
        return Batches(loader, epoch, 0, Group(), lambda: False)

    def assert_within_bounds(self):
        for (round_index, *_), records in self.parts:
            layout = self.layouts[round_index]
            assert violations(records, Bounds(layout.in_flight, layout.distance)) == []

    def follow(self):
        """Train all parts as the log says; return the last state of the first virtual worker."""
        last_round = None
        starts = [place for place, _ in self.parts] + [None]
        for (place, records), following in zip(self.parts, starts[1:], strict=True):
            layout = self.layouts[place[0]]
            if self.program is None:
                self.program = WaveProgram(layout, self.build)
            elif place[0] != last_round:
                self.program = self.program.restart(layout, self.build)
            last_round = place[0]
            self._train(layout, place, records, following)
        return self.program.saved()

    def _train(self, layout, place, records, following):
        """Train a part up to where the next one begins: what a killed rank trained later is lost."""
        _, epoch, position = place
        workers, count = len(layout.workers), len(self.samples[0])
        is_whole = following is None or following[1] > epoch
        end = count if is_whole else following[2]
        minibatches = -(-(end - position) // (self.member.batch_size * workers))
        batches = [self._batches(worker, workers, epoch, position)[:minibatches] for worker in range(workers)]
        self.program.train(limited(records, minibatches), batches)
        if is_whole:
            self.program.end_epoch()

    def _batches(self, worker, workers, epoch, position):
        loader = self._loader(worker, workers)
        return [samples for samples, chunk in loader.batches(epoch, position) if len(chunk.numbers)]

    def _loader(self, worker, workers):
        stream, _ = streams_of(self.member, len(self.samples[0]), 1, worker, workers)
        return ArrayLoader(ArraySource(*self.samples, "training"), stream)


def by_layer(network):
    """Return weights and slots of a PyTorch network under the names that stages save."""
    modules = dict(network._model.named_parameters())
    found = {}
    for name, parameter in modules.items():
        layer, _, place = name.partition(".")
        found[f"layer-{layer}/model/{place}"] = parameter.detach().numpy()
        for slot, value in network._parts.optimizer.state[parameter].items():
            found[f"layer-{layer}/slots/model.{place}/{slot}"] = value.numpy()
    return found


def follow_to(spec, folder, names, out):
    """Follow these members of a run in this process, and write the last state of each to a file."""
    for name in names:
        run = FollowedRun(RunFolder(folder), spec, name)
        run.assert_within_bounds()
        np.savez(out / f"{name}.npz", **run.follow())


def newest(checkpoints: Path):
    """Return the arrays and the state of the newest checkpoint."""
    loaded = CheckpointFolder(checkpoints).load()
    assert loaded.invalid == ()
    return loaded.arrays, loaded.state


def differences(expected, found, tolerance):
    """Return the names of weights and slots that differ by more than a share of their largest value."""
    names = [name for name in expected if expected[name].dtype.kind == "f"]
    assert len(names) >= 8
    return [
        name
        for name in names
        if np.abs(found[name] - expected[name]).max() > tolerance * max(1.0, np.abs(expected[name]).max())
    ]
