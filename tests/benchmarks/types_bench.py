"""What balanced batches gain a group on two types of GPU: as planned from real profiles, and as measured.

The ranks run on a real Slurm, and sleep for each sample as the type of their node says. Each type is profiled
in its own partition; `--mode auto` plans, and the same group trains with its batches and with equal ones.

    python tests/benchmarks/types_bench.py [--quick]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paced_bench import hetctl
from tables import Figure, Table
from whole_folds import progress_in

sys.path.insert(0, str(Path(__file__).parent.parent))
from slurm_cluster import SlurmCluster, missing_programs

from hetctl.app.run.method_status import balance_histories
from hetctl.storage.paths import Home, RunFolder
from hetctl.storage.run_files import read_spec

TYPES = {"fast": ("n1", "n2"), "slow": ("n3", "n4")}
"""Nodes of each type, with one GPU each."""
GPUS, BATCH, CHUNKS, EPOCHS = 4, 64, 8, 6
LAUNCH_S, FAST_S = 0.04, 0.002
SLOWER = (2, 4, 8)
"""Seconds per sample of the slow type over those of the fast one."""
BAR = 1.15
SITE = """\
extends: slurm
nodes: 4
gpus_per_node: 1
cores_per_node: 1
memory_per_node: 6000MiB
node_types:
  - {{gpu_type: fast, nodes: 2, hosts: [n1, n2]}}
  - {{gpu_type: slow, nodes: 2, hosts: [n3, n4]}}
queues:
  - {{name: main, max_nodes: 4, max_wall: 1h}}
  - {{name: fast, max_nodes: 2, max_wall: 1h}}
  - {{name: slow, max_nodes: 2, max_wall: 1h}}
queue: main
environment: {environment}
"""
NETWORK = """
import os, time
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
    per_sample_s, losses = config["per_sample_s"][os.environ["SLURMD_NODENAME"]], []
    for x, y in data:
        due = time.monotonic() + config["launch_s"] + per_sample_s * len(x)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        time.sleep(max(0.0, due - time.monotonic()))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"loss": float(np.mean(losses)) if losses else 0.0}
