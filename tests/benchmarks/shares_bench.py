"""Members that share GPUs, over the bound of the devices' time: simulated, and on a Slurm with fake GPUs.

    python tests/benchmarks/bench.py shares paced-shares

A fake GPU is a token: the step of a member holds it for the time of its kernels, and sleeps for the rest.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import fleet
from paced_bench import SITE, hetctl
from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from slurm_cluster import SlurmCluster, missing_programs

from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.perf.sharing import GpuTerms
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.rate_learner import RateLearner
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate
from hetctl.storage.paths import Home
from hetctl.storage.progress_fold import events_in

SIZES = tuple(range(8, 65, 8))
MOST = 8
BUSY = (0.15, 0.9)


def members(seed: int, gpus: int) -> list[Workload]:
    """Draw members of `fleet`, each with a busy share."""
    draw = random.Random(f"busy {seed}")
    return [replace(one, busy=draw.uniform(*BUSY), memory=1 / MOST) for one in fleet.members(seed, gpus)]


def makespan_s(
    workloads: list[Workload], gpus: int, most: int, learner: RateLearner | None = None
) -> tuple[float, float]:
    """Return the makespan and its ratio to the bound."""
    scenario = Scenario(Cluster.of(gpus, fleet.GPUS_PER_NODE), rate_learner=learner)
    options = Options(max_per_gpu=most)
    found = simulate(planner_named("fluid"), list(map(Arrival, workloads)), scenario, options)
    return found.makespan_s, found.ratio


def learner(workloads: list[Workload], gpus: int) -> RateLearner:
    """Return what a driver without profiles knows at first."""
    own = tuple(Member(w.name, {"number": n}, max_gpus=max(w.rates)) for n, w in enumerate(workloads, 1))
    ensemble = Ensemble("learning", "pytorch", Functions("m:i", "m:m"), own, "/nowhere")
    return RateLearner(ensemble, gpus, terms=GpuTerms(MOST))


def simulated(quick: bool = False) -> Table:
    """Compare shared GPUs with the bound, with whole GPUs, and where there is nothing to share."""
    rows, ratios, costs, learned = [], list[float](), list[float](), list[float]()
    for gpus in SIZES[:: 4 if quick else 1]:
        found, gains, seen = [], [], []
        for seed in range(1 if quick else 3):
            own = members(seed, gpus)
            alone = [replace(one, busy=1.0) for one in own]
            shared_s, ratio = makespan_s(own, gpus, MOST)
            whole_s, _ = makespan_s(alone, gpus, 1)
            found.append(ratio)
            seen.append(makespan_s(own, gpus, MOST, learner(own, gpus))[1])
            gains.append(shared_s / whole_s)
            costs.append(makespan_s(alone, gpus, MOST)[0] / whole_s)
        ratios += found
        learned += seen
        medians = (statistics.median(found), statistics.median(seen), statistics.median(gains))
        rows.append((str(gpus), *(f"{median:.3f}" for median in medians)))
        print(rows[-1], flush=True)
    return Table(
        "Members that share GPUs, simulated",
        ("GPUs", "makespan over the bound", "nothing known before", "over that with whole GPUs"),
        tuple(rows),
        (
            Figure("busy shares known: makespan over the bound, median", statistics.median(ratios), 1.03),
            Figure("nothing known before training, median", statistics.median(learned), 1.08),
            Figure("all busy shares 1: makespan over that with whole GPUs, worst", max(costs), 1.01),
        ),
        f"100 members of FLEET's set-up, whose busy shares are drawn from {BUSY[0]:g} to {BUSY[1]:g}, up to"
        f" {MOST} on a GPU; medians of 3 seeds.",
    )


PACED, NODES, GPUS_PER_NODE = 40, 2, 4
GPUS = NODES * GPUS_PER_NODE
PER_GPU = 4
SAMPLES, BATCH = 640, 32
NETWORKS = """
import fcntl, json, os, time
import numpy as np
import torch

TOKEN = "{folder}/token-%s-%d"

def input_fn(path):
    rng = np.random.default_rng(0)
    x, y = rng.random((672, 16), dtype=np.float32), rng.integers(0, 4, 672)
    return (x[:640], y[:640]), (x[640:], y[640:])

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()

def model_fn(config):
    model = torch.nn.Linear(16, 4)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loss": torch.nn.CrossEntropyLoss(),
        "metrics": {"accuracy": accuracy},
    }

def train_fn(data, model, optimizer, config):
    node, gpu = os.environ["SLURMD_NODENAME"], int(os.environ["HETCTL_DEVICE"]) % {gpus}
    kernels_s, rest_s, losses = config["step_s"] * config["busy"], config["step_s"] * (1 - config["busy"]), []
    with open(TOKEN % (node, gpu), "a") as token:
        for x, y in data:
            fcntl.flock(token, fcntl.LOCK_EX)
            time.sleep(kernels_s)
            fcntl.flock(token, fcntl.LOCK_UN)
            began = time.monotonic()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            time.sleep(max(0.0, rest_s - (time.monotonic() - began)))
    return {"loss": float(np.mean(losses)) if losses else 0.0}
