"""How near to the slowest stage pipelines train in real jobs, and how near simulations are to them.

python tests/benchmarks/stages_bench.py [--quick]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paced_bench import hetctl
from tables import Figure, Table
from visits_bench import running

sys.path.insert(0, str(Path(__file__).parent.parent))
from slurm_cluster import SlurmCluster, missing_programs

from hetctl.model.events import Event
from hetctl.storage.paths import Home
from hetctl.storage.progress_fold import events_in

NODES, GPUS, BATCH = 4, 2, 8
FAST, SLOW = 1.0, 1.5
"""Times of the types of GPU over those of the table below."""
LAYERS_S = (0.010, 0.012, 0.008, 0.010, 0.009, 0.011, 0.012, 0.008)
"""Seconds of each layer's forward pass; its backward pass takes twice as long. A stage has two of them."""
STUTTER_S, STUTTER_EVERY = 0.6, 12
"""Length of a pause of one GPU, and the minibatches from one pause to the next."""
SITE = """\
extends: slurm
nodes: 4
gpus_per_node: 2
cores_per_node: 2
memory_per_node: 6000MiB
gpu_memory: 1GB
links:
  intra_node: {{bytes_per_s: 2.0e9, scaling: 0.8}}
  inter_node: {{latency_s: 2.0e-4, bytes_per_s: 1.0e9}}
node_types:
  - {{gpu_type: fast, nodes: 2, hosts: [n1, n2]}}
  - {{gpu_type: slow, nodes: 2, hosts: [n3, n4]}}
queues: [{{name: main, max_nodes: 4, max_wall: 1h}}]
environment: {environment}
"""
NETWORK = '''
import os, time
import numpy as np
import torch
from torch import nn

NODE = os.environ.get("SLURMD_NODENAME", "")

class Lasting(torch.autograd.Function):
    """Take the rest of a time that began with the pass, forward and backward."""

    @staticmethod
    def forward(ctx, x, seconds, began):
        ctx.seconds = seconds
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient.clone(), None, None

class Layer(nn.Module):
    def __init__(self, number, config):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.seconds = config["seconds"][number] * config["factors"].get(NODE, 1.0)
        self.stutters = config.get("stutters") == [NODE, number]
        self.pause, self.every, self.passed = config.get("pause", 0), config.get("every", 1), 0

    def forward(self, x):
        if not self.training:
            return self.linear(x)
        began = time.monotonic()
        self.passed += 1
        late = self.pause if self.stutters and self.passed % self.every == 0 else 0.0
        return Lasting.apply(self.linear(x), self.seconds + late, began)

def input_fn(data):
    rng = np.random.default_rng(0)
    samples = int(os.path.basename(data))
    x = rng.random((samples, 16), dtype=np.float32)
    y = rng.integers(0, 16, samples)
    return (x, y), (x[:8], y[:8])

def model_fn(config):
    model = nn.Sequential(*(Layer(number, config) for number in range(len(config["seconds"]))))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return {"model": model, "optimizer": optimizer, "loss": nn.CrossEntropyLoss()}
'''


