"""The same small networks in every framework, and groups of real ranks that train them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import numpy as np

from hetctl.model.ensemble import Functions
from hetctl.runtime.frameworks import load_framework

ENSEMBLES = Path(__file__).parent / "ensembles"
MODULES = {"tensorflow": "tiny", "pytorch": "tiny_torch"}

RANKS = """
import contextlib, json, sys
import numpy as np
from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data.batches import Batches, held_out_batches
from hetctl.runtime.worker.context import WorkerContext, InputShare
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.worker.user_functions import load_functions
from hetctl.runtime.data.input_pipeline import Sharing
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.data.sampler import Stream
from ranks import place_in
framework, functions, folder, gpus, batch, config, samples, seed, ensembles, script = json.loads(sys.argv[1])
class Scripted:
    # A balancer that sets the sizes of each step from a list, over and over.
    def __init__(self, rank):
        self.rank, self.step, self.sizes = rank, 0, tuple(script[0])

    @property
    def batch_size(self):
        return self.sizes[self.rank]

    def before_step(self, should_stop, left):
        self.sizes = tuple(script[self.step % len(script)])
        self.step += 1
        return False

if config.get("float64"):
    if framework == "tensorflow":
        import keras
        keras.backend.set_floatx("float64")
    else:
        import torch
        torch.set_default_dtype(torch.float64)
member = Member("m", config, batch, seed, StopRule())
ensemble = Ensemble("t", framework, Functions(*functions), (member,), ensembles)
stack = contextlib.ExitStack()
place, announce = place_in(folder, gpus)
context = WorkerContext(Binding("localhost", 0, None, (0,)), stack, announce=announce)
rank = context.build(ensemble, member, place, Sharing(), InputShare(), stack)
(x, y), _ = load_functions(ensemble).input_fn(None)
chunk = sum(script[0]) if script else gpus * batch
stream = Stream(samples, chunk, seed, rank=rank.group.rank, ranks=rank.group.size)
loader = ArrayLoader(ArraySource(x[:samples], y[:samples], "training"), stream)
balancer = Scripted(rank.group.rank) if script and gpus > 1 else None
if balancer:
    loader.split(balancer.sizes)
for epoch in (1, 2, 3) if script else (1, 2):
    loss = rank.network.train(Batches(loader, epoch, 0, rank.group, lambda: False, balancer=balancer))
metrics = rank.network.evaluate(held_out_batches(rank.validation, 1, lambda: None))
np.savez(f"{folder}/{gpus}-{rank.group.rank}.npz", **rank.network.save())
json.dump([loss, metrics], open(f"{folder}/{gpus}-{rank.group.rank}.json", "w"))
rank.group.leave()
"""


def functions_of(framework, train_fn=None):
    module = MODULES[framework]
    return Functions(f"{module}:input_fn", f"{module}:model_fn", train_fn and f"{module}:{train_fn}")


def seed_all(framework, seed):
    """Do what `Framework.prepare` does, as often as a test likes."""
    if framework == "tensorflow":
        import keras

        keras.utils.set_random_seed(seed)
    else:
        load_framework(framework).prepare((0,), None, seed)


def run_ranks(code, ranks, folder, *arguments):
    """Run Python code in so many processes, as ``mpirun`` starts them, or in one."""
    script = folder / "rank.py"
    script.write_text(code)
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    command = [*(mpirun if ranks > 1 else []), sys.executable, str(script), json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def train_on(framework, gpus, batch, config, folder, *, samples=600, train_fn=None, seed=5, sizes=()):
    """Train two epochs, or three with `sizes`; return the state of each rank and what it returned.

    `sizes` has the batch sizes of all ranks in one step after another, over and over.
    """
    functions = astuple(functions_of(framework, train_fn))
    run_ranks(
        RANKS,
        gpus,
        folder,
        framework,
        functions,
        str(folder),
        gpus,
        batch,
        config,
        samples,
        seed,
        str(ENSEMBLES),
        sizes,
    )
    states = [dict(np.load(folder / f"{gpus}-{rank}.npz")) for rank in range(gpus)]
    results = [json.loads((folder / f"{gpus}-{rank}.json").read_text()) for rank in range(gpus)]
    return states, results
