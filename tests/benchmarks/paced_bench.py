"""A run on a real Slurm with fake GPUs, with steps that sleep instead of training: the time lost.

python tests/benchmarks/paced_bench.py [--quick]
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from slurm_cluster import SlurmCluster, missing_programs

from hetctl.model.events import Event
from hetctl.perf.bounds import envelope_of, fluid_time
from hetctl.storage.paths import Home
from hetctl.storage.progress_fold import events_in

MEMBERS, NODES, GPUS_PER_NODE = 12, 4, 4
GPUS = NODES * GPUS_PER_NODE
MOST_GPUS = 8
SAMPLES, BATCH = 640, 32
KILL_AFTER_S = 40.0
LONG = 7
"""Factor of a run of ten minutes."""
SPEEDUP = (1.0, 1.9, 2.7, 3.4, 4.0, 4.6, 5.1, 5.6)
"""Of 1 to 8 GPUs over one."""
# One core for each rank: with two, threads of OpenMP spin for one another on a machine of two cores.
SITE = """\
extends: slurm
nodes: {nodes}
gpus_per_node: {gpus}
cores_per_node: 4
memory_per_node: 6000MiB
queues: [{{name: main, max_nodes: {nodes}, max_wall: 1h}}]
environment: {environment}
"""
NETWORKS = """
import json, os, time
import numpy as np
import torch

def input_fn(path):
    rng = np.random.default_rng(0)
    x, y = rng.random((700, 16), dtype=np.float32), rng.integers(0, 4, 700)
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
    distributed = torch.distributed.is_initialized()
    gpus = torch.distributed.get_world_size() if distributed else 1
    # A name in place of the rates: hetctl must not find them in the config.
    with open("{folder}/rates.json") as file:
        step_s = config["batch"] * gpus / json.load(file)[config["rates_of"]][gpus - 1]
    due, losses = time.monotonic(), []
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        due += step_s * len(x) / config["batch"]
        time.sleep(max(0.0, due - time.monotonic()))
    return {"loss": float(np.mean(losses)) if losses else 0.0}
"""


@dataclass(frozen=True)
class Paced:
    """A member: its rates on 1, 2, .. GPUs in samples/s, and its epochs."""

    name: str
    rates: tuple[float, ...]
    epochs: int

    @property
    def line(self) -> str:
        """The member in the ensemble's file."""
        config = json.dumps({"rates_of": self.name, "batch": BATCH})
        stop = f"{{max_epochs: {self.epochs}, expected_epochs: {self.epochs}}}"
        return f"  - {{name: {self.name}, max_gpus: {MOST_GPUS}, config: {config}, stop: {stop}}}\n"


