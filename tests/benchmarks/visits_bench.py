"""How near to its bound members hop in real jobs: ranks on a real Slurm whose visits last as a table says.

python tests/benchmarks/visits_bench.py [--quick]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from paced_bench import hetctl
from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from slurm_cluster import SlurmCluster, missing_programs

from hetctl.methods.hopper.schedule import UnitTimes, lower_bound
from hetctl.model.events import Event
from hetctl.storage.paths import Home
from hetctl.storage.progress_fold import events_in

NODES, CONFIGS, WORKERS = 4, 16, 8
ROWS, BATCH = 64, 16
"""Samples of a partition, and of a batch."""
SHORTEST_S, LONGEST_S, SPREAD = 0.4, 4.0, 0.05
"""Visits of the fastest and of the slowest member, and the deviation between partitions."""
STATE_MB, HOPPING, HOP_VISIT_S = 100, 8, 1.0
"""Size of a state, number of members and length of their visits where hops are timed."""
SITE = """\
extends: slurm
nodes: {nodes}
gpus_per_node: {gpus}
cores_per_node: {gpus}
memory_per_node: 6000MiB
queues: [{{name: main, max_nodes: {nodes}, max_wall: 1h}}]
environment: {environment}
"""
NETWORK = """
import time
import numpy as np
import torch
from hetctl.partitions import read

def input_fn(data, path):
    return read(path)

def model_fn(config):
    layers = [torch.nn.Linear(16, 4)]
    if config["numbers"]:
        layers.append(torch.nn.ParameterList([torch.zeros(config["numbers"])]))
    model = torch.nn.ModuleList(layers)
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.01)
    model.forward = lambda x: layers[0](x)
    return {"model": model, "optimizer": optimizer, "loss": torch.nn.CrossEntropyLoss()}