"""


@dataclass(frozen=True)
class Paced:
    """A member on one GPU: the seconds of a step, the share of it in which it holds the token, its epochs."""

    name: str
    step_s: float
    busy: float
    epochs: int

    @property
    def line(self) -> str:
        """The member in the ensemble's file."""
        config = json.dumps({"step_s": self.step_s, "busy": self.busy})
        stop = f"{{max_epochs: {self.epochs}, expected_epochs: {self.epochs}}}"
        return f"  - {{name: {self.name}, max_gpus: 1, config: {config}, stop: {stop}}}\n"

    @property
    def alone_s(self) -> float:
        """Seconds of its training alone."""
        return self.epochs * SAMPLES / BATCH * self.step_s


def paced_members(seed: int) -> list[Paced]:
    """Draw the members."""
    draw = random.Random(seed)
    found = []
    for number in range(PACED):
        step_s, busy = round(draw.uniform(0.2, 0.5), 3), round(draw.uniform(*BUSY), 2)
        epochs = max(1, round(draw.uniform(20.0, 100.0) / (step_s * SAMPLES / BATCH)))
        found.append(Paced(f"m{number:02d}", step_s, busy, epochs))
    return found


def paced(quick: bool = False) -> Table:
    """Run the members with shared GPUs, and with whole ones."""
    title = f"{PACED} paced members that share {GPUS} fake GPUs of a Slurm, `fluid`"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    own = paced_members(7)
    bound_s = max(sum(one.alone_s * one.busy for one in own) / GPUS, max(one.alone_s for one in own))
    whole_s = sum(one.alone_s for one in own) / GPUS
    shared = _run(own, PER_GPU)
    found = [shared] if quick else [shared, _run(own, 1)]
    rows = tuple(
        (what, f"{bound_s:.1f}", f"{run[0]:.1f}", f"{run[1]:.1f}", str(run[2]))
        for what, run in zip((f"up to {PER_GPU} on a GPU", "whole GPUs"), found, strict=False)
    )
    figures = [Figure("first step to last epoch over the bound", shared[1] / bound_s, 1.15)]
    compared_s = whole_s if quick else found[1][1]
    figures.append(Figure("over the same with whole GPUs", shared[1] / compared_s, 0.6))
    figures.append(Figure("members that failed", sum(run[3] for run in found), 0))
    return Table(
        title,
        ("run", "bound, s", "planned, s", "first step to last epoch, s", "tasks"),
        rows,
        tuple(figures),
        f"A real Slurm of {NODES} nodes with {GPUS_PER_NODE} fake GPUs each, all on this machine with"
        f" {os.cpu_count()} cores. Steps hold the token of their GPU for the time of their kernels. The bound"
        " is that of the devices' time.",
    )


def _run(own: list[Paced], most: int) -> tuple[float, float, int, int]:
    """Return the planned and the measured seconds, the number of tasks, and of members that failed."""
    with tempfile.TemporaryDirectory(prefix="hetctl-shares-", dir="/tmp") as name:
        Path(name).chmod(0o711)  # munged wants to reach its socket as anybody
        cluster = SlurmCluster(Path(name) / "s", nodes=NODES, gpus=GPUS_PER_NODE)
        cluster.start()
        try:
            return _run_on(cluster, Path(name) / "project", own, most)
        finally:
            cluster.stop()


def _run_on(
    cluster: SlurmCluster, folder: Path, own: list[Paced], most: int
) -> tuple[float, float, int, int]:
    environment = _project(cluster, folder, own)
    size = ("--gpus", str(GPUS), "--time", "30m", "--max-per-gpu", str(most))
    hetctl(folder, environment, "profile", "import", "rates.csv")
    planned_s = hetctl(folder, environment, "plan", *size)["predicted_makespan_s"]
    hetctl(folder, environment, "submit", *size, "--wait")
    events = list(events_in(Home(folder / ".hetctl").run("shares-001")))
    first = min(event.time for event in events if event.kind == "first_step")
    last = max(event.time for event in events if event.kind == "epoch")
    done = {event.source for event in events if event.kind == "converged"}
    tasks = sum(event.kind == "task_started" for event in events)
    return planned_s, last - first, tasks, len(own) - len(done)


def _project(cluster: SlurmCluster, folder: Path, own: list[Paced]) -> dict[str, str]:
    (folder / "site-configs").mkdir(parents=True)
    networks = NETWORKS.replace("{folder}", str(folder)).replace("{gpus}", str(GPUS_PER_NODE))
    (folder / "shared.py").write_text(networks)
    (folder / "ensemble.yaml").write_text(
        "name: shares\nframework: pytorch\nrescale_learning_rate: false\n"
        "functions: {input_fn: shared:input_fn, model_fn: shared:model_fn, train_fn: shared:train_fn}\n"
        "stop: {metric: val_accuracy, mode: max, patience: 999, max_epochs: 99}\n"
        f"members:\n{''.join(one.line for one in own)}"
    )
    rows = (f"{m.name},1,{BATCH / m.step_s},{m.epochs * SAMPLES},{m.busy}\n" for m in own)
    (folder / "rates.csv").write_text(f"member,gpus,rate,samples,busy\n{''.join(rows)}")
    variables = {name: value for name, value in cluster.environment().items() if name.startswith("OMPI")}
    site = SITE.format(nodes=NODES, gpus=GPUS_PER_NODE, environment=json.dumps(variables))
    (folder / "site-configs" / "lab.yaml").write_text(site)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
    return {**kept, **cluster.environment(), "HETCTL_SITE": "lab"}


if __name__ == "__main__":
    print((paced if "paced" in sys.argv else simulated)("--quick" in sys.argv))
