"""Few members on many GPUs: hops alone, hops of groups, and data-parallel training.

Figure 14 of CEREBRO in small, on one node of a real Slurm with four slots: 1, 2 and 4 members, whose samples
take as long as a table says. Exchanges of gradients, hops and starts are real.

    python tests/benchmarks/hoho_bench.py [--quick]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from paced_bench import hetctl
from parallelism_bench import FEATURES, NETWORK
from tables import Figure, Table
from visits_bench import prepared, running, visits_in

sys.path.insert(0, str(Path(__file__).parent.parent))
from slurm_cluster import SlurmCluster, missing_programs

from hetctl.model.events import Event
from hetctl.storage.paths import Home
from hetctl.storage.progress_fold import events_in

GPUS, PARTITIONS, ROWS, BATCH = 4, 4, 256, 16
VISIT_S, QUICK_VISIT_S = 6.0, 2.0
"""Seconds of a visit to a partition on one GPU."""
MEMBERS = (1, 2, 4)
ALONE, GROUPS, ALL = "hops alone", "hops of groups", "data-parallel"
ENSEMBLE = f"""\
name: few
framework: pytorch
functions: {{{{input_fn: paced:input_fn, model_fn: paced:model_fn, train_fn: paced:train_fn}}}}
rescale_learning_rate: false
samples_per_epoch: {ROWS * PARTITIONS}
batch_size: {BATCH}
stop: {{{{metric: val_loss, patience: 99, max_epochs: 1}}}}
{{partitions}}members:
"""
PARTS = f"partitions: {{{{count: {PARTITIONS}, path: '{{folder}}/{{{{partition}}}}.npz'}}}}\n"


@dataclass(frozen=True)
class Way:
    """One way to train the members.

    Parameters
    ----------
    partitions : str
        Key of the ensemble's file, with its line.
    most : int
        Most GPUs of a member.
    options : sequence of str
        Options of ``hetctl submit``.
    """

    partitions: str
    most: int
    options: Sequence[str]

    def run(self, cluster: SlurmCluster, folder: Path, members: int, visit_s: float) -> list[Event]:
        """Train the members for an epoch; return the events."""
        folder.mkdir()
        place(folder)
        (folder / "paced.py").write_text(NETWORK)
        config = json.dumps({"per_sample": [visit_s / ROWS] * PARTITIONS})
        names = [f"m{number}" for number in range(members)]
        given = f"max_gpus: {self.most}, config: {config}"
        (folder / "ensemble.yaml").write_text(
            ENSEMBLE.format(partitions=self.partitions.format(folder=folder))
            + "".join(f"  - {{name: {name}, {given}}}\n" for name in names)
        )
        rates = [
            f"{name},{gpus},{gpus * ROWS / visit_s:.6f},{ROWS * PARTITIONS}\n"
            for name in names
            for gpus in (1, 2, 4)
        ]
        environment = prepared(folder, cluster, GPUS, rates)
        size = ("--gpus", str(GPUS), "--time", "10m")
        hetctl(folder, environment, "submit", *size, *self.options, "--wait")
        return events_in(Home(folder / ".hetctl").run("few-001"))


WAYS: Mapping[str, Way] = {
    ALONE: Way(PARTS, 1, ("--mode", "hopper")),
    GROUPS: Way(PARTS, GPUS, ("--mode", "hopper")),
    ALL: Way("", GPUS, ("--planner", f"fixed-{GPUS}", "--sharing", "none")),
}


def place(folder: Path) -> None:
    """Write the partitions, and all samples in one file."""
    rng = np.random.default_rng(0)
    parts = []
    for number in range(PARTITIONS):
        x = rng.random((ROWS + BATCH, FEATURES), dtype=np.float32)
        x[:, 0] = number
        y = rng.integers(0, 4, len(x))
        parts.append({"x": x[:ROWS], "y": y[:ROWS], "x_validation": x[ROWS:], "y_validation": y[ROWS:]})
        np.savez(folder / f"{number}.npz", **parts[-1])
    np.savez(folder / "all.npz", **{key: np.concatenate([part[key] for part in parts]) for key in parts[0]})


def spent_s(events: Sequence[Event]) -> float:
    """Return the time from the first rank's begin, without its start, to the end of the last step."""
    begun = [event.data["began_at"] + event.data["meet_s"] for event in events if event.kind == "visit"]
    begun += [event.time for event in events if event.kind == "started"]
    return max(event.time for event in events if event.kind == "task_ended") - min(begun)


def group_sizes(events: Sequence[Event]) -> str:
    """Return the numbers of GPUs that trained a member together."""
    found = {event.data["gpus"] for event in events if event.kind == "task_started"}
    return ", ".join(map(str, sorted(found)))


def table(quick: bool = False) -> Table:
    """Train 1, 2 and 4 members in three ways."""
    title = f"Few members on {GPUS} GPUs: CEREBRO's Figure 14 in small"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    visit_s = QUICK_VISIT_S if quick else VISIT_S
    found: dict[tuple[str, int], float] = {}
    sizes: dict[int, str] = {}
    meet_s: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="hetctl-hoho-", dir="/tmp") as name,
        running(nodes=1, gpus=GPUS) as cluster,
    ):
        for members in MEMBERS:
            for number, (what, way) in enumerate(WAYS.items()):
                events = way.run(cluster, Path(name) / f"{members}-{number}", members, visit_s)
                found[what, members] = spent_s(events)
                if what == GROUPS:
                    sizes[members] = group_sizes(events)
                    meet_s += (v["meet_s"] for v in visits_in(events) if "+" in v["worker"])
    rows = [
        (str(members), *(f"{found[what, members]:.1f} s" for what in WAYS), sizes[members])
        for members in MEMBERS
    ]
    most = max(found[GROUPS, n] / min(found[ALONE, n], found[ALL, n]) for n in MEMBERS)
    figures = (
        Figure("groups over hops alone, 1 member", found[GROUPS, 1] / found[ALONE, 1], 0.4),
        Figure("groups over hops alone, 2 members", found[GROUPS, 2] / found[ALONE, 2], 0.65),
        Figure("groups over the faster of the two others, worst", most, 1.1),
    )
    note = (
        f"An epoch of {PARTITIONS} partitions on a node of a real Slurm; a visit takes one GPU {visit_s:g} "
        "s, and a group in proportion less. Gradients go through Gloo. A group's ranks meet anew in each "
        f"visit, in a median of {statistics.median(meet_s):.2f} s. The last column has the GPUs of a group."
    )
    return Table(title, ("members", *WAYS, "GPUs of a group"), tuple(rows), figures, note)


if __name__ == "__main__":
    print(table("--quick" in sys.argv), flush=True)
