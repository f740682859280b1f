"""Groups of real ranks that train a member in parts of it, or whole; they may be killed, and go on."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from contextlib import ExitStack

import numpy as np
import ranks
from resumed_ranks import TO_THE_END, EventList, StepLimit
from tiny_networks import ENSEMBLES

from hetctl.model.ensemble import Ensemble, Functions
from hetctl.model.plan import Allocation
from hetctl.runtime.data.input_pipeline import Sharing
from hetctl.runtime.data.round_inputs import InputShare
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.runtime.worker.training import Trainer

MODULE = "sharded_torch"
FULL = 20_000
"""Bytes of the largest file that a rank with a full disk can write."""


def functions(train_fn=None):
    return Functions(f"{MODULE}:short_input_fn", f"{MODULE}:model_fn", train_fn and f"{MODULE}:{train_fn}")


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).numpy()


def held(tensors):
    """Return how many numbers this rank holds."""
    return sum((each.to_local() if hasattr(each, "to_local") else each).numel() for each in tensors)


def train_rank(number, folder, member, gpus, train_fn, stop, kill, full):
    """Train; write what this rank sees, or be killed after so many steps."""
    ensemble = Ensemble("t", "pytorch", functions(train_fn), (member,), str(ENSEMBLES))
    with ExitStack() as stack:
        rank_info, context = ranks.rank_in(folder, number, gpus, stack)
        rank = context.build(ensemble, rank_info, Sharing(), InputShare(), stack)
        events, done = EventList(), []

        def note(*_):
            done.append(None)
            if len(done) == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if len(done) == full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))

        Trainer(
            member=member, network=rank.network, training=rank.training, validation=rank.validation,
            checkpoints=CheckpointFolder(folder / "checkpoints"), group=rank.group, events=events,
            stop=StepLimit(stop), allocation=Allocation("m", gpus, "data-parallel", 640.0, ()),
            launched_at=time.time(), note=note,
        ).run()  # fmt: skip
        model, optimizer = rank.network._model, rank.network._optimizer
        states = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
        arrays = {name: whole(value) for name, value in model.state_dict().items()}
        for n, state in optimizer.state_dict()["state"].items():
            arrays |= {f"{n}/{key}": whole(value) for key, value in state.items() if key != "step"}
        np.savez(folder / f"seen-{number}.npz", **arrays)
        told = {
            "events": list(events),
            "held": [held(model.parameters()), held(states)],
            "divides": "hetctl.runtime.frameworks.torch_sharded" in sys.modules,
        }
        (folder / f"told-{number}.json").write_text(json.dumps(told))
        rank.group.barrier_and_close()


def train(folder, member, gpus, *, train_fn=None, stop=TO_THE_END, kill=None, full=None):
    """Train in new processes; return arrays and what was told of each rank, or exit codes if killed."""
    folder.mkdir(exist_ok=True)
    for old in (*folder.glob("master-of-*.json"), *folder.glob("seen-*"), *folder.glob("told-*")):
        old.unlink()
    how = (folder, member, gpus, train_fn, stop, kill, full)
    if kill or full:
        logs = [folder / f"rank-{number}.log" for number in range(gpus)]
        processes = [ranks.fork(train_rank, n, *how, log=log) for n, log in enumerate(logs)]
        for process in processes:
            process.join(ranks.PATIENCE_S)
        return [process.exitcode for process in processes], [log.read_text() for log in logs]
    ranks.run_ranks(train_rank, gpus, folder, *how)
    return (
        [dict(np.load(folder / f"seen-{number}.npz")) for number in range(gpus)],
        [json.loads((folder / f"told-{number}.json").read_text()) for number in range(gpus)],
    )