def table(quick: bool = False) -> Table:
    """Run the ensemble whole, once more with a node that is killed, and without any rate known before."""
    if missing := missing_programs():
        return Table("A paced run on Slurm", (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    rows, figures = [], []
    for killed in (False,) if quick else (False, True):
        run = _run(members_of(5), killed)
        what = "one node killed" if killed else "no failure"
        rows.append(
            (what, f"{run.bound_s:.1f}", f"{run.planned_s:.1f}", f"{run.seconds:.1f}", f"{run.trained_s:.1f}")
        )
        figures.append(
            Figure(f"{what}: makespan over the bound", run.seconds / run.bound_s, 1.10 if killed else 1.20)
        )
        if not killed:
            figures.append(
                Figure(
                    "no failure: first step to last epoch, over the bound",
                    run.trained_s / run.bound_s,
                    1.10,
                )
            )
        figures.append(Figure(f"{what}: epochs lost or trained twice", run.wrong_epochs, 0))
        figures.append(Figure(f"{what}: jobs", run.jobs, 1))
    for times, bar in ((1, 1.20),) if quick else ((1, 1.20), (LONG, 1.10)):
        run = _run(members_of(5, times), known=False)
        what = f"rates unknown, {run.bound_s:.0f} s at least"
        cells = (f"{run.bound_s:.1f}", "", f"{run.submitted_s:.1f}", f"{run.trained_s:.1f}")
        rows.append((f"{what}; measured from `submit`", *cells))
        figures.append(
            Figure(f"{what}: `submit` to last epoch over the bound", run.submitted_s / run.bound_s, bar)
        )
        figures.append(Figure(f"{what}: epochs lost or trained twice", run.wrong_epochs, 0))
    return Table(
        f"{MEMBERS} paced members on {GPUS} fake GPUs of a Slurm, `fluid`",
        ("run", "bound, s", "planned, s", "measured, s", "first step to last epoch, s"),
        tuple(rows),
        tuple(figures),
        f"A real Slurm of {NODES} nodes with {GPUS_PER_NODE} fake GPUs each, all on this machine with "
        f"{os.cpu_count()} cores; steps sleep for the times of the rate table. The bound is the fluid bound "
        "of the true rates; with a killed node, that of the work left at the kill, on the other nodes' GPUs. "
        "Where rates are unknown, there is no profile: a config has a name in place of the rates.",
    )


@dataclass(frozen=True)
class Run:
    """What a run came to; seconds count from the job's start, and `submitted_s` from the command."""

    bound_s: float
    planned_s: float
    submitted_s: float
    seconds: float
    trained_s: float
    wrong_epochs: int
    jobs: int


def members_of(seed: int, times: int = 1) -> list[Paced]:
    """Draw an ensemble of about `times` 90 s on all GPUs."""
    draw = random.Random(seed)
    found = []
    for number in range(MEMBERS):
        rate = draw.uniform(70.0, 210.0)
        epochs = round(times * draw.uniform(50.0, 180.0) * rate / SAMPLES)
        found.append(Paced(f"m{number:02d}", tuple(round(rate * s, 2) for s in SPEEDUP), epochs))
    return found


def _run(members: list[Paced], killed: bool = False, *, known: bool = True) -> Run:
    with tempfile.TemporaryDirectory(prefix="hetctl-paced-", dir="/tmp") as name:
        Path(name).chmod(0o711)  # munged wants to reach its socket as anybody
        cluster = SlurmCluster(Path(name) / "s", nodes=NODES, gpus=GPUS_PER_NODE)
        cluster.start()
        try:
            return _run_on(cluster, Path(name) / "project", members, killed, known)
        finally:
            cluster.stop()


def _run_on(cluster: SlurmCluster, folder: Path, members: list[Paced], killed: bool, known: bool) -> Run:
    environment = _project(cluster, folder, members)
    size = ("--planner", "fluid", "--gpus", str(GPUS), "--time", "20m")
    planned_s = 0.0
    if known:
        hetctl(folder, environment, "profile", "import", "rates.csv")
        planned_s = hetctl(folder, environment, "plan", *size)["predicted_makespan_s"]
    lost: list[tuple[float, str]] = []
    if killed:
        threading.Thread(target=_kill_a_node, args=(cluster, folder, lost), daemon=True).start()
    submitted = time.time()
    status = hetctl(folder, environment, "submit", *size, "--wait")
    events = list(events_in(Home(folder / ".hetctl").run("paced-001")))
    began = min(event.time for event in events)
    first = min(event.time for event in events if event.kind == "first_step")
    last = max(event.time for event in events if event.kind == "epoch")
    bound_s = _bound(((float(m.epochs * SAMPLES), m) for m in members), GPUS)
    if lost:
        bound_s = lost[0][0] - began + _bound_of_the_rest(members, events, *lost[0])
    return Run(
        bound_s,
        planned_s,
        last - submitted,
        last - began,
        last - first,
        _wrong_epochs(members, events),
        len(status["jobs"]),
    )


def _project(cluster: SlurmCluster, folder: Path, members: list[Paced]) -> dict[str, str]:
    (folder / "site-configs").mkdir(parents=True)
    (folder / "paced.py").write_text(NETWORKS.replace("{folder}", str(folder)))
    (folder / "rates.json").write_text(json.dumps({member.name: member.rates for member in members}))
    (folder / "ensemble.yaml").write_text(
        "name: paced\nframework: pytorch\nrescale_learning_rate: false\n"
        "functions: {input_fn: paced:input_fn, model_fn: paced:model_fn, train_fn: paced:train_fn}\n"
        "stop: {metric: val_accuracy, mode: max, patience: 999, max_epochs: 99}\n"
        f"members:\n{''.join(member.line for member in members)}"
    )
    rows = (
        f"{member.name},{gpus},{rate},{member.epochs * SAMPLES}\n"
        for member in members
        for gpus, rate in enumerate(member.rates, start=1)
    )
    (folder / "rates.csv").write_text(f"member,gpus,rate,samples\n{''.join(rows)}")
    variables = {name: value for name, value in cluster.environment().items() if name.startswith("OMPI")}
    site = SITE.format(nodes=NODES, gpus=GPUS_PER_NODE, environment=json.dumps(variables))
    (folder / "site-configs" / "lab.yaml").write_text(site)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
    return {**kept, **cluster.environment(), "HETCTL_SITE": "lab"}


def _kill_a_node(cluster: SlurmCluster, folder: Path, lost: list[tuple[float, str]]) -> None:
    """Kill the last node of the job some time after its first step."""
    run = Home(folder / ".hetctl").run("paced-001")
    while not any(event.kind == "first_step" for event in events_in(run)):
        time.sleep(0.5)
    time.sleep(KILL_AFTER_S)
    lost.append((time.time(), cluster.nodes[-1]))
    cluster.crash_node(cluster.nodes[-1])


def _bound_of_the_rest(members: list[Paced], events: list[Event], at: float, node: str) -> float:
    """Return the fluid bound of what was left when a node was killed, on the GPUs of the others.

    A member that trained there had its finished epochs; of any other's epoch the part counts that was done.
    """
    left = GPUS - GPUS_PER_NODE
    works = []
    for member in members:
        own = [e for e in events if e.kind == "epoch" and e.source == member.name and e.time <= at]
        done = max((int(e.data["epoch"]) for e in own), default=0) * SAMPLES
        done += 0 if _is_on(events, member.name, node, at) else _part(member, events, own, at)
        if (rest := member.epochs * SAMPLES - done) > 0:
            works.append((float(rest), member))
    return _bound(works, left)


def _bound(works: Iterable[tuple[float, Paced]], gpus: int) -> float:
    """Return the fluid bound of samples of members."""
    curves = [(samples, dict(enumerate(member.rates, start=1))) for samples, member in works]
    return fluid_time([(samples, envelope_of(rates, gpus)) for samples, rates in curves], gpus)


def _steps(events: list[Event], member: str, at: float) -> list[Event]:
    return [e for e in events if e.kind == "task_started" and e.data["member"] == member and e.time <= at]


def _is_on(events: list[Event], member: str, node: str, at: float) -> bool:
    steps = _steps(events, member, at)
    return bool(steps) and any(place["node"] == node for place in steps[-1].data["placement"])


def _part(member: Paced, events: list[Event], own: list[Event], at: float) -> float:
    """Return the samples of its unfinished epoch that a member can have done at most."""
    steps = _steps(events, member.name, at)
    if not steps:
        return 0.0
    since = max([steps[-1].time, *(event.time for event in own)])
    return min((at - since) * member.rates[steps[-1].data["gpus"] - 1], float(SAMPLES))


def _wrong_epochs(members: list[Paced], events: list[Event]) -> int:
    """Count epochs that are missing, or were trained more than once."""
    trained = [
        (e.source, int(e.data["epoch"])) for e in events if e.kind == "epoch" and "evaluate_s" in e.data
    ]
    wanted = {(member.name, number) for member in members for number in range(1, member.epochs + 1)}
    return len(wanted ^ set(trained)) + len(trained) - len(set(trained))


def hetctl(folder: Path, environment: dict[str, str], *arguments: str) -> Any:
    """Run a command in a project's folder; return what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "hetctl", *arguments, "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
