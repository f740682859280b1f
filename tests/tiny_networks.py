"""The same small networks in every framework, and groups of real ranks that train them."""

from __future__ import annotations

import itertools
import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import ranks

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.runtime.data.batches import Batches, validation_batches
from hetctl.runtime.data.input_pipeline import Sharing
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.round_inputs import InputShare
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.frameworks.packed_state import unpack
from hetctl.runtime.worker.user_functions import load_functions

ENSEMBLES = Path(__file__).parent / "ensembles"
MODULES = {"tensorflow": "tiny", "pytorch": "tiny_torch"}


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


class Scripted:
    """A balancer that sets the batch sizes of each step from a list, over and over."""

    def __init__(self, rank, sizes):
        self.rank, self.script = rank, itertools.cycle(map(tuple, sizes))
        self.sizes = tuple(sizes[0])

    @property
    def batch_size(self):
        return self.sizes[self.rank]

    def before_step(self, _should_stop, _left):
        self.sizes = next(self.script)
        return False


def use_float64(framework):
    """Let networks that this process builds be of double precision."""
    if framework == "tensorflow":
        import keras

        keras.backend.set_floatx("float64")
    else:
        import torch

        torch.set_default_dtype(torch.float64)


def train_rank(number, framework, gpus, batch, config, folder, samples, train_fn, seed, sizes, chunk):
    """Train as a rank of a group; write its state and what it returned."""
    if config.get("float64"):
        use_float64(framework)
    member = Member("m", config, batch, seed, StopRule(), global_batch_size=chunk)
    ensemble = Ensemble("t", framework, functions_of(framework, train_fn), (member,), str(ENSEMBLES))
    stack = ExitStack()
    rank_info, context = ranks.rank_in(folder, number, gpus, stack)
    rank = context.build(ensemble, rank_info, Sharing(), InputShare(), stack)
    (x, y), _ = load_functions(ensemble).input_fn(None)
    stream = Stream(
        samples,
        sum(sizes[0]) if sizes else member.step_samples(gpus),
        seed,
        rank=rank.group.rank,
        ranks=rank.group.size,
    )
    loader = ArrayLoader(ArraySource(x[:samples], y[:samples], "training"), stream)
    balancer = Scripted(rank.group.rank, sizes) if sizes and gpus > 1 else None
    if balancer:
        loader.split(balancer.sizes)
    for epoch in (1, 2):
        most = member.micro_batch_size
        batches = Batches(loader, epoch, 0, rank.group, lambda: False, balancer=balancer, most=most)
        loss = rank.network.train(batches)
    metrics = rank.network.evaluate(validation_batches(rank.validation, 1, lambda: None))
    np.savez(folder / f"{gpus}-{number}.npz", **rank.network.save())
    (folder / f"{gpus}-{number}.json").write_text(json.dumps([loss, metrics]))
    rank.group.barrier_and_close()


def train_on(
    framework, gpus, batch, config, folder, *, samples=600, train_fn=None, seed=5, sizes=(), chunk=None
):
    """Train two epochs; return the state of each rank and what it returned.

    `sizes` has the batch sizes of all ranks in one step after another, over and over; `chunk` is the global
    batch size.
    """
    how = (framework, gpus, batch, config, folder, samples, train_fn, seed, sizes, chunk)
    ranks.run_ranks(train_rank, gpus, folder, *how)
    states = [dict(np.load(folder / f"{gpus}-{rank}.npz")) for rank in range(gpus)]
    results = [json.loads((folder / f"{gpus}-{rank}.json").read_text()) for rank in range(gpus)]
    return states, results


def context_in(arrays, framework):
    """Return what a checkpoint has of the context of ``train_fn``."""
    if framework == "pytorch":
        from hetctl.runtime.frameworks import torch_parts

        return torch_parts.unpack(arrays)["context"]
    return unpack({n.removeprefix("context/"): a for n, a in arrays.items() if n.startswith("context/")})