@dataclass(frozen=True)
class Piped:
    """A run of one member as a pipeline.

    Parameters
    ----------
    minibatches : int
        Minibatches of all virtual workers in an epoch.
    unlike : bool
        True if the GPUs of two nodes are slower.
    config : dict
        More of the member's configuration.
    """

    minibatches: int
    unlike: bool = True
    config: dict = field(default_factory=dict)

    def run(self, cluster: SlurmCluster, folder: Path, *options: str) -> list[Event]:
        """Submit the run and wait for its end; return its events."""
        (folder / "site-configs").mkdir(parents=True)
        (folder / "lasting.py").write_text(NETWORK)
        factors = {name: SLOW if self.unlike and name in ("n3", "n4") else FAST for name in NODE_NAMES}
        config = {"seconds": LAYERS_S, "factors": factors, **self.config}
        (folder / "ensemble.yaml").write_text(
            "name: piped\nframework: pytorch\n"
            "functions: {input_fn: lasting:input_fn, model_fn: lasting:model_fn}\n"
            f"data: '{self.minibatches * BATCH}'\nsamples_per_epoch: {self.minibatches * BATCH}\n"
            f"batch_size: {BATCH}\nstop: {{metric: val_loss, patience: 99, max_epochs: 2}}\n"
            f"members:\n  - {{name: m, layers: layers.csv, config: {json.dumps(config)}}}\n"
        )
        (folder / "layers.csv").write_text(
            "layer,gpu_type,forward_s,backward_s,activation_bytes,parameter_bytes\n"
            + "".join(
                f"l{at},{kind},{factor * s},{2 * factor * s},{BATCH * 64},1088\n"
                for at, s in enumerate(LAYERS_S)
                for kind, factor in (("fast", FAST), ("slow", SLOW if self.unlike else FAST))
            )
        )
        own = {name: value for name, value in cluster.environment().items() if name.startswith("OMPI")}
        (folder / "site-configs" / "lab.yaml").write_text(SITE.format(environment=json.dumps(own)))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
        environment = {**kept, **cluster.environment(), "HETCTL_SITE": "lab"}
        modes = ("--mode", "pipeline", "--gpus", str(NODES * GPUS), *options)
        hetctl(folder, environment, "plan", *modes)
        hetctl(folder, environment, "submit", *modes, "--time", "20m", "--wait")
        return events_in(Home(folder / ".hetctl").run("piped-001"))


NODE_NAMES = tuple(f"n{number}" for number in range(1, NODES + 1))


def rate_of(events: Sequence[Event]) -> float:
    """Return the rate of the second epoch in samples/s, from its first minibatch to the last."""
    return next(event.data["rate"] for event in events if event.kind == "epoch" and event.data["epoch"] == 2)


def step_of(events: Sequence[Event]) -> dict:
    """Return the start of the member's only step."""
    (step,) = [event.data for event in events if event.kind == "step_started"]
    return step


def bound_of(step: dict, unlike: bool) -> float:
    """Return the rate of the slowest stage times the number of virtual workers, in samples/s."""
    slow = {"n3", "n4"} if unlike else set()
    factors = [SLOW if place["node"] in slow else FAST for place in step["placement"] for _ in place["gpus"]]
    seconds = [
        3 * sum(LAYERS_S[plan["first"] : plan["last"] + 1]) * factors[plan["rank"]]
        for stages in step["pipeline"]["workers"]
        for plan in stages
    ]
    return len(step["pipeline"]["workers"]) * BATCH / max(seconds)


def throughput(quick: bool = False) -> Table:
    """Train 2 virtual workers x 4 stages, and virtual workers of each policy beside their simulation."""
    title = "Pipelines in training: stages that sleep, on 4 nodes with 2 slots of a real Slurm, PyTorch"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    rows, worst, over_bound = [], 0.0, 0.0
    cases = [("ed", False), *((policy, True) for policy in ("np", "ed", "hd", "best"))]
    with tempfile.TemporaryDirectory(prefix="hetctl-stages-", dir="/tmp") as name, running() as cluster:
        for policy, unlike in cases[:2] if quick else cases:
            piped = Piped(160 if quick else 480, unlike)
            folder = Path(name) / f"{policy}-{unlike}"
            events = piped.run(cluster, folder, "--policy", policy, "--clock-distance", "1")
            step, measured = step_of(events), rate_of(events)
            bound = bound_of(step, unlike)
            if not unlike:
                over_bound = measured / bound
            worst = max(worst, abs(step["rate"] / measured - 1))
            workers = step["pipeline"]["workers"]
            shape = f"{len(workers)} x {', '.join(sorted({str(len(stages)) for stages in workers}))}"
            kinds = "two types" if unlike else "alike"
            rows.append(
                (
                    f"`{policy}`, {kinds}",
                    f"{shape}, {step['pipeline']['in_flight']}",
                    f"{measured:.1f}",
                    f"{step['rate']:.1f}",
                    f"{step['rate'] / measured:.3f}",
                    f"{measured / bound:.3f}",
                )
            )
    figures = (
        Figure("bound of the slowest stage over the throughput of 2 x 4 stages", 1 / over_bound, 1 / 0.95),
        Figure("simulated over measured throughput, largest deviation", worst, 0.05),
    )
    note = (
        f"`hetctl submit --mode pipeline`, D = 1, on this machine with {os.cpu_count()} cores. Layers sleep "
        f"{min(LAYERS_S) * 1e3:g} to {max(LAYERS_S) * 1e3:g} ms forward and twice that backward, on the slow "
        f"type of GPU {SLOW:g} times as long. Rates are those of the second epoch."
    )
    columns = ("GPUs", "workers x stages, N_m", "samples/s", "simulated", "over measured", "of the bound")
    return Table(title, columns, tuple(rows), figures, note)


