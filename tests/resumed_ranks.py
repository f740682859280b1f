"""Groups of real ranks that train with checkpoints, are stopped, and go on in new processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from contextlib import ExitStack

import ranks
from tiny_networks import ENSEMBLES

from hetctl.model.ensemble import Ensemble
from hetctl.model.plan import Allocation
from hetctl.runtime.data.input_pipeline import Sharing
from hetctl.runtime.data.round_inputs import InputShare
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.runtime.worker.member_trainer import StopSignal
from hetctl.runtime.worker.training import Trainer

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

    def write_all(self, *events):
        self.extend(events)


def train_part(number, folder, framework, functions, member, gpus, batches, kill=None):
    """Train as a rank of a group; write the results of the epochs as this rank has them.

    Rank 0 kills the group once it has trained `kill` batches, unless it is None, and the newest checkpoint is
    one within the second epoch.
    """
    done = itertools.count(1)
    (folder / f"pid-{number}").write_text(str(os.getpid()))

    def note(*_):
        if number == 0 and kill is not None and next(done) >= kill and is_saved_within_second_epoch(folder):
            for rank in reversed(range(gpus)):
                os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)

    ensemble = Ensemble("t", framework, functions, (member,), str(ENSEMBLES))
    with ExitStack() as stack:
        rank_info, context = ranks.rank_in(folder, number, gpus, stack)
        rank = context.build(ensemble, rank_info, Sharing(), InputShare(), stack)
        trainer = Trainer(
            member, rank.network, rank.training, rank.validation, CheckpointFolder(folder / "checkpoints"),
            rank.group, EventList(), StepLimit(batches),
            Allocation("m", gpus, "data-parallel", 640.0, ()), time.time(), note=note,
        )  # fmt: skip
        trainer.run()
        metrics = [epoch.metrics for epoch in trainer.state.epochs]
        (folder / f"metrics-{number}.json").write_text(json.dumps(metrics))
        rank.group.barrier_and_close()


def is_saved_within_second_epoch(folder):
    """Wait a while, as checkpoints are written beside the training; return false if there is none."""
    for _ in range(100):
        state = CheckpointFolder(folder / "checkpoints").newest_state()
        if len(state.epochs) == 1 and state.part_samples:
            return True
        time.sleep(0.05)
    return False


def train_in_parts(folder, framework, functions, member, gpus, parts):
    """Train with a stop after each of these numbers of batches; return arrays and results of each rank."""
    folder.mkdir(exist_ok=True)
    for batches in parts:
        _forget_masters(folder)
        ranks.run_ranks(train_part, gpus, folder, folder, framework, functions, member, gpus, batches)
    loaded = CheckpointFolder(folder / "checkpoints").load()
    return loaded.arrays, [json.loads((folder / f"metrics-{n}.json").read_text()) for n in range(gpus)]


def kill_in_part(folder, framework, functions, member, gpus, batches):
    """Train until the group is killed, after so many batches or a few more; return the exit codes."""
    folder.mkdir()
    how = (folder, framework, functions, member, gpus, TO_THE_END, batches)
    logs = [folder / f"rank-{number}.log" for number in range(gpus)]
    processes = [ranks.fork(train_part, number, *how, log=log) for number, log in enumerate(logs)]
    for process in processes:
        process.join(ranks.PATIENCE_S)
    _forget_masters(folder)
    return [process.exitcode for process in processes]


def _forget_masters(folder):
    for master in folder.glob("master-of-*.json"):
        master.unlink()
