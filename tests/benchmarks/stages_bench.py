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
from collections.abc import Mapping, Sequence
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
STUTTERS_ON = "n2"
STUTTERERS = {"slower": 1.0, "as fast on average": 0.6}
"""Times of the virtual worker that stutters over those of the table, between its pauses.

12 minibatches of the others take about 1.48 s, and 0.88 s with a pause of 0.6 s take as long.
"""
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
queues: [{{name: main, max_nodes: 4, max_wall: 1h}}]
environment: {environment}
"""
TYPES = """\
node_types:
  - {gpu_type: fast, nodes: 2, hosts: [n1, n2]}
  - {gpu_type: slow, nodes: 2, hosts: [n3, n4]}
"""
COLUMNS = ("forward_s", "backward_s", "activation_bytes", "parameter_bytes")
"""Of layers, besides their name and type of GPU."""
NETWORK = '''
import os, time
import numpy as np
import torch
from torch import nn

NODE = os.environ.get("SLURMD_NODENAME", "")

class Lasting(torch.autograd.Function):
    """Take the rest of a time that began with the pass, forward and backward."""

    @staticmethod
    def forward(ctx, x, seconds, late, began):
        ctx.seconds = seconds
        time.sleep(max(0.0, began + seconds + late - time.monotonic()))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient.clone(), None, None, None

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
        return Lasting.apply(self.linear(x), self.seconds, late, began)

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

ALONE = """
import sys, time
import torch, lasting
torch.set_num_threads(1)
trained = lasting.model_fn({"seconds": [float(word) for word in sys.argv[1:]], "factors": {}})
model, optimizer = trained["model"], trained["optimizer"]
x, warm_up, minibatches = torch.rand(8, 16), 10, 100
for minibatch in range(warm_up + minibatches):
    if minibatch == warm_up:
        began = time.perf_counter()
    outputs = model(x)
    outputs.backward(torch.ones_like(outputs))
    optimizer.step()
    optimizer.zero_grad()
print((time.perf_counter() - began) / minibatches)
"""


@dataclass(frozen=True)
class Piped:
    """A run of one member as a pipeline.

    Parameters
    ----------
    minibatches : int
        Minibatches of all virtual workers in an epoch.
    unlike : bool
        True if the GPUs of two nodes are slower.
    layers : mapping of str to sequence
        Values of `COLUMNS` of each layer by type of GPU.
    config : dict
        More of the member's configuration.
    """

    minibatches: int
    unlike: bool = True
    layers: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=lambda: by_type(FAST, SLOW))
    config: dict = field(default_factory=dict)

    def run(self, cluster: SlurmCluster, folder: Path, *options: str) -> list[Event]:
        """Submit the run and wait for its end; return its events."""
        factors = {name: SLOW if self.unlike and name in ("n3", "n4") else FAST for name in NODE_NAMES}
        config = {"factors": factors, **self.config}
        environment = _project(cluster, folder, self.minibatches, config, TYPES, "layers: layers.csv, ")
        (folder / "layers.csv").write_text(
            f"layer,gpu_type,{','.join(COLUMNS)}\n"
            + "".join(
                f"l{at},{kind},{','.join(map(str, values))}\n"
                for kind, layers in self.layers.items()
                for at, values in enumerate(layers)
            )
        )
        modes = ("--mode", "pipeline", "--gpus", str(NODES * GPUS), *options)
        hetctl(folder, environment, "plan", *modes)
        hetctl(folder, environment, "submit", *modes, "--time", "20m", "--wait")
        return events_in(Home(folder / ".hetctl").run("piped-001"))


def by_type(fast: float, slow: float) -> dict[str, list[tuple[float, ...]]]:
    """Return the layers by type of GPU, with the times of the table times these factors."""
    return {
        kind: [(factor * s, 2 * factor * s, BATCH * 64, 1088) for s in LAYERS_S]
        for kind, factor in (("fast", fast), ("slow", slow))
    }


def measured_layers(cluster: SlurmCluster, folder: Path) -> dict[float, list[tuple[float, ...]]]:
    """Return the layers as `hetctl profile --layers` measures them, by their factor of the table's times."""
    found = {}
    for factor in (FAST, SLOW):
        config = {"factors": dict.fromkeys(NODE_NAMES, factor)}
        own = folder / f"layers-{factor}"
        environment = _project(cluster, own, NODES * GPUS, config)
        (point,) = hetctl(own, environment, "profile", "--layers", "m")["layers"]
        found[factor] = [tuple(layer[column] for column in COLUMNS) for layer in point["layers"]]
    return found