def train_fn(data, model, optimizer, config):
    began, losses, seconds = time.monotonic(), [], 0.0
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        # The first value of each sample is the number of its partition.
        seconds = config["seconds"][int(x[0, 0])]
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    return {"loss": float(np.mean(losses)) if losses else 0.0}
"""


@dataclass(frozen=True)
class Hopping:
    """A run of members that hop.

    Parameters
    ----------
    seconds : array of shape (members, partitions)
        Length of the visits that train.
    numbers : int
        Numbers of each network beside those that it trains.
    homes : sequence of sequences of str
        Nodes of each partition.
    """

    seconds: np.ndarray
    homes: Sequence[Sequence[str]]
    gpus_per_node: int
    numbers: int = 0
    epochs: int = 1
    nodes: int = NODES

    def run(self, cluster: SlurmCluster, folder: Path, *options: str) -> list[Event]:
        """Submit the run and wait for its end; return its events."""
        folder.mkdir()
        partitions = self.seconds.shape[1]
        self._place(folder / "disks")
        (folder / "visited.py").write_text(NETWORK)
        configs = [{"seconds": list(row), "numbers": self.numbers} for row in self.seconds]
        (folder / "ensemble.yaml").write_text(
            "name: visits\nframework: pytorch\nfunctions: {input_fn: visited:input_fn, "
            "model_fn: visited:model_fn, train_fn: visited:train_fn}\n"
            f"partitions: {{count: {partitions},"
            f" path: '{folder}/disks/$SLURMD_NODENAME/{{partition}}.npz'}}\n"
            f"samples_per_epoch: {ROWS * partitions}\nbatch_size: {BATCH}\n"
            f"stop: {{metric: val_loss, patience: 99, max_epochs: {self.epochs}}}\nmembers:\n"
            + "".join(f"  - {{name: m{k}, config: {json.dumps(c)}}}\n" for k, c in enumerate(configs))
        )
        rates = [
            f"m{k},1,{ROWS * partitions / row.sum():.6f},{ROWS * partitions * self.epochs}\n"
            for k, row in enumerate(self.seconds)
        ]
        environment = prepared(folder, cluster, self.gpus_per_node, rates, self.nodes)
        size = ("--mode", "hopper", "--gpus", str(self.nodes * self.gpus_per_node), "--time", "20m")
        hetctl(folder, environment, "submit", *size, *options, "--wait")
        return events_in(Home(folder / ".hetctl").run("visits-001"))

    def _place(self, disks: Path) -> None:
        rng = np.random.default_rng(0)
        for number, nodes in enumerate(self.homes):
            x = rng.random((ROWS + BATCH, 16), dtype=np.float32)
            x[:, 0] = number
            y = rng.integers(0, 4, len(x))
            arrays = {"x": x[:ROWS], "y": y[:ROWS], "x_validation": x[ROWS:], "y_validation": y[ROWS:]}
            for node in nodes:
                (disks / node).mkdir(parents=True, exist_ok=True)
                np.savez(disks / node / f"{number}.npz", **arrays)


def prepared(
    folder: Path, cluster: SlurmCluster, gpus_per_node: int, rates: Sequence[str], nodes: int = NODES
) -> dict[str, str]:
    """Write the site of a project and import its rates; return the environment of its commands."""
    (folder / "site-configs").mkdir()
    own = {name: value for name, value in cluster.environment().items() if name.startswith("OMPI")}
    site = SITE.format(nodes=nodes, gpus=gpus_per_node, environment=json.dumps(own))
    (folder / "site-configs" / "lab.yaml").write_text(site)
    (folder / "rates.csv").write_text("member,gpus,rate,samples\n" + "".join(rates))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
    environment = {**kept, **cluster.environment(), "HETCTL_SITE": "lab"}
    hetctl(folder, environment, "profile", "import", "rates.csv")
    return environment


def visits_in(events: Sequence[Event]) -> list[Mapping[str, Any]]:
    """Return the data of the visits, in the order of their ends."""
    return [event.data for event in events if event.kind == "visit"]


def makespan_s(events: Sequence[Event]) -> float:
    """Return the time from the first visit's begin to the last one's end."""
    visits = visits_in(events)
    return max(v["ended_at"] for v in visits) - min(v["began_at"] for v in visits)


def times(seed: int) -> np.ndarray:
    """Return the seconds of visits; the members' speeds differ tenfold."""
    rng = np.random.default_rng(seed)
    whole = rng.permutation(np.geomspace(SHORTEST_S, LONGEST_S, CONFIGS))
    return whole[:, None] * (1 + SPREAD * rng.standard_normal((CONFIGS, WORKERS)))


