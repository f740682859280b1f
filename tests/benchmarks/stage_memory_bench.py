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
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from stage_ranks import layout_of, run_ranks

from hetctl.methods.pipeline.layers import UNNAMED, Layer, LayerProfile
from hetctl.methods.pipeline.stage_costs import minibatches_held, stage_bytes
from hetctl.methods.pipeline.wave_memory import client_versions, server_versions
from hetctl.model.ensemble import Member
from hetctl.model.pipelines import PipelineLayout
from hetctl.model.profile import MeasuredLayer
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.stages.epoch_part import EpochPart
from hetctl.runtime.stages.stage_worker import StageWorker
from hetctl.runtime.worker.hardware import peak_of_process, reset_peak_memory
from hetctl.runtime.worker.measuring.layer_memory import ProcessMemory
from hetctl.runtime.worker.measuring.measure_layers import measured_layers
from hetctl.runtime.worker.user_functions import UserFunctions

MIB = 2**20
WIDTH, LAYERS, STAGES, WORKERS = 2048, 16, 2, 2
"""Linear layers of 16 MiB each: 256 MiB of weights."""
BATCH, MINIBATCHES = 64, 6
MMAP_BYTES = 65536
M_MMAP_THRESHOLD = -3
OPTIMIZED = (("momentum", 1), ("momentum", 2), ("adam", 1), ("adam", 2), ("plain", 2))
"""Optimizers, and minibatches in flight."""
FRAMEWORKS = ("pytorch", "tensorflow")
CASES = tuple((framework, *case) for framework in FRAMEWORKS for case in OPTIMIZED)
SYSTEM_ALLOCATOR = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"
"""Variable by which TensorFlow has memory from the C library, not from a pool of oneDNN that keeps it."""
DISTANCES = (0, 4)
"""Clock distances with which the memory of servers is measured."""
ROOM = 1.1
"""Most that a measured peak may be of the planner's figure, and the planner's of a measured one."""


def table(quick: bool = False) -> Table:
    """Hold the peaks of all stages against the planner's figures."""
    rows, ratios, pooled = [], [], []
    for framework, optimizer, in_flight in CASES[:2] if quick else CASES:
        layers = _in_a_process(_measured, framework, optimizer)
        layout = layout_of(1, STAGES, LAYERS, in_flight)
        for pool in (False, True)[: 1 + (framework == "tensorflow")]:
            for stage, peak in enumerate(_in_a_process(_peaks, framework, optimizer, layout, pool)):
                planned = _planned(layers, stage, in_flight)
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
        f"On a CPU: {LAYERS} linear layers of {WIDTH} x {WIDTH} in {STAGES} stages of one virtual "
        f"worker, ranks as in jobs, minibatches of {BATCH}. Planned from layers measured as by "
        "`profile --layers`. Measured: peak of resident memory in training less that before the network was "
        "built; the C library returns freed tensors to the kernel (`M_MMAP_THRESHOLD`, and with TensorFlow "
        f"`{SYSTEM_ALLOCATOR}`). With oneDNN's pool, as TensorFlow trains on CPUs by default, memory that no "
        "tensor uses stays resident.",
    )


def servers(quick: bool = False) -> Table:
    """Show what several virtual workers need in the memory of the node: servers, and waves under way."""
    alone = _in_a_process(_peaks, "pytorch", "plain", layout_of(1, 1, LAYERS, 1))[0]
    weights = LAYERS * WIDTH * (WIDTH + 1) * 4
    rows, ratios = [("one", "", f"{alone / MIB:.0f}", "", "", "")], []
    for distance in DISTANCES[:1] if quick else DISTANCES:
        layout = layout_of(WORKERS, 1, LAYERS, 1, distance)
        mean = sum(_in_a_process(_peaks, "pytorch", "plain", layout)) / WORKERS
        # The weights of the last push are in the memory of a stage alone on a CPU, too.
        versions = client_versions(distance) - 1 + server_versions(WORKERS, distance) / WORKERS
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
        f"PyTorch on a CPU, plain SGD, N_m = 1: virtual workers of one stage with {LAYERS} linear layers of "
        f"{WIDTH} x {WIDTH}, {weights / MIB:.0f} MiB; a rank serves half of the layers. Means of the peaks. "
        "Planned: what one has, with the bound of `wave_memory`; the virtual workers are equally fast.",
    )