def waiting(quick: bool = False) -> Table:
    """Train two virtual workers of which one stutters, with clock distances of 0 and 4."""
    title = "Pipelines in training: time waited for waves beside a virtual worker that stutters"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    waited: dict[int, list[float]] = {0: [], 4: []}
    rates: dict[int, list[float]] = {0: [], 4: []}
    config = {"stutters": ["n2", 0], "pause": STUTTER_S, "every": STUTTER_EVERY}
    with tempfile.TemporaryDirectory(prefix="hetctl-stages-", dir="/tmp") as name, running() as cluster:
        for seed in range(1 if quick else 3):
            for distance in waited:
                piped = Piped(160 if quick else 320, False, config)
                folder = Path(name) / f"d{distance}-{seed}"
                options = ("--policy", "np", "--in-flight", "3", "--clock-distance", str(distance))
                events = piped.run(cluster, folder, *options)
                reports = [event.data for event in events if event.kind == "stages"][-1]
                firsts = [stage for stage in reports["stages"] if stage["stage"] == 0]
                waited[distance].append(sum(stage["wave_wait_s"] for stage in firsts))
                rates[distance].append(rate_of(events))
    medians = {distance: statistics.median(times) for distance, times in waited.items()}
    rows = [
        (f"{distance}", f"{medians[distance]:.2f}", f"{statistics.median(rates[distance]):.1f}")
        for distance in waited
    ]
    figures = (Figure("time waited, D = 4 over D = 0", medians[4] / medians[0], 0.5),)
    note = (
        f"Virtual workers of 2 stages, N_m = 3; every {STUTTER_EVERY}th minibatch of one takes "
        f"{STUTTER_S:g} s longer. Seconds of all first stages in the second epoch."
    )
    return Table(title, ("D", "waited, s", "samples/s"), tuple(rows), figures, note)


CPU_NETWORK = """
import numpy as np
import torch
from torch import nn

def input_fn(data):
    rng = np.random.default_rng(0)
    x = rng.random((1280, 3, 32, 32), dtype=np.float32)
    return (x, rng.integers(0, 10, 1280)), (x[:64], rng.integers(0, 10, 64))

def layers():
    found, before = [], 3
    for number, width in enumerate((32, 32, 64, 64)):
        found += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        before = width
        if number % 2:
            found.append(nn.MaxPool2d(2))
    return [*found, nn.Flatten(), nn.Linear(64 * 64, 256), nn.ReLU(), nn.Linear(256, 10)]

def model_fn(config):
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "loss": nn.CrossEntropyLoss()}
"""
PIPELINING = """
import sys, time, os
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
import chain
rank = int(os.environ["RANK"])
os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[rank]])
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Sequential(*chain.layers())
cut = int(sys.argv[1])
part = model[:cut] if rank == 0 else model[cut:]
stage = PipelineStage(part, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, 8, loss_fn=torch.nn.CrossEntropyLoss())
optimizer = torch.optim.SGD(part.parameters(), 0.01, momentum=0.9)
(x, y), _ = chain.input_fn("")
x, y = torch.from_numpy(x), torch.from_numpy(y)
for epoch in range(3):
    began, done = time.perf_counter(), 0
    # 8 microbatches of 32 samples, with one update for all.
    for start in range(0, len(x) - 255, 256):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x[start:start + 256])
        else:
            schedule.step(target=y[start:start + 256])
        optimizer.step()
        done += 256
    if rank == 1 and epoch:
        print(done / (time.perf_counter() - began), flush=True)
dist.destroy_process_group()
"""
CPU_SITE = """\
extends: local
gpus_per_node: {slots}
cores_per_node: 2
gpu_memory: 4GB
"""


