"""Measured peak of memory of the stages of pipelines, over what the planner counts for them.

python tests/benchmarks/stage_memory_bench.py [--quick]
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from stage_ranks import layout_of, run_ranks

from hetctl.methods.pipeline.stage_costs import UNNAMED, Layer, LayerProfile, stage_bytes
from hetctl.methods.pipeline.stages import VirtualWorker, passing_bytes, server_copies, wave_copies
from hetctl.model.ensemble import Member
from hetctl.model.pipelines import PipelineLayout, Stage
from hetctl.model.profile import MeasuredLayer
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.stages.stage_worker import EpochPart, StageWorker
from hetctl.runtime.worker.hardware import MemoryGauge, peak_of_process, reset_peak_memory
from hetctl.runtime.worker.measuring.measure_layers import measured_layers
from hetctl.runtime.worker.user_functions import UserFunctions

MIB = 2**20
LAYERS, STAGES, WORKERS, MINIBATCHES = 16, 2, 2, 6
MMAP_BYTES = 65536
M_MMAP_THRESHOLD = -3
OPTIMIZED = (("momentum", 1), ("momentum", 2), ("adam", 1), ("adam", 2), ("plain", 2))
"""Optimizers, and minibatches in flight."""
FRAMEWORKS = ("pytorch", "tensorflow")
CASES = tuple((framework, *case) for framework in FRAMEWORKS for case in OPTIMIZED)
SYSTEM_ALLOCATOR = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"
"""Variable by which TensorFlow has memory from the C library, not from a pool of oneDNN that keeps it."""
IN_FLIGHT = (1, 2, 4)
"""Minibatches in flight with which the memory of activations is measured."""
DISTANCES = (0, 4)
"""Clock distances with which the memory of servers is measured."""
ROOM = 1.1
"""Most that a measured peak may be of the planner's figure, and the planner's of a measured one."""


@dataclass(frozen=True)
class Network:
    """Linear layers, and samples of a minibatch."""

    width: int
    batch: int

    def __str__(self) -> str:
        return f"{LAYERS} linear layers of {self.width} x {self.width}"


WEIGHTS, ACTIVATIONS = Network(2048, 64), Network(512, 8192)
"""Layers of 16 MiB each, 256 MiB of weights, and layers of 1 MiB with activations of 16 MiB."""


def table(quick: bool = False) -> Table:
    """Hold the peaks of all stages against the planner's figures."""
    rows, ratios, pooled = [], [], []
    for framework, optimizer, in_flight in CASES[:2] if quick else CASES:
        layers = in_a_process(_measured, WEIGHTS, framework, optimizer)
        layout = layout_of(1, STAGES, LAYERS, in_flight)
        for pool in (False, True)[: 1 + (framework == "tensorflow")]:
            for stage, peak in enumerate(in_a_process(_peaks, WEIGHTS, framework, optimizer, layout, pool)):
                planned = _planned(layers, layout, stage)
                (pooled if pool else ratios).append(peak / planned)
                sizes = (f"{planned / MIB:.0f}", f"{peak / MIB:.0f}", f"{peak / planned:.3f}")
                rows.append((framework + ", pool" * pool, optimizer, str(in_flight), str(stage), *sizes))
    return Table(
        "Pipelines: memory of stages, measured over planned",
        ("framework", "optimizer", "in flight", "stage", "planned MiB", "measured MiB", "ratio"),
        tuple(rows),
        (
            Figure("measured over planned, largest", max(ratios), ROOM),
            Figure("planned over measured, largest", 1 / min(ratios), 1 / 0.9),
            *(Figure("the same with the pool, largest", max(pooled), ROOM) for _ in pooled[:1]),
        ),
        f"On a CPU: {WEIGHTS} in {STAGES} stages of one virtual "
        f"worker, ranks as in jobs, minibatches of {WEIGHTS.batch}. Planned from layers measured as by "
        "`profile --layers`. Measured: peak of resident memory in training less that before the network was "
        "built; the C library returns freed tensors to the kernel (`M_MMAP_THRESHOLD`, and with TensorFlow "
        f"`{SYSTEM_ALLOCATOR}`). With oneDNN's pool, as TensorFlow trains on CPUs by default, memory that no "
        "tensor uses stays resident.",
    )


