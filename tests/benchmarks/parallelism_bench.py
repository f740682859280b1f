"""Hops beside what a user would pick: all workers for one member after another, and one worker for each.

Figure 8 of CEREBRO in small, at its smallest batch: 16 members on 8 workers of a real Slurm, which sleep as
long as a table says for their samples. Exchanges of gradients, hops and starts are real.

    python tests/benchmarks/parallelism_bench.py [--quick]
"""

from __future__ import annotations

import heapq
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from paced_bench import hetctl
from tables import Figure, Table
from visits_bench import CONFIGS, NODES, WORKERS, prepared, running, times, visits_in

sys.path.insert(0, str(Path(__file__).parent.parent))
from slurm_cluster import SlurmCluster, missing_programs

from hetctl.model.events import Event
from hetctl.storage.paths import Home
from hetctl.storage.progress_fold import events_in

ROWS, FEATURES, UNITS, BATCH = 512, 6272, 128, 16
"""Samples of a partition, numbers of a sample, hidden units, and samples of a batch on each worker."""
HOPS, ALL, ONE = "hops", "all workers for each member", "one worker for each member"
LONGEST_FIRST = f"{ONE}, longest first"
NETWORK = f"""
import os, time
from pathlib import Path
import numpy as np
import torch
from hetctl.partitions import read

def input_fn(data, path=None):
    return read(path or Path(__file__).with_name("all.npz"))

def model_fn(config):
    model = torch.nn.Sequential(torch.nn.Linear({FEATURES}, {UNITS}), torch.nn.Linear({UNITS}, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {{"model": model, "optimizer": optimizer, "loss": torch.nn.CrossEntropyLoss()}}

def train_fn(data, model, optimizer, config):
    began, losses, seconds = time.monotonic(), [], 0.0
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        # The first value of each sample is the number of its partition.
        seconds += float(sum(config["per_sample"][int(number)] for number in x[:, 0]))
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    return {{"loss": float(np.mean(losses)) if losses else 0.0}}
"""
ENSEMBLE = f"""\
name: side
framework: pytorch
functions: {{{{input_fn: paced:input_fn, model_fn: paced:model_fn, train_fn: paced:train_fn}}}}
rescale_learning_rate: false
samples_per_epoch: {ROWS * WORKERS}
batch_size: {BATCH}
balance: off
stop: {{{{metric: val_loss, patience: 99, max_epochs: 1}}}}
{{partitions}}members:
"""


