"""A script as a member, beside the same script under torchrun: samples/s, and time to its first step.

python tests/benchmarks/script_bench.py [--quick]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paced_bench import hetctl
from tables import Figure, Table

from hetctl.storage.paths import Home

ROUNDS = 5
SCRIPT = Path(__file__).with_name("script_job.py")
LEAST_RATE = 0.99
NOTE = """
PyTorch's DistributedDataParallel over gloo on one slot, a perceptron of 0.5 million weights, one thread, a
report after every step, which does nothing under torchrun. {rounds} rounds, each with both, now one first
and now the other; the figures are medians of the ratios within a round. Both scripts run on the same core.
The start of a member is that of its batch job's script, before the driver; that of the other one the start
of torchrun. CPU time is that of the script's process. At the end {load:.1f} processes wanted the {cores}
cores of the machine, in the mean of a minute.
"""


@dataclass(frozen=True)
class ScriptRun:
    """Rate in samples/s, samples by second of the script's CPU time, seconds to the first step, and cores."""

    rate: float
    cpu_rate: float
    start_s: float
    cores: tuple[int, ...]


def table(quick: bool = False) -> Table:
    """Set both in turn, and compare them."""
    count = 1 if quick else ROUNDS
    # One more, which nobody counts: it reads the files of both for the first time, and finds the cores.
    cores = _round(False, ())[0].cores
    rounds = [_round(number % 2 == 1, cores) for number in range(count)]
    rates = statistics.median(theirs.rate / ours.rate for ours, theirs in rounds)
    cpu_rates = statistics.median(theirs.cpu_rate / ours.cpu_rate for ours, theirs in rounds)
    starts = statistics.median(ours.start_s / theirs.start_s for ours, theirs in rounds)
    ours, theirs = zip(*rounds, strict=True)
    note = NOTE.format(rounds=count, load=os.getloadavg()[0], cores=os.cpu_count())
    return Table(
        "A script as a member, and under torchrun",
        ("", "samples/s", "samples/CPU s", "start to first step, s"),
        (_row("member", ours), _row("torchrun", theirs)),
        (
            Figure("samples/s of torchrun over those of the member", rates, 1 / LEAST_RATE),
            Figure("samples/CPU s of torchrun over those of the member", cpu_rates, 1 / LEAST_RATE),
            Figure("start to first step of the member over that of torchrun", starts, 1.0),
        ),
        note.replace("\n", " ").strip(),
    )


def _row(name: str, runs: Sequence[ScriptRun]) -> tuple[str, ...]:
    keys = ("rate", "cpu_rate", "start_s")
    rate, cpu_rate, start_s = (statistics.median(getattr(run, key) for run in runs) for key in keys)
    return name, f"{rate:.0f}", f"{cpu_rate:.0f}", f"{start_s:.2f}"


def _round(torchrun_first: bool, cores: Sequence[int]) -> tuple[ScriptRun, ScriptRun]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if torchrun_first:
            theirs = _torchrun(folder, cores)
            return _member(folder), theirs
        ours = _member(folder)
        return ours, _torchrun(folder, ours.cores)


def _member(folder: Path) -> ScriptRun:
    """Train the script as a member of a run of its own."""
    result = folder / "member.json"
    shutil.copy(SCRIPT, folder)
    command = json.dumps([sys.executable, SCRIPT.name, str(result)])
    (folder / "ensemble.yaml").write_text(
        f"name: own\ncommand: {command}\nstop: {{metric: val_loss, patience: 2, max_epochs: 1}}\n"
        "members:\n  - {name: a, max_gpus: 1}\n"
    )
    (folder / "rates.csv").write_text("member,gpus,rate,samples\na,1,1000,1000\n")
    environment = {**_free(), "HETCTL_SITE": "local"}
    hetctl(folder, environment, "profile", "import", "rates.csv")
    hetctl(folder, environment, "submit", "--gpus", "1", "--wait")
    began = Home(folder / ".hetctl").run("own-001").job(0).claim.stat().st_mtime
    return _read(result, began)


def _torchrun(folder: Path, cores: Sequence[int]) -> ScriptRun:
    """Train it by torchrun, the script on the cores that the member had."""
    result, began = folder / "torchrun.json", time.time()
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
            *(str(SCRIPT), str(result), json.dumps(list(cores))),
        ],
        env={**_free(), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        # As the member's: the kernel gives sessions equal shares of a busy core.
        start_new_session=True,
    )
    return _read(result, began)


def _read(path: Path, began: float) -> ScriptRun:
    found = json.loads(path.read_text())
    return ScriptRun(found["rate"], found["cpu_rate"], found["first"] - began, tuple(found["cores"]))


def _free() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