def _project(
    cluster: SlurmCluster, folder: Path, minibatches: int, config: dict, types: str = "", layers: str = ""
) -> dict[str, str]:
    """Write a project of one member; return the environment of its commands."""
    (folder / "site-configs").mkdir(parents=True)
    (folder / "lasting.py").write_text(NETWORK)
    (folder / "ensemble.yaml").write_text(
        "name: piped\nframework: pytorch\n"
        "functions: {input_fn: lasting:input_fn, model_fn: lasting:model_fn}\n"
        f"data: '{minibatches * BATCH}'\nsamples_per_epoch: {minibatches * BATCH}\n"
        f"batch_size: {BATCH}\nstop: {{metric: val_loss, patience: 99, max_epochs: 2}}\n"
        f"members:\n  - {{name: m, {layers}config: {json.dumps({'seconds': LAYERS_S, **config})}}}\n"
    )
    own = {name: value for name, value in cluster.environment().items() if name.startswith("OMPI")}
    (folder / "site-configs" / "lab.yaml").write_text(SITE.format(environment=json.dumps(own)) + types)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
    return {**kept, **cluster.environment(), "HETCTL_SITE": "lab"}


NODE_NAMES = tuple(f"n{number}" for number in range(1, NODES + 1))


def rate_of(events: Sequence[Event]) -> float:
    """Return the rate of the second epoch in samples/s, from its first minibatch to the last."""
    return next(event.data["rate"] for event in events if event.kind == "epoch" and event.data["epoch"] == 2)


def slowest_rate_of(events: Sequence[Event], minibatches: int) -> float:
    """Return the number of virtual workers times the rate of the slowest in the second epoch, in samples/s.

    It is measured from its first completed minibatch to its last: the epoch without the seconds of one
    minibatch in all stages. The rate that rank 0 reports has its lead of up to D + 1 waves in it.
    """
    report = [event.data for event in events if event.kind == "stages"][-1]
    workers = 1 + max(stage["virtual_worker"] for stage in report["stages"])
    each = minibatches / workers
    passes_s = [0.0] * workers
    for stage in report["stages"]:
        passes_s[stage["virtual_worker"]] += stage["forward_s"] + stage["backward_s"]
    return workers * BATCH * (each - 1) / (report["duration_s"] - max(passes_s) / each)


def step_of(events: Sequence[Event]) -> dict:
    """Return the start of the member's only step."""
    (step,) = [event.data for event in events if event.kind == "task_started"]
    return step


def bound_of(step: dict, unlike: bool) -> float:
    """Return the rate of the slowest stage times the number of virtual workers, in samples/s."""
    return len(step["pipeline"]["workers"]) * BATCH / (3 * sum(slowest_of(step, unlike)))


def slowest_of(step: dict, unlike: bool) -> list[float]:
    """Return the seconds of the forward passes of the layers of the slowest stage."""
    slow = {"n3", "n4"} if unlike else set()
    factors = [SLOW if place["node"] in slow else FAST for place in step["placement"] for _ in place["gpus"]]
    stages = [
        [factors[plan["rank"]] * seconds for seconds in LAYERS_S[plan["first"] : plan["last"] + 1]]
        for stages in step["pipeline"]["workers"]
        for plan in stages
    ]
    return max(stages, key=sum)


