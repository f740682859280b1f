"""How near to t* balanced batches come in real training: ranks on a real Slurm that sleep as a table says.

Each rank needs a launch time and a time per sample, by its number. At half of the steps the fastest becomes
three times as slow. t* is the least time in which all ranks can take the whole batch together, even in parts
of samples (LB-BSP, section 3.1).

    python tests/benchmarks/balanced_bench.py [--quick]
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paced_bench import hetctl
from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from slurm_cluster import SlurmCluster, missing_programs

from hetctl.methods.balance.observation_log import counted, records_in
from hetctl.methods.balance.step_time import TimeCurve, balance_time
from hetctl.storage.paths import Home

NODES, BATCH = 4, 128
LAUNCH_S = 0.02
PER_SAMPLE_S = (0.001, 0.002, 0.004, 0.008)
SLOWDOWN = 3.0
NEAR = 1.05
END = 10**9
"""A step after all others."""
CHUNKS = 8
"""Steps of an epoch."""
MANAGERS = {"curve": 10, "cpu": 30, "gpu": 30}
"""Bars of the iterations from the change until 1.05 t*, by manager."""
SITE = """\
extends: slurm
nodes: {nodes}
gpus_per_node: 1
cores_per_node: 1
memory_per_node: 6000MiB
queues: [{{name: main, max_nodes: {nodes}, max_wall: 1h}}]
environment: {environment}
"""
NETWORK = """
import json, time
import numpy as np
import torch

def input_fn(path):
    rng = np.random.default_rng(0)
    count = SAMPLES + 64
    x, y = rng.random((count, 16), dtype=np.float32), rng.integers(0, 4, count)
    return (x[:SAMPLES], y[:SAMPLES]), (x[SAMPLES:], y[SAMPLES:])

def model_fn(config):
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "loss": torch.nn.CrossEntropyLoss()}

def train_fn(data, model, optimizer, config):
    rank = torch.distributed.get_rank()
    losses, ends, sizes = [], [], []
    for x, y in data:
        began = time.monotonic()
        factor = config["slowdown"] if rank == 0 and train_fn.steps >= config["change"] else 1.0
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        due = began + config["launch_s"] + factor * config["per_sample_s"][rank] * len(x)
        time.sleep(max(0.0, due - time.monotonic()))
        loss.backward()
        optimizer.step()
        train_fn.steps += 1
        losses.append(float(loss.detach()))
        ends.append(time.monotonic())
        sizes.append(len(x))
    with open(f"{config['out']}-{rank}", "a") as file:
        json.dump([ends, sizes], file)
        print(file=file)
    return {"loss": float(np.mean(losses)) if losses else 0.0}

train_fn.steps = 0
"""


HOG_S, HOG_BATCH = 20.0, 192
"""Seconds for which a process shares a core, and for which it does not; samples of each rank."""
# Without these, malloc(3) gets blocks of more than 32 MiB anew in each step: a step with a few more images
# then takes twice as long, and times by batch have a jump.
HOG_SITE = """\
extends: local
gpus_per_node: 2
cores_per_node: 2
environment: {MALLOC_MMAP_THRESHOLD_: "1073741824", MALLOC_TRIM_THRESHOLD_: "4294967296"}
"""
CONVOLUTION = """
import json, time
import numpy as np
import torch
from torch import nn

def input_fn(path):
    rng = np.random.default_rng(0)
    x, y = rng.random((3904, 3, 40, 40), dtype=np.float32), rng.integers(0, 10, 3904)
    return (x[:3840], y[:3840]), (x[3840:], y[3840:])

def model_fn(config):
    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "loss": nn.CrossEntropyLoss()}

def train_fn(data, model, optimizer, config):
    losses, ends = [], []
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        ends.append(time.time())
    with open(f"{config['out']}-{torch.distributed.get_rank()}", "a") as file:
        print(json.dumps(ends), file=file)
    return {"loss": float(np.mean(losses)) if losses else 0.0}
