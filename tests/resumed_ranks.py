"""Groups of real ranks that train with checkpoints, are stopped, and go on in new processes."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

import ranks
from tiny_networks import ENSEMBLES

from hetctl.model.ensemble import Ensemble
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data.input_pipeline import Sharing
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.runtime.worker.context import InputShare, WorkerContext
from hetctl.runtime.worker.member_trainer import StopSignal
from hetctl.runtime.worker.trainer import Trainer

TO_THE_END = 10**9
"""More batches than any training has."""


class StepLimit(StopSignal):
    """Stop signal that is true after a number of batches."""

    def __init__(self, batches):
        super().__init__(lambda: None, float("inf"))
        self.batches = batches

    def __call__(self):
        self.batches -= 1
        self.reason = "test" if self.batches < 0 else None
        return self.reason is not None


class EventList(list):
    def write(self, kind, **data):
        self.append((kind, data))


def train_part(number, folder, framework, functions, member, gpus, batches):
    """Train as a rank of a group; write the results of the epochs as this rank has them."""
    ensemble = Ensemble("t", framework, functions, (member,), str(ENSEMBLES))
    with ExitStack() as stack:
        place, announce = ranks.place_in(folder, number, gpus)
        context = WorkerContext(Binding("localhost", 0, None, (0,)), stack, announce=announce)
        rank = context.build(ensemble, member, place, Sharing(), InputShare(), stack)
        trainer = Trainer(
            member, rank.network, rank.training, rank.validation, CheckpointFolder(folder / "checkpoints"),
            rank.group, EventList(), StepLimit(batches), gpus, 1.0, time.time(),
        )  # fmt: skip
        trainer.run()
        metrics = [epoch.metrics for epoch in trainer.state.epochs]
        (folder / f"metrics-{number}.json").write_text(json.dumps(metrics))
        rank.group.leave()


def train_in_parts(folder, framework, functions, member, gpus, parts):
    """Train with a stop after each of these numbers of batches; return arrays and results of each rank."""
    folder.mkdir()
    for batches in parts:
        for master in folder.glob("master-of-*.json"):
            master.unlink()
        ranks.run_ranks(train_part, gpus, folder, folder, framework, functions, member, gpus, batches)
    loaded = CheckpointFolder(folder / "checkpoints").load()
    return loaded.arrays, [json.loads((folder / f"metrics-{n}.json").read_text()) for n in range(gpus)]