def alone_over_bound(layers_s: Sequence[float], folder: Path) -> float:
    """Return the rate of a plain loop of PyTorch over these layers, over the bound of their times."""
    folder.mkdir()
    (folder / "lasting.py").write_text(NETWORK)
    (folder / "alone.py").write_text(ALONE)
    command = [sys.executable, "alone.py", *map(str, layers_s)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return 3 * sum(layers_s) / float(done.stdout)


def throughput(quick: bool = False) -> Table:
    """Train 2 virtual workers x 4 stages, and virtual workers of each policy beside their simulation."""
    title = "Pipelines in training: stages that sleep, on 4 nodes with 2 slots of a real Slurm, PyTorch"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    rows, worst, over_bound, alone = [], 0.0, 0.0, 0.0
    cases = [("ed", False), *((policy, True) for policy in ("np", "ed", "hd", "best"))]
    with tempfile.TemporaryDirectory(prefix="hetctl-stages-", dir="/tmp") as name, running() as cluster:
        measured_s = measured_layers(cluster, Path(name))
        for policy, unlike in cases[:2] if quick else cases:
            layers = {"fast": measured_s[FAST], "slow": measured_s[SLOW if unlike else FAST]}
            piped = Piped(160 if quick else 480, unlike, layers)
            folder = Path(name) / f"{policy}-{unlike}"
            events = piped.run(cluster, folder, "--policy", policy, "--clock-distance", "1")
            step, measured = step_of(events), slowest_rate_of(events, piped.minibatches)
            bound = bound_of(step, unlike)
            if not unlike:
                over_bound = measured / bound
                alone = alone_over_bound(slowest_of(step, unlike), Path(name) / "alone")
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
        f"type of GPU {SLOW:g} times as long; bounds are of these times, simulations of layers that `hetctl "
        "profile --layers` has measured. Rates are those of the second epoch. Without a pipeline, a plain "
        "loop of PyTorch over the layers of the slowest of the 2 x 4 stages (both passes and a step of the "
        f"optimizer) reaches {alone:.3f} of its bound here."
    )
    columns = ("GPUs", "workers x stages, N_m", "samples/s", "simulated", "over measured", "of the bound")
    return Table(title, columns, tuple(rows), figures, note)


def waiting(quick: bool = False) -> Table:
    """Train four virtual workers of which one stutters, with clock distances of 0 and 4."""
    title = "Pipelines in training: time waited for waves beside a virtual worker that stutters"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    rows, figures = [], []
    with tempfile.TemporaryDirectory(prefix="hetctl-stages-", dir="/tmp") as name, running() as cluster:
        for kind, factor in STUTTERERS.items():
            medians = {}
            for distance in (0, 4):
                runs = [
                    _waits(cluster, Path(name) / f"{factor}-{distance}-{seed}", factor, distance, quick)
                    for seed in range(1 if quick else 3)
                ]
                medians[distance] = [statistics.median(values) for values in zip(*runs, strict=True)]
                rows.append((kind, str(distance), *(f"{value:.2f}" for value in medians[distance])))
            ratio = medians[4][0] / medians[0][0]
            figures.append(Figure(f"time waited, D = 4 over D = 0, a stutterer that is {kind}", ratio, 0.5))
    note = (
        f"Four virtual workers of 2 stages, N_m = 3; every {STUTTER_EVERY}th minibatch of one takes "
        f"{STUTTER_S:g} s longer. Between these it is as fast as the others, and so slower on average, or "
        "so much faster that it is as fast on average. Seconds of all first stages in the second epoch. Time "
        "without a pass for other reasons includes the wait for the slowest at the end of the epoch."
    )
    header = ("the one that stutters is", "D", "waited, s", "idle otherwise, s", "epoch, s")
    return Table(title, header, tuple(rows), tuple(figures), note)


def _waits(
    cluster: SlurmCluster, folder: Path, factor: float, distance: int, quick: bool
) -> tuple[float, float, float]:
    """Return the seconds of waiting for waves, of other idle time, and of the second epoch."""
    factors = {name: factor if name == STUTTERS_ON else FAST for name in NODE_NAMES}
    config = {"stutters": [STUTTERS_ON, 0], "pause": STUTTER_S, "every": STUTTER_EVERY, "factors": factors}
    piped = Piped(160 if quick else 320, unlike=False, layers=by_type(FAST, FAST), config=config)
    options = ("--policy", "np", "--in-flight", "3", "--clock-distance", str(distance))
    events = piped.run(cluster, folder, *options)
    report = [event.data for event in events if event.kind == "stages"][-1]
    firsts = [stage for stage in report["stages"] if stage["stage"] == 0]
    waited_s, idle_s = (sum(stage[key] for stage in firsts) for key in ("wave_wait_s", "idle_s"))
    return waited_s, idle_s, report["duration_s"]


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