def _in_a_process(work: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a new process, which has no memory of earlier ones."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def _torch_model(optimizer: str) -> dict[str, Any]:
    import torch
    from torch import nn

    kinds = {
        "momentum": lambda weights: torch.optim.SGD(weights, 1e-3, momentum=0.9),
        "adam": lambda weights: torch.optim.Adam(weights, 1e-4),
        "plain": lambda weights: torch.optim.SGD(weights, 1e-3),
    }
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return {"model": model, "optimizer": kinds[optimizer](model.parameters()), "loss": nn.CrossEntropyLoss()}


def _keras_model(optimizer: str) -> Any:
    import keras

    kinds = {
        "momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(1e-4),
        "plain": lambda: keras.optimizers.SGD(1e-3),
    }
    model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(LAYERS))])
    model.compile(kinds[optimizer](), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


MODELS = {"pytorch": _torch_model, "tensorflow": _keras_model}


def _chain(name: str, optimizer: str) -> Any:
    # Otherwise freed tensors would stay resident, in holes of the heap (mallopt(3)).
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
    framework = load_framework(name)
    framework.prepare((0,), None, 1)
    functions = UserFunctions(lambda _: None, lambda _: MODELS[name](optimizer), None)
    return framework.chain(Member("m", batch_size=BATCH), functions)


def _samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random((BATCH, WIDTH), dtype=np.float32), rng.integers(0, WIDTH, BATCH)


def _measured(framework: str, optimizer: str) -> list[MeasuredLayer]:
    chain, (x, y) = _chain(framework, optimizer), _samples()
    gauge = load_framework(framework).memory_gauge(None)
    memory = load_framework(framework).tensor_memory()
    return list(measured_layers(chain, memory, (x, y), (x[:1], y[:1]), gauge, gc.collect, lambda: None))


def _planned(measured: list[MeasuredLayer], stage: int, in_flight: int) -> int:
    """Return the bytes of a stage by the planner."""
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
    held = minibatches_held(STAGES - 1 - stage, in_flight, is_first=stage == 0)
    plan = layout_of(1, STAGES, LAYERS, in_flight).workers[0][stage]
    return int(stage_bytes(LayerProfile(layers), held)[plan.first, plan.last])


def _peaks(framework: str, optimizer: str, layout: PipelineLayout, pool: bool = False) -> list[int]:
    """Train pipelines; return the peak of each stage in bytes beyond the memory before its network."""
    workers = len(layout.workers)
    if not pool:
        os.environ[SYSTEM_ALLOCATOR] = "1"

    def work(rank: Any) -> int:
        chain, (x, y) = _chain(framework, optimizer), _samples()
        worker, stage_number = layout.place_of(rank.transport.rank)
        plan = layout.workers[worker][stage_number]
        before = ProcessMemory().used()
        network = chain.build(range(plan.first, plan.last + 1), (x[:1], y[:1]))
        stage = StageWorker(network, layout, rank.transport)
        reset_peak_memory()
        stage.waves.begin()
        part = EpochPart(0, 1, 0, workers * MINIBATCHES * BATCH, workers * BATCH, 0)
        stage.train(part, _batches(x, y) if stage.is_first else None)
        return peak_of_process() - before

    return run_ranks(layout, work)


def _batches(x: np.ndarray, y: np.ndarray) -> Any:
    for _ in range(MINIBATCHES):
        yield (x, y), SimpleNamespace(numbers=range(BATCH))


if __name__ == "__main__":
    for one in (table, servers):
        print(one("--quick" in sys.argv), flush=True)