def activations(quick: bool = False) -> Table:
    """Show what stages of large activations need, with and without a second forward pass."""
    rows, ratios = [], []
    for framework in FRAMEWORKS:
        layers = in_a_process(_measured, ACTIVATIONS, framework, "plain")
        for recomputes in (False, True):
            for in_flight in IN_FLIGHT[-1:] if quick else IN_FLIGHT[recomputes:]:
                layout = _recomputing(layout_of(1, STAGES, LAYERS, in_flight), recomputes)
                measured = sum(in_a_process(_peaks, ACTIVATIONS, framework, "plain", layout))
                stages = sum(_planned(layers, layout, stage) for stage in range(STAGES))
                planned = stages + _beside_stages(layers, layout)
                ratios.append((framework, measured / planned))
                sizes = [f"{size / MIB:.0f}" for size in (stages, planned - stages, measured)]
                passes = "computes again" if recomputes else ""
                rows.append((framework, passes, str(in_flight), *sizes, f"{measured / planned:.3f}"))
    return Table(
        "Pipelines: memory of large activations, measured over planned",
        (
            "framework",
            "first stage",
            "in flight",
            "stages, planned MiB",
            "beside them, at most",
            "measured MiB",
            "ratio",
        ),
        tuple(rows),
        tuple(
            Figure(f"{framework}, largest", max(ratio for name, ratio in ratios if name == framework), 1.0)
            for framework in FRAMEWORKS
        ),
        f"On a CPU: {ACTIVATIONS} in {STAGES} stages of one virtual worker, minibatches of "
        f"{ACTIVATIONS.batch}, plain SGD; as above, both stages together. Beside them: the bound of "
        "`node_memory` for inputs and minibatches on their way.",
    )


def _recomputing(layout: PipelineLayout, recomputes: bool) -> PipelineLayout:
    """Return the layout with a first stage that computes its forward passes again, or not."""
    first, *others = layout.workers[0]
    return replace(layout, workers=((replace(first, recomputes=recomputes), *others),))


def servers(quick: bool = False) -> Table:
    """Show what several virtual workers need in the memory of the node: servers, and waves under way."""
    alone = in_a_process(_peaks, WEIGHTS, "pytorch", "plain", layout_of(1, 1, LAYERS, 1))[0]
    weights = LAYERS * WEIGHTS.width * (WEIGHTS.width + 1) * 4
    rows, ratios = [("one", "", f"{alone / MIB:.0f}", "", "", "")], []
    for distance in DISTANCES[:1] if quick else DISTANCES:
        layout = layout_of(WORKERS, 1, LAYERS, 1, distance)
        mean = sum(in_a_process(_peaks, WEIGHTS, "pytorch", "plain", layout)) / WORKERS
        # The weights of the last push are in the memory of a stage alone on a CPU, too.
        versions = wave_copies(distance) - 1 + server_copies(WORKERS, distance) / WORKERS
        most = alone + versions * weights
        ratios.append(mean / most)
        sizes = (f"{mean / MIB:.0f}", f"{most / MIB:.0f}", f"{mean / most:.2f}")
        rows.append(("two", str(distance), *sizes, f"{(mean - alone) / weights:.2f}"))
    return Table(
        "Pipelines: memory of parameter servers and waves",
        (
            "virtual workers",
            "D",
            "measured MiB of a rank",
            "at most, planned",
            "ratio",
            "more than one has, over its weights",
        ),
        tuple(rows),
        (Figure("measured over the planned bound, largest", max(ratios), 1.0),),
        f"PyTorch on a CPU, plain SGD, N_m = 1: virtual workers of one stage with {WEIGHTS}, "
        f"{weights / MIB:.0f} MiB; a rank serves half of the layers. Means of the peaks. "
        "Planned: what one has, with the bound of `node_memory`; the virtual workers are equally fast.",
    )


