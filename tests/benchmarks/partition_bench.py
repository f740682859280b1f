"""Accuracy on data sorted by label on the nodes' own disks, while samples migrate (LB-BSP, section 3.5).

As in the paper, five workers have two classes each, and batches in the ratios 64:96:128:160:192. Ranks of a
real Slurm sleep for each sample such that these batches take equally long.

    python tests/benchmarks/partition_bench.py [--quick]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from paced_bench import hetctl
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from slurm_cluster import SlurmCluster, missing_programs

from hetctl.model.events import Event
from hetctl.storage.paths import Home
from hetctl.storage.progress_fold import events_in

BATCHES = (64, 96, 128, 160, 192)
"""Of the paper's workers."""
NODES, BATCH = len(BATCHES), 16
STEP_S = 0.04
CLASSES = 10 // NODES
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
import time
import numpy as np
import torch

def input_fn(data, path):
    arrays = np.load(path)
    return (arrays["x"], arrays["y"]), (arrays["x_validation"], arrays["y_validation"])

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()

def model_fn(config):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "loss": torch.nn.CrossEntropyLoss(),
        "metrics": {"accuracy": accuracy},
    }

def train_fn(data, model, optimizer, config):
    per_sample_s = config["per_sample_s"][torch.distributed.get_rank()]
    losses = []
    for x, y in data:
        due = time.monotonic() + per_sample_s * len(x)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        time.sleep(max(0.0, due - time.monotonic()))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"loss": float(np.mean(losses))}
"""


@dataclass(frozen=True)
class Case:
    """Placement of the data, and the balancing."""

    name: str
    is_sorted: bool
    balance: str


@dataclass(frozen=True)
class Trained:
    """Result of a run: validation accuracy by epoch, and what has migrated."""

    accuracy: list[float]
    samples: int
    migrations: int
    apart: int

    @property
    def last(self) -> float:
        """Mean accuracy of the last five epochs."""
        return statistics.fmean(self.accuracy[-5:])


CASES = (
    Case("on every node, equal batches", is_sorted=False, balance="off"),
    Case("on every node, balanced", is_sorted=False, balance="on"),
    Case("sorted by label, equal batches", is_sorted=True, balance="off"),
    Case("sorted by label, balanced", is_sorted=True, balance="on"),
)


def table(quick: bool = False) -> Table:
    """Train with each placement, and compare the accuracies."""
    title = f"Partitioned data: {NODES} ranks on {NODES} nodes of a Slurm, two classes of digits on each"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    epochs, seeds = (12, 1) if quick else (30, 3)
    found = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="hetctl-parts-", dir="/tmp") as name:
        Path(name).chmod(0o711)  # munged wants to reach its socket as anybody
        cluster = SlurmCluster(Path(name) / "s", nodes=NODES, gpus=1)
        cluster.start()
        try:
            for number, case in enumerate(CASES):
                for seed in range(seeds):
                    folder = Path(name) / f"{number}-{seed}"
                    found[case].append(_train(cluster, folder, case, epochs, seed))
        finally:
            cluster.stop()
    rows = [_row(case, runs) for case, runs in found.items()]
    sorted_runs, shuffled = found[CASES[3]], found[CASES[1]]
    lost = statistics.fmean(run.last for run in shuffled) - statistics.fmean(run.last for run in sorted_runs)
    apart = max(run.apart for run in sorted_runs)
    return Table(
        title,
        ("the data lie", "accuracy", "migrated samples", "in transfers", "accesses differ by at most"),
        tuple(rows),
        (
            Figure("sorted by label, balanced: accuracy below that of shuffled data", lost, 0.01),
            Figure("sorted by label, balanced: largest difference of accesses", apart, 2),
        ),
        f"scikit-learn's digits (1,437 images), {epochs} epochs, {seeds} seeds, PyTorch, momentum 0.9; mean "
        f"accuracy of the last five epochs, least and most of the seeds. {NODES * BATCH} images a step; "
        f"ranks sleep such that batches"
        f" in the ratios {':'.join(map(str, BATCHES))} take {STEP_S * 1e3:g} ms.",
    )


def _row(case: Case, runs: Sequence[Trained]) -> tuple[str, ...]:
    last = [run.last for run in runs]
    spread = f"{statistics.fmean(last):.4f} ({min(last):.4f} to {max(last):.4f})"
    if not case.is_sorted:
        return case.name, spread, "", "", ""
    return (
        case.name,
        spread,
        f"{statistics.fmean(run.samples for run in runs):.0f}",
        f"{statistics.fmean(run.migrations for run in runs):.0f}",
        str(max(run.apart for run in runs)),
    )


def _train(cluster: SlurmCluster, folder: Path, case: Case, epochs: int, seed: int) -> Trained:
    (folder / "site-configs").mkdir(parents=True)
    samples = _place(folder / "data", cluster.nodes, case)
    (folder / "sorted.py").write_text(NETWORK)
    total = sum(BATCHES)
    config = {"per_sample_s": [STEP_S * total / (NODES * BATCH * batch) for batch in BATCHES]}
    (folder / "ensemble.yaml").write_text(
        "name: sorted\nframework: pytorch\nrescale_learning_rate: false\n"
        "functions: {input_fn: sorted:input_fn, model_fn: sorted:model_fn, train_fn: sorted:train_fn}\n"
        f"partitions:\n  count: {NODES}\n  path: {folder}/data/$SLURMD_NODENAME/{{partition}}.npz\n"
        f"samples_per_epoch: {samples}\nbatch_size: {BATCH}\nbalance: {case.balance}\n"
        f"stop: {{metric: val_accuracy, mode: max, patience: 999, max_epochs: {epochs}}}\n"
        f"members:\n  - {{name: m, seed: {seed}, config: {json.dumps(config)}}}\n"
    )
    rates = "".join(f"m,{gpus},{100 * gpus},{samples * epochs}\n" for gpus in range(1, NODES + 1))
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
    return _trained(events_in(Home(folder / ".hetctl").run("sorted-001")))


def _place(folder: Path, nodes: Sequence[str], case: Case) -> int:
    """Write the partitions of each node; return the number of training samples."""
    digits = load_digits()
    images = (digits.data / 16.0).astype(np.float32)
    x, held_out, y, held_out_y = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    for place, node in enumerate(nodes):
        (folder / node).mkdir(parents=True)
        for partition in [place] if case.is_sorted else range(NODES):
            own, own_held_out = y // CLASSES == partition, held_out_y // CLASSES == partition
            np.savez(
                folder / node / f"{partition}.npz",
                x=x[own],
                y=y[own],
                x_validation=held_out[own_held_out],
                y_validation=held_out_y[own_held_out],
            )
    return len(x)


def _trained(events: Sequence[Event]) -> Trained:
    def of(kind: str) -> list[Any]:
        return [event.data for event in events if event.kind == kind]

    migrated = [event["samples"] for event in of("migration")]
    apart = [event["most"] - event["fewest"] for event in of("sample_accesses")]
    accuracy = [epoch["metrics"]["val_accuracy"] for epoch in of("epoch")]
    return Trained(accuracy, sum(migrated), len(migrated), max(apart, default=0))


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