def processors(quick: bool = False) -> Table:
    """Train two stages on a core each, beside one process with both cores and PyTorch's own pipelining."""
    rates: dict[str, list[float]] = {"stages": [], "one process": [], "torch.distributed.pipelining": []}
    with tempfile.TemporaryDirectory(prefix="hetctl-stages-", dir="/tmp") as name:
        for seed in range(1 if quick else 3):
            cut = 0
            for kind, slots, mode in (("stages", 2, "pipeline"), ("one process", 1, "data-parallel")):
                events = _on_processors(Path(name) / f"{kind}-{seed}", slots, mode)
                rates[kind].append(rate_of(events))
                if mode == "pipeline":
                    cut = step_of(events)["pipeline"]["workers"][0][0]["last"] + 1
            rates["torch.distributed.pipelining"].append(_pipelining(Path(name) / f"torch-{seed}", cut))
    medians = {kind: statistics.median(found) for kind, found in rates.items()}
    whole = medians["one process"]
    rows = [(kind, f"{rate:.0f}", f"{rate / whole:.2f}") for kind, rate in medians.items()]
    figures = (
        Figure("one process with both cores over two stages, images/s", whole / medians["stages"], 1 / 0.85),
    )
    note = (
        f"A network of four convolutions, images of 32 x 32, batches of 32, on {os.cpu_count()} cores; layers"
        " measured by `hetctl profile --layers`, N_m chosen by the plan. PyTorch's own pipelining (1F1B) has"
        " the same cut, and one update for 8 microbatches of 32."
    )
    return Table(
        "Pipelines in training: two stages on a core each",
        ("", "images/s", "of one process"),
        tuple(rows),
        figures,
        note,
    )


def _on_processors(folder: Path, slots: int, mode: str) -> list[Event]:
    (folder / "site-configs").mkdir(parents=True)
    (folder / "chain.py").write_text(CPU_NETWORK)
    (folder / "site-configs" / "local.yaml").write_text(CPU_SITE.format(slots=slots))
    (folder / "ensemble.yaml").write_text(
        "name: piped\nframework: pytorch\nfunctions: {input_fn: chain:input_fn, model_fn: chain:model_fn}\n"
        "batch_size: 32\nstop: {metric: val_loss, patience: 99, max_epochs: 3}\n"
        "members:\n  - {name: m, config: {}}\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
    environment["HETCTL_SITE"] = "local"
    hetctl(folder, environment, "profile", *(("--layers", "m") if mode == "pipeline" else ()))
    size = ("--mode", mode, "--gpus", str(slots), *(("--policy", "np") if mode == "pipeline" else ()))
    hetctl(folder, environment, "plan", *size)
    hetctl(folder, environment, "submit", *size, "--time", "20m", "--wait")
    return events_in(Home(folder / ".hetctl").run("piped-001"))


def _pipelining(folder: Path, cut: int) -> float:
    """Return the images/s of PyTorch's pipelining in its last epoch."""
    folder.mkdir()
    (folder / "chain.py").write_text(CPU_NETWORK)
    (folder / "pipelining.py").write_text(PIPELINING)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "pipelining.py", str(cut)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    for one in (throughput, waiting, processors):
        print(one("--quick" in sys.argv), flush=True)