def in_a_process(work: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a new process, which has no memory of earlier ones."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def _torch_model(network: Network, optimizer: str) -> dict[str, Any]:
    import torch
    from torch import nn

    kinds = {
        "momentum": lambda weights: torch.optim.SGD(weights, 1e-3, momentum=0.9),
        "adam": lambda weights: torch.optim.Adam(weights, 1e-4),
        "plain": lambda weights: torch.optim.SGD(weights, 1e-3),
    }
    model = nn.Sequential(*(nn.Linear(network.width, network.width) for _ in range(LAYERS)))
    return {"model": model, "optimizer": kinds[optimizer](model.parameters()), "loss": nn.CrossEntropyLoss()}


def _keras_model(network: Network, optimizer: str) -> Any:
    import keras

    kinds = {
        "momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(1e-4),
        "plain": lambda: keras.optimizers.SGD(1e-3),
    }
    layers = (keras.layers.Dense(network.width) for _ in range(LAYERS))
    model = keras.Sequential([keras.Input((network.width,)), *layers])
    model.compile(kinds[optimizer](), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


MODELS = {"pytorch": _torch_model, "tensorflow": _keras_model}


def _chain(network: Network, name: str, optimizer: str) -> Any:
    # Otherwise freed tensors would stay resident, in holes of the heap (mallopt(3)).
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
    framework = load_framework(name)
    framework.prepare((0,), None, 1)
    functions = UserFunctions(lambda _: None, lambda _: MODELS[name](network, optimizer), None)
    return framework.chain(Member("m", batch_size=network.batch), functions)


def _samples(network: Network) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.random((network.batch, network.width), dtype=np.float32)
    return x, rng.integers(0, network.width, network.batch)


def _measured(network: Network, framework: str, optimizer: str) -> list[MeasuredLayer]:
    chain, (x, y) = _chain(network, framework, optimizer), _samples(network)
    gauge = load_framework(framework).memory_gauge(None)
    memory = load_framework(framework).tensor_memory()
    return list(measured_layers(chain, memory, (x, y), (x[:1], y[:1]), gauge, gc.collect, lambda: None))


def _profile(measured: list[MeasuredLayer]) -> LayerProfile:
    layers = tuple(
        Layer(
            one.name,
            {UNNAMED: one.forward_s},
            {UNNAMED: one.backward_s},
            one.activation_bytes,
            one.parameter_bytes,
            one.held_bytes,
            one.workspace_bytes,
            one.optimizer_bytes,
        )
        for one in measured
    )
    return LayerProfile(layers)


def _planned(measured: list[MeasuredLayer], layout: PipelineLayout, stage: int) -> int:
    """Return the bytes of a stage by the planner."""
    plan = layout.workers[0][stage]
    bytes_ = stage_bytes(_profile(measured), plan.held, recomputes=plan.recomputes)
    return int(bytes_[plan.first, plan.last])


def _beside_stages(measured: list[MeasuredLayer], layout: PipelineLayout) -> int:
    """Return the planner's bound of the node's memory for minibatches of the only virtual worker."""
    stages = (
        Stage(plan.first, plan.last, 0, plan.rank, UNNAMED, 0.0, 0.0, 0.0, 0, plan.recomputes)
        for plan in layout.workers[0]
    )
    return passing_bytes(_profile(measured), VirtualWorker(tuple(stages), layout.in_flight))[0]


def _peaks(
    network: Network, framework: str, optimizer: str, layout: PipelineLayout, pool: bool = False
) -> list[int]:
    """Train pipelines; return the peak of each stage in bytes beyond the memory before its network.

    What a rank reads of another's slots is counted there.
    """
    workers = len(layout.workers)
    if not pool:
        os.environ[SYSTEM_ALLOCATOR] = "1"

    def work(rank: Any) -> int:
        chain, (x, y) = _chain(network, framework, optimizer), _samples(network)
        worker, stage_number = layout.place_of(rank.transport.rank)
        plan = layout.workers[worker][stage_number]
        before = MemoryGauge().used()
        layers = range(plan.first, plan.last + 1)
        built = chain.build(layers, (x[:1], y[:1]), recomputes=plan.recomputes)
        stage = StageWorker(built, layout, rank.transport)
        reset_peak_memory()
        stage.waves.begin()
        part = EpochPart(0, 1, 0, workers * MINIBATCHES * len(x), workers * len(x), 0)
        stage.train(part, _batches(x, y) if stage.is_first else None)
        return peak_of_process() - before - _shared_bytes() // 2

    return run_ranks(layout, work)


def _shared_bytes() -> int:
    """Return the resident bytes of slots, own ones and those of the other rank."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("RssShmem:")[1].split()[0]) * 1024


def _batches(x: np.ndarray, y: np.ndarray) -> Any:
    for _ in range(MINIBATCHES):
        yield (x, y), SimpleNamespace(numbers=range(len(x)))


if __name__ == "__main__":
    for one in (table, activations, servers):
        print(one("--quick" in sys.argv), flush=True)