def table(quick: bool = False) -> Table:
    """Let 16 members hop over 8 workers, by plan and by draw, and compare with the bound."""
    title = f"Hops in training: {CONFIGS} members on {WORKERS} workers of a real Slurm, PyTorch"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    found: dict[str, list[float]] = {"best": [], "randomized": []}
    bounds = []
    with tempfile.TemporaryDirectory(prefix="hetctl-visits-", dir="/tmp") as name, running() as cluster:
        for seed in range(1 if quick else 3):
            homes = [(f"n{k // 2 + 1}",) for k in range(WORKERS)]
            hopping = Hopping(times(seed), homes, WORKERS // NODES)
            bounds.append(bound_s(hopping))
            for scheduler, ratios in found.items():
                folder = Path(name) / f"{scheduler}-{seed}"
                events = hopping.run(cluster, folder, "--hop-scheduler", scheduler)
                ratios.append(makespan_s(events) / bounds[-1])
    medians = {scheduler: statistics.median(ratios) for scheduler, ratios in found.items()}
    rows = [
        (f"`{scheduler}`", f"{medians[scheduler]:.3f}", ", ".join(f"{ratio:.3f}" for ratio in ratios))
        for scheduler, ratios in found.items()
    ]
    figures = (
        Figure("`best`: makespan over the bound, median", medians["best"], 1.08),
        Figure("`best` over `randomized`", medians["best"] / medians["randomized"], 1.0),
    )
    note = (
        f"`hetctl submit --mode hopper` on a real Slurm of {NODES} nodes with 2 slots each, on this machine "
        f"with {os.cpu_count()} cores. A partition is on one node; visits sleep {SHORTEST_S:g} to "
        f"{LONGEST_S:g} s by member, with a deviation of {SPREAD:.0%}. The bound "
        f"({', '.join(f'{b:.1f}' for b in bounds)} s) is that of the true times, in which evaluations, hops "
        "and the network's own steps take no time."
    )
    return Table(title, ("scheduler", "over the bound", "each"), tuple(rows), figures, note)


def bound_s(hopping: Hopping) -> float:
    """Return the lower bound of the makespan of one epoch."""
    members, partitions = hopping.seconds.shape
    workers = [(f"n{node + 1}", gpu) for node in range(hopping.nodes) for gpu in range(hopping.gpus_per_node)]
    has = np.array([[node in homes for node, _ in workers] for homes in hopping.homes])
    return lower_bound(
        UnitTimes(
            tuple(f"m{k}" for k in range(members)),
            tuple(f"p{j}" for j in range(partitions)),
            tuple(f"{node}:{gpu}" for node, gpu in workers),
            np.where(has[None], hopping.seconds[:, :, None], np.inf),
        )
    )


def hops(quick: bool = False) -> Table:
    """Time the hops of large states, and what visits wait for them."""
    title = f"Hops of {STATE_MB} MB between the nodes of a real Slurm"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    seconds = np.full((HOPPING, NODES), HOP_VISIT_S)
    homes = [(f"n{k + 1}",) for k in range(NODES)]
    hopping = Hopping(seconds, homes, 1, STATE_MB * 250_000, epochs=1 if quick else 2)
    with tempfile.TemporaryDirectory(prefix="hetctl-visits-", dir="/tmp") as name, running() as cluster:
        visits = visits_in(hopping.run(cluster, Path(name) / "run"))
    moved = [v for v in visits if v["bytes"] and not v["evaluates"]]
    hop_s = statistics.median(v["hop_s"] for v in moved)
    waited = sum(v["waited_s"] for v in moved) / sum(v["hop_s"] for v in moved)
    parts = {key: statistics.median(v[key] for v in moved) for key in ("waited_s", "restore_s", "save_s")}
    rows = [
        ("hop between nodes", f"{hop_s:.3f} s"),
        *((name, f"{parts[key]:.4f} s") for key, name in PARTS.items()),
    ]
    note = (
        f"{HOPPING} members on {NODES} nodes, visits of {HOP_VISIT_S:g} s; medians of {len(moved)} visits "
        "whose states came from another node. A planned state is copied while its worker is still busy."
    )
    figures = (Figure("share of a hop for which training waits", waited, 0.05),)
    return Table(title, ("part of a visit", "time"), tuple(rows), figures, note)


PARTS = {
    "waited_s": "wait for the state",
    "restore_s": "building the network and restoring it",
    "save_s": "writing the state to the node's memory",
}


class running:  # noqa: N801
    """A Slurm cluster while the context is open; `size` are arguments of `SlurmCluster`."""

    def __init__(self, **size: int) -> None:
        self._size = size

    def __enter__(self) -> SlurmCluster:
        self._folder = tempfile.TemporaryDirectory(prefix="hetctl-slurm-", dir="/tmp")
        self._cluster = SlurmCluster(Path(self._folder.name), **self._size)
        self._cluster.start()
        return self._cluster

    def __exit__(self, *_: Any) -> None:
        self._cluster.stop()
        subprocess.run(["rm", "-rf", self._folder.name], check=False)


if __name__ == "__main__":
    for one in (table, hops):
        print(one("--quick" in sys.argv), flush=True)