"""


@dataclass(frozen=True)
class Case:
    """A run: its settings, and the table of its ranks."""

    name: str
    balance: str
    per_sample_s: Sequence[float]
    steps: int
    change: int

    @property
    def member(self) -> str:
        """The member in the ensemble's file."""
        return self.name.replace(" ", "-")


@dataclass(frozen=True)
class Iterations:
    """Seconds of each iteration but the first of an epoch, by the number of the step."""

    seconds: dict[int, float]

    def mean(self, first: int, last: int) -> float:
        """Return the mean of the iterations from `first` to before `last`."""
        return statistics.fmean(s for step, s in self.seconds.items() if first <= step < last)

    def reached(self, change: int, limit_s: float) -> int | None:
        """Return the iterations after `change` until two in succession take at most `limit_s`."""
        steps = sorted(step for step in self.seconds if step >= change)
        for one, other in itertools.pairwise(steps):
            if max(self.seconds[one], self.seconds[other]) <= limit_s:
                return one - change
        return None


def table(quick: bool = False) -> Table:
    """Train with equal batches and with each manager, and measure the cost on equal ranks."""
    title = f"Balanced batches in training: {NODES} ranks on {NODES} nodes of a Slurm, PyTorch"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    steps = 80 if quick else 160
    cases = [Case("equal", "{mode: off}", PER_SAMPLE_S, 3 * CHUNKS, END)]
    cases += [
        Case(name, f"{{mode: on, manager: {name}}}", PER_SAMPLE_S, steps, steps // 2) for name in MANAGERS
    ]
    even = (statistics.harmonic_mean(PER_SAMPLE_S),) * NODES
    cases += [
        Case(f"even {mode} {turn}", f"{{mode: {mode}}}", even, 4 * CHUNKS, END)
        for turn in range(1 if quick else 3)
        for mode in ("off", "auto", "on")
    ]
    measured = _measure(cases)
    before_s, after_s = t_star(1.0), t_star(SLOWDOWN)
    equal_s = measured["equal"].mean(CHUNKS, END)
    rows, figures = [], []
    rows.append(("equal batches", f"{equal_s:.3f} s", f"{equal_s / before_s:.2f}", "", ""))
    for name, bar in MANAGERS.items():
        found = measured[name]
        steady = found.mean(3 * steps // 8, steps // 2) / before_s
        after = found.mean(7 * steps // 8, steps) / after_s
        reached = found.reached(steps // 2, NEAR * after_s)
        rows.append(
            (f"`{name}`", f"{steady * before_s:.3f} s", f"{steady:.3f}", _count(reached), f"{after:.3f}")
        )
        figures.append(Figure(f"`{name}`: iteration over t* in steady state", steady, NEAR))
        late = float("inf") if reached is None else reached
        figures.append(Figure(f"`{name}`: iterations after a slowdown to {NEAR} t*", late, bar))
    for mode in ("auto", "on"):
        ratio = statistics.median(
            measured[f"even {mode} {turn}"].mean(CHUNKS, END) / measured[f"even off {turn}"].mean(CHUNKS, END)
            for turn in range(1 if quick else 3)
        )
        rows.append((f"equal ranks, `{mode}` over `off`", "", f"{ratio:.4f}", "", ""))
        figures.append(Figure(f"equal ranks: iteration with `{mode}` over `off`", ratio, 1.01))
    return Table(
        title,
        ("manager", "iteration", "over t*", f"iterations to {NEAR} t* after the slowdown", "then over t*"),
        tuple(rows),
        tuple(figures),
        f"`hetctl submit` on a real Slurm of {NODES} nodes on this machine with {os.cpu_count()} cores. "
        f"Each rank sleeps {LAUNCH_S * 1e3:g} ms and {', '.join(f'{s * 1e3:g}' for s in PER_SAMPLE_S)} ms "
        f"per sample, of {NODES * BATCH} a step. At half of the steps the fastest slows down threefold. "
        f"t* is {before_s:.3f} s, then {after_s:.3f} s. Steady: the quarter of the steps before that.",
    )


def t_star(factor: float) -> float:
    """Return t* with the fastest rank slower by a factor."""
    speeds = (factor * PER_SAMPLE_S[0], *PER_SAMPLE_S[1:])
    curves = [TimeCurve(((1.0, LAUNCH_S + s), (1000.0, LAUNCH_S + 1000 * s))) for s in speeds]
    return balance_time(curves, NODES * BATCH)


def hog(quick: bool = False) -> Table:
    """Train two ranks that compute on a core each; a hog takes half of one of the cores now and then."""
    title = "Balanced batches on two cores, one of them shared with a process that comes and goes"
    if (os.cpu_count() or 1) < 2:
        return Table(title, (), (), (), "This machine has one core.")
    epochs = 15 if quick else 40
    with tempfile.TemporaryDirectory(prefix="hetctl-hog-", dir="/tmp") as name:
        equal_s, _ = _hogged(Path(name) / "off", "off", epochs // 2)
        found = {m: _hogged(Path(name) / m, f"{{mode: on, manager: {m}}}", epochs) for m in MANAGERS}
    rows = [("off", f"{equal_s:.3f} s", "", "")]
    figures = []
    for manager, (seconds, bound) in found.items():
        rows.append((f"`{manager}`", f"{seconds:.3f} s", f"{bound:.3f} s", f"{seconds / bound:.3f}"))
        figures.append(Figure(f"`{manager}`: mean iteration over t*", seconds / bound, 1.10))
    return Table(
        title,
        ("manager", "iteration", "t*", "over t*"),
        tuple(rows),
        tuple(figures),
        f"Two ranks bound to a core each train a convolution on {2 * HOG_BATCH} images a step (PyTorch, "
        f"`local`). Every {HOG_S:g} s a process that computes on the second core begins or ends. t* is the "
        "mean of those with and without it, each from the rates of both ranks in all steps of that state.",
    )


def _hogged(folder: Path, balance: str, epochs: int) -> tuple[float, float]:
    """Return the mean iteration beside a hog, and the mean t*; 0 if there is no log of rates."""
    (folder / "site-configs").mkdir(parents=True)
    (folder / "conv.py").write_text(CONVOLUTION)
    (folder / "ensemble.yaml").write_text(
        "name: hogged\nframework: pytorch\nrescale_learning_rate: false\n"
        "functions: {input_fn: conv:input_fn, model_fn: conv:model_fn, train_fn: conv:train_fn}\n"
        f"batch_size: {HOG_BATCH}\nbalance: {balance}\nstop: {{patience: 999, max_epochs: {epochs}}}\n"
        f"members:\n  - {{name: m, config: {{out: {folder / 'steps'}}}}}\n"
    )
    (folder / "rates.csv").write_text(
        f"member,gpus,rate,samples\nm,1,100,{3840 * epochs}\nm,2,200,{3840 * epochs}\n"
    )
    (folder / "site-configs" / "lab.yaml").write_text(HOG_SITE)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
    environment = {**kept, "HETCTL_SITE": "lab"}
    hetctl(folder, environment, "profile", "import", "rates.csv")
    over, states = threading.Event(), [(0.0, False)]
    beside = threading.Thread(target=_come_and_go, args=(folder / "steps-0", over, states))
    beside.start()
    try:
        size = ("--gpus", "2", "--time", "20m", "--planner", "fixed-2")
        hetctl(folder, environment, "submit", *size, "--wait")
    finally:
        over.set()
        beside.join()
    return _over_states(folder, states)


def _come_and_go(steps: Path, over: threading.Event, states: list[tuple[float, bool]]) -> None:
    """Start and kill the hog in turn, from the second epoch on; note when."""
    while not steps.exists():
        if over.wait(0.2):
            return
    core = max(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    while not over.is_set():
        states.append((time.time(), True))
        with subprocess.Popen([sys.executable, "-c", code]) as process:
            over.wait(HOG_S)
            process.kill()
        states.append((time.time(), False))
        over.wait(HOG_S)


def _over_states(folder: Path, states: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """Return the mean seconds of an iteration and of its t*, from the second epoch on."""
    lines = [json.loads(line) for line in (folder / "steps-0").read_text().splitlines()]
    steps = [(other, other - one) for ends in lines[1:] for one, other in itertools.pairwise(ends)]
    seconds = statistics.fmean(step_s for _, step_s in steps)
    log = Home(folder / ".hetctl").run("hogged-001").balance / "m.jsonl"
    if not log.exists():
        return seconds, 0.0
    with log.open() as lines_of_log:
        seen = counted(records_in(lines_of_log))

    def hogged(at: float) -> bool:
        return next(on for since, on in reversed(states) if since <= at)

    bounds = {}
    for state in (False, True):
        # Steps during which it came or went belong to neither.
        own = [one for one in seen if hogged(one.time) == hogged(one.time - 2 * max(one.compute_s)) == state]
        rates = [sum(one.batches[w] for one in own) / sum(one.compute_s[w] for one in own) for w in (0, 1)]
        bounds[state] = 2 * HOG_BATCH / sum(rates)
    return seconds, statistics.fmean(bounds[hogged(at)] for at, _ in steps)


def _count(iterations: int | None) -> str:
    return "never" if iterations is None else str(iterations)


def _measure(cases: Sequence[Case]) -> dict[str, Iterations]:
    with tempfile.TemporaryDirectory(prefix="hetctl-balanced-", dir="/tmp") as name:
        Path(name).chmod(0o711)  # munged wants to reach its socket as anybody
        cluster = SlurmCluster(Path(name) / "s", nodes=NODES, gpus=1)
        cluster.start()
        try:
            return {case.name: _train(cluster, Path(name) / case.member, case) for case in cases}
        finally:
            cluster.stop()


def _train(cluster: SlurmCluster, folder: Path, case: Case) -> Iterations:
    (folder / "site-configs").mkdir(parents=True)
    samples = CHUNKS * NODES * BATCH
    (folder / "paced.py").write_text(NETWORK.replace("SAMPLES", str(samples)))
    epochs = case.steps // CHUNKS
    config = {
        "per_sample_s": case.per_sample_s,
        "launch_s": LAUNCH_S,
        "slowdown": SLOWDOWN,
        "change": case.change,
        "out": str(folder / "steps"),
    }
    (folder / "ensemble.yaml").write_text(
        "name: balanced\nframework: pytorch\nrescale_learning_rate: false\n"
        "functions: {input_fn: paced:input_fn, model_fn: paced:model_fn, train_fn: paced:train_fn}\n"
        f"batch_size: {BATCH}\nbalance: {case.balance}\n"
        f"stop: {{patience: 999, max_epochs: {epochs}}}\n"
        f"members:\n  - {{name: m, config: {json.dumps(config)}}}\n"
    )
    rates = "".join(f"m,{gpus},{100 * gpus},{samples * epochs}\n" for gpus in (1, 2, 4))
    (folder / "rates.csv").write_text(f"member,gpus,rate,samples\n{rates}")
    variables = {name: value for name, value in cluster.environment().items() if name.startswith("OMPI")}
    (folder / "site-configs" / "lab.yaml").write_text(
        SITE.format(nodes=NODES, environment=json.dumps(variables))
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
    environment = {**kept, **cluster.environment(), "HETCTL_SITE": "lab"}
    hetctl(folder, environment, "profile", "import", "rates.csv")
    size = ("--gpus", str(NODES), "--time", "20m", "--planner", f"fixed-{NODES}")
    hetctl(folder, environment, "submit", *size, "--wait")
    return _iterations(folder / "steps-0")


def _iterations(path: Path) -> Iterations:
    seconds, step = {}, 0
    for line in path.read_text().splitlines():
        ends, _ = json.loads(line)
        for number, (one, other) in enumerate(itertools.pairwise(ends), start=step + 1):
            seconds[number] = other - one
        step += len(ends)
    return Iterations(seconds)


if __name__ == "__main__":
    print(table("--quick" in sys.argv), hog("--quick" in sys.argv), sep="\n\n")