@dataclass(frozen=True)
class Side:
    """One way to train the members.

    Parameters
    ----------
    partitions : str
        Key of the ensemble's file, with its line.
    options : sequence of str
        Options of ``hetctl submit``.
    longest_first : bool
        Order of the members in the ensemble's file; by default as they were drawn.
    """

    name: str
    partitions: str
    options: Sequence[str]
    longest_first: bool = False

    def run(self, cluster: SlurmCluster, folder: Path, seconds: np.ndarray) -> list[Event]:
        """Train all members for an epoch; return the events."""
        folder.mkdir()
        place(folder)
        (folder / "paced.py").write_text(NETWORK)
        if self.longest_first:
            seconds = seconds[np.argsort(-seconds.sum(axis=1))]
        configs = [json.dumps({"per_sample": list(row / ROWS)}) for row in seconds]
        (folder / "ensemble.yaml").write_text(
            ENSEMBLE.format(partitions=self.partitions.format(folder=folder))
            + "".join(f"  - {{name: m{k}, config: {config}}}\n" for k, config in enumerate(configs))
        )
        samples = ROWS * WORKERS
        rates = [
            f"m{k},{gpus},{gpus * samples / row.sum():.6f},{samples}\n"
            for k, row in enumerate(seconds)
            for gpus in (1, WORKERS)
        ]
        environment = prepared(folder, cluster, WORKERS // NODES, rates)
        hetctl(
            folder, environment, "submit", "--gpus", str(WORKERS), "--time", "20m", *self.options, "--wait"
        )
        return events_in(Home(folder / ".hetctl").run("side-001"))


SIDES = (
    Side(
        HOPS,
        f"partitions: {{{{count: {WORKERS}, path: '{{folder}}/$SLURMD_NODENAME/{{{{partition}}}}.npz'}}}}\n",
        ("--mode", "hopper"),
    ),
    Side(ALL, "", ("--planner", f"fixed-{WORKERS}", "--sharing", "none")),
    Side(ONE, "", ("--planner", "fixed-1", "--sharing", "none")),
    Side(LONGEST_FIRST, "", ("--planner", "fixed-1", "--sharing", "none"), longest_first=True),
)


def place(folder: Path) -> None:
    """Write the samples: each partition on its node, and all in one file."""
    rng = np.random.default_rng(0)
    parts = []
    for number in range(WORKERS):
        node = folder / f"n{number // (WORKERS // NODES) + 1}"
        node.mkdir(exist_ok=True)
        x = rng.random((ROWS + BATCH, FEATURES), dtype=np.float32)
        x[:, 0] = number
        y = rng.integers(0, 4, len(x))
        parts.append({"x": x[:ROWS], "y": y[:ROWS], "x_validation": x[ROWS:], "y_validation": y[ROWS:]})
        np.savez(node / f"{number}.npz", **parts[-1])
    np.savez(folder / "all.npz", **{key: np.concatenate([part[key] for part in parts]) for key in parts[0]})


def bytes_moved(side: Side, events: Sequence[Event]) -> float:
    """Return the bytes between nodes: of states, or else of samples that lie elsewhere, and of gradients."""
    if side.name == HOPS:
        return float(sum(visit["bytes"] for visit in visits_in(events)))
    samples = CONFIGS * WORKERS * ROWS * FEATURES * 4 * (NODES - 1) / NODES
    if side.name in (ONE, LONGEST_FIRST):
        return samples
    numbers = (FEATURES + 1) * UNITS + (UNITS + 1) * 4
    # A ring sends 2 (n - 1) / n of the gradients from each of its n workers, here every second time to
    # another node.
    per_step = 2 * (WORKERS - 1) * numbers * 4 * NODES / WORKERS
    return samples + CONFIGS * (ROWS // BATCH) * per_step


def least_s(side: Side, seconds: np.ndarray) -> float:
    """Return the seconds of a side's schedule if nothing but samples took any time."""
    alone_s = seconds.sum(axis=1)
    if side.name == ALL:
        return float(alone_s.sum()) / WORKERS
    if side.name == HOPS:
        return max(float(alone_s.max()), float(seconds.sum(axis=0).max()))
    free_s = [0.0] * WORKERS
    for member_s in sorted(alone_s, reverse=True) if side.longest_first else alone_s:
        heapq.heapreplace(free_s, free_s[0] + float(member_s))
    return max(free_s)


def spent_s(events: Sequence[Event]) -> float:
    """Return the time from the start of the first step to the end of the last one."""
    steps = [event.time for event in events if event.kind in ("task_started", "task_ended")]
    return max(steps) - min(steps)


def table(_quick: bool = False) -> Table:
    """Train the same members in three ways."""
    title = f"{CONFIGS} members on {WORKERS} workers: hops beside data-parallel and single jobs"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    seconds = times(0)
    found = {}
    with tempfile.TemporaryDirectory(prefix="hetctl-side-", dir="/tmp") as name, running() as cluster:
        for number, side in enumerate(SIDES):
            events = side.run(cluster, Path(name) / str(number), seconds)
            found[side.name] = spent_s(events), bytes_moved(side, events)
    alone = [least_s(side, seconds) for side in SIDES]
    rows = [
        (name, f"{least:.1f} s", f"{spent:.1f} s", f"{moved / 1e6:.0f} MB")
        for (name, (spent, moved)), least in zip(found.items(), alone, strict=True)
    ]
    hops_s, hops_bytes = found[HOPS]
    others = {name: result for name, result in found.items() if name != HOPS}
    figures = (
        Figure("hops over all workers for each member: time", hops_s / others[ALL][0], 1.0),
        Figure(f"hops over {LONGEST_FIRST}, schedules alone", alone[0] / alone[3], 1.0),
        Figure(f"hops over {LONGEST_FIRST}: time", hops_s / others[LONGEST_FIRST][0], 1.0),
        Figure(
            "hops over the least of the others: bytes", hops_bytes / min(b for _, b in others.values()), 1.0
        ),
    )
    note = (
        f"One epoch of {ROWS * WORKERS} samples in {WORKERS} partitions of {ROWS * FEATURES * 4 / 1e6:.1f} "
        f"MB on {NODES} nodes of a real Slurm, batches of {BATCH}. A sample takes as long on each of all "
        "workers as on one alone; starts, evaluations, and exchanges of gradients through Gloo and of states "
        "are real. Bytes of states are counted; those of samples and gradients are computed: a member reads "
        "what lies on other nodes, and gradients go round a ring. Members are in a "
        "random order, in which the longest comes last, a poor list for single jobs; `longest first` is a "
        "good one. The second column is the schedule alone, if nothing but samples took time; of hops "
        "it is the bound, the longest member. They gain by less overhead and fewer bytes over a good list. "
        "In CEREBRO's Figure 6 they take 0.91 of the time of single jobs (17.7 and 19.5 hours)."
    )
    return Table(
        title, ("members have", "schedule alone", "time", "bytes between nodes"), tuple(rows), figures, note
    )


if __name__ == "__main__":
    print(table("--quick" in sys.argv), flush=True)