"""


@dataclass(frozen=True)
class Gains:
    """Gains of one pair of types: as planned, of the epochs' times, and as the report says.

    Parameters
    ----------
    equal_s, balanced_s : float
        Median seconds of an epoch with equal and with balanced batches, from the second one on.
    """

    planned: float
    reported: float
    equal_s: float
    balanced_s: float

    @property
    def measured(self) -> float:
        """Gain in the time of an epoch."""
        return self.equal_s / self.balanced_s


def table(quick: bool = False) -> Table:
    """Compare the planned gain with the measured ones, for each pair of types."""
    title = f"Groups of two types of GPU in `--mode auto`: {GPUS} ranks on {GPUS} nodes of a Slurm, PyTorch"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    found = _measure(SLOWER[1:2] if quick else SLOWER)
    rows = tuple(
        (
            f"{slower} times",
            f"{gains.equal_s:.3f} s",
            f"{gains.balanced_s:.3f} s",
            *(f"{gain:.2f}" for gain in (gains.planned, gains.measured, gains.reported)),
            f"{gains.planned / gains.measured:.3f}",
        )
        for slower, gains in found.items()
    )
    over = {
        "measured": [gains.planned / gains.measured for gains in found.values()],
        "reported": [gains.planned / gains.reported for gains in found.values()],
    }
    figures = [
        figure
        for name, ratios in over.items()
        for figure in (
            Figure(f"predicted over {name} gain, largest", max(ratios), BAR),
            Figure(f"{name} over predicted gain, largest", 1 / min(ratios), BAR),
        )
    ]
    return Table(
        title,
        ("slow type", "equal epoch", "balanced epoch", "predicted", "measured", "reported", "over measured"),
        rows,
        tuple(figures),
        f"Two nodes of each type, on this machine with {os.cpu_count()} cores. A rank sleeps"
        f" {LAUNCH_S * 1e3:g} ms and, on the fast type, {FAST_S * 1e3:g} ms per sample; on the slow type so"
        " many times as long for a sample. `hetctl profile` measures each type in its own partition, on 1 and"
        f" 2 GPUs. `hetctl plan --mode auto` predicts the gain of balanced batches, {BATCH} on average, over"
        f" equal ones on all {GPUS}. Measured: epochs of `hetctl submit --mode auto` and of `--mix-types"
        " --balance off`, medians from the second one on. Reported: in `hetctl report` of the former. The"
        " last column is predicted over measured.",
    )


def _measure(slower: tuple[int, ...]) -> dict[int, Gains]:
    with tempfile.TemporaryDirectory(prefix="hetctl-types-", dir="/tmp") as name:
        Path(name).chmod(0o711)  # munged wants to reach its socket as anybody
        cluster = SlurmCluster(Path(name) / "s", nodes=GPUS, gpus=1)
        cluster.start()
        try:
            for gpu_type, nodes in TYPES.items():
                cluster.run("scontrol", "create", f"partitionname={gpu_type}", f"nodes={','.join(nodes)}")
            return {times: _train(cluster, Path(name) / f"x{times}", times) for times in slower}
        finally:
            cluster.stop()


def _train(cluster: SlurmCluster, folder: Path, slower: int) -> Gains:
    """Profile each type, plan, and train as planned and with equal batches."""
    seconds = {"fast": FAST_S, "slow": slower * FAST_S}
    _write_project(folder, cluster, {node: seconds[t] for t, nodes in TYPES.items() for node in nodes})
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
    environment = {**kept, **cluster.environment(), "HETCTL_SITE": "lab"}
    for gpu_type, nodes in TYPES.items():
        limits = ("--gpus", str(len(nodes)), "--time", "20m")
        hetctl(folder, environment, "profile", *limits, "--queue", gpu_type, "--force")
    size = ("--gpus", str(GPUS), "--time", "20m")
    plan = hetctl(folder, environment, "plan", *size, "--mode", "auto")
    assert [phase["mode"] for phase in plan["phases"]] == ["balanced"], plan
    hetctl(folder, environment, "submit", *size, "--mode", "auto", "--wait")
    equal = (*size, "--mix-types", "--balance", "off", "--planner", f"fixed-{GPUS}")
    hetctl(folder, environment, "submit", *equal, "--wait")
    balanced_run, equal_run = (Home(folder / ".hetctl").run(f"types-00{number}") for number in (1, 2))
    (history,) = balance_histories(balanced_run)
    return Gains(plan["balance_gains"]["m"], history.gain, _epoch_s(equal_run), _epoch_s(balanced_run))


def _write_project(folder: Path, cluster: SlurmCluster, per_sample_s: Mapping[str, float]) -> None:
    (folder / "site-configs").mkdir(parents=True)
    (folder / "paced.py").write_text(NETWORK.replace("SAMPLES", str(CHUNKS * GPUS * BATCH)))
    config = {"per_sample_s": per_sample_s, "launch_s": LAUNCH_S}
    (folder / "ensemble.yaml").write_text(
        "name: types\nframework: pytorch\nrescale_learning_rate: false\n"
        "functions: {input_fn: paced:input_fn, model_fn: paced:model_fn, train_fn: paced:train_fn}\n"
        f"batch_size: {BATCH}\nstop: {{patience: 999, max_epochs: {EPOCHS}}}\n"
        f"members:\n  - {{name: m, config: {json.dumps(config)}}}\n"
    )
    variables = {name: value for name, value in cluster.environment().items() if name.startswith("OMPI")}
    (folder / "site-configs" / "lab.yaml").write_text(SITE.format(environment=json.dumps(variables)))


def _epoch_s(run: RunFolder) -> float:
    """Return the median training time of a run's epochs from the second on, in seconds."""
    spec = read_spec(run)
    epochs = progress_in(run, spec.ensemble, spec.retries)["m"].epochs
    assert {epoch.gpus for epoch in epochs} == {GPUS}, epochs
    return statistics.median(epoch.duration_s for epoch in epochs[1:])


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
