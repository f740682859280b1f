"""The example ensemble, trained and profiled on this machine: times of methods, and errors of the rates.

python tests/benchmarks/demo_bench.py, or results.py demo for the table of docs/results.md
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import Figure, Table

ROUNDS = 3
SAMPLES = 1437
PAIR_EPOCHS = 5
"""Epochs that each member trains on two slots, whose rates only some plans need."""
OURS, BASELINE, PAIRED, POOL = "fluid", "independent", "fixed-2", "pool"
UNKNOWN = "fluid, no rate known"
NOTE = """
`make demo`'s nine networks on two slots. Each of {rounds} rounds is a new project, which is trained with
no rate known, profiled, and then trained by all other methods; ratios are taken within a round, and the
table has their medians: the machine is not equally fast all the time. Time per work done is the makespan
over the seconds that one slot would have taken for the epochs trained, at the profiled rates, as runs do
not all take as many. The pool is two processes, each pinned to a core, that run Keras' `fit` with early
stopping on one network after another; it writes no checkpoint. Times are from the first process' start
to the last member's end, and of the whole command where it says all in. Rates in training are those of
`independent` (one slot), and of {epochs} epochs with `fixed-2` (two), the medians of each member's last
three.
"""


@dataclass(frozen=True)
class Run:
    """Seconds of a run and of its command, the epochs of its members, and their rates by (member, slots)."""

    seconds: float
    epochs: Mapping[str, int]
    rates: Mapping[tuple[str, int], float]
    all_in_s: float
    predicted_s: float | None = None


@dataclass(frozen=True)
class Round:
    """A profile, and the runs around it: the machine is not equally fast all the time.

    Parameters
    ----------
    profiled : mapping
        Rates by (member, slots).
    runs : mapping
        Runs by method.
    pairs : Run
        On two slots each.
    """

    profiled: Mapping[tuple[str, int], float]
    profile_s: float
    runs: Mapping[str, Run]
    pairs: Run

    def cost(self, method: str) -> float:
        """Return the time per work done."""
        return self.runs[method].seconds / self._work_s(method)

    def all_in(self, method: str) -> float:
        """Return the time of the whole command per work done."""
        return self.runs[method].all_in_s / self._work_s(method)

    def _work_s(self, method: str) -> float:
        alone = {name: rate for (name, slots), rate in self.profiled.items() if slots == 1}
        return sum(SAMPLES * count / alone[name] for name, count in self.runs[method].epochs.items())

    def seen(self, slots: int) -> dict[str, float]:
        """Return rates in training; plans give nobody slots that only slow it down."""
        rates = (self.runs[BASELINE] if slots == 1 else self.pairs).rates
        return {name: rate for (name, count), rate in rates.items() if count == slots}


def table(quick: bool = False) -> Table:
    """Run, profile, compare."""
    with tempfile.TemporaryDirectory() as name:
        return _table([_round(Path(name), str(number)) for number in range(1 if quick else ROUNDS)])


def _train_longer(ensemble: Path) -> None:
    """Have the members train for about 19 epochs each: rates are compared over many."""
    text = ensemble.read_text().replace("learning_rate: 1.0e-3", "learning_rate: 5.0e-4")
    brief = "patience: 3, max_epochs: 20, expected_epochs: 7"
    if brief not in text:
        raise SystemExit(f"the example no longer has {brief}")
    ensemble.write_text(text.replace(brief, "patience: 6, max_epochs: 40, expected_epochs: 19"))


def _round(parent: Path, name: str) -> Round:
    hetctl(parent, "init", name, "--example", "digits")
    folder = parent / name
    _train_longer(folder / "ensemble.yaml")
    # First, while the catalog is empty.
    unknown = _run(folder, OURS)
    began = time.perf_counter()
    profiled = _profile(folder)
    profile_s = time.perf_counter() - began
    runs = {UNKNOWN: unknown} | {planner: _run(folder, planner) for planner in (OURS, BASELINE)}
    return Round(profiled, profile_s, {**runs, POOL: _pool(folder)}, _pairs(folder))


def _table(rounds: list[Round]) -> Table:
    cost = {method: statistics.median(one.cost(method) for one in rounds) for method in rounds[0].runs}
    rows = [
        (
            method,
            f"{statistics.median(one.runs[method].seconds for one in rounds):.0f}",
            f"{statistics.median(sum(one.runs[method].epochs.values()) for one in rounds):.0f}",
            f"{cost[method]:.3f}",
        )
        for method in cost
    ]
    off = {slots: _off(rounds, slots) for slots in (1, 2)}
    rows += [
        (f"{name}: profiled over in training, {slots} slot{'s' * (slots > 1)}", "", "", f"{1 + error:.3f}")
        for slots, errors in off.items()
        for name, error in errors.items()
    ]
    rows += [
        (
            f"rates of one member in training, highest over lowest round, {slots} slots",
            "",
            "",
            f"{spread:.3f}",
        )
        for slots in (1, 2)
        if (spread := _spread(rounds, slots))
    ]
    worst = {slots: max(map(abs, errors.values())) for slots, errors in off.items()}
    ours = [one.runs[OURS] for one in rounds]
    predicted = statistics.median((run.predicted_s or 0.0) / run.seconds - 1 for run in ours)
    all_in = {
        method: statistics.median(one.all_in(UNKNOWN) / one.all_in(method) for one in rounds)
        for method in (POOL, OURS)
    }
    profile_s = statistics.median(one.profile_s for one in rounds)
    return Table(
        "The example on two slots: times, and errors of profiled rates",
        ("method", "seconds", "epochs", "time per work done"),
        tuple(rows),
        (
            Figure(f"{UNKNOWN}, over the pool, all in, per work done", all_in[POOL], 0.70),
            Figure(f"{UNKNOWN}, over {OURS}, all in, per work done", all_in[OURS], 1.03),
            Figure(f"{OURS} over {BASELINE}, per work done", cost[OURS] / cost[BASELINE], 1.02),
            Figure(f"{OURS} over the pool, per work done", cost[OURS] / cost[POOL], 0.75),
            Figure("one-slot rates, profiled over in training, worst", worst[1], 0.10),
            Figure("two-slot rates, profiled over in training, worst", worst[2], 0.10),
            Figure(f"{OURS}, predicted over measured", abs(predicted), 0.10),
            Figure(
                "points with an error above 3 %",
                sum(abs(error) > 0.03 for errors in off.values() for error in errors.values()),
                0,
            ),
        ),
        f"{NOTE.format(rounds=len(rounds), epochs=PAIR_EPOCHS).strip()} Profiling took {profile_s:.0f} s.",
    )


def _spread(rounds: list[Round], slots: int) -> float:
    """Return how far the machine's own speed goes apart from round to round, as the median of members."""
    seen = [one.seen(slots) for one in rounds]
    return statistics.median(max(r[name] for r in seen) / min(r[name] for r in seen) for name in seen[0])


def _off(rounds: list[Round], slots: int) -> dict[str, float]:
    """Return how far profiled rates were from those in training, by member, as the median share."""
    found: dict[str, list[float]] = {}
    for one in rounds:
        for name, rate in one.seen(slots).items():
            found.setdefault(name, []).append(one.profiled[name, slots] / rate - 1)
    return {name: statistics.median(errors) for name, errors in sorted(found.items())}


def _profile(folder: Path) -> dict[tuple[str, int], float]:
    points = hetctl(folder, "profile", "--all", "--force", "--json")["points"]
    return {(point["member"], point["gpus"]): point["rate"] for point in points}


def _run(folder: Path, planner: str, *more: str) -> Run:
    began = time.perf_counter()
    status = hetctl(folder, "submit", "--new", "--planner", planner, "--wait", "--json", *more)
    rates = {
        (member["member"], rate["gpus"]): rate["seen"]
        for member in status["members"]
        for rate in member["rates"]
        if rate["seen"]
    }
    epochs = {member["member"]: member["epochs"] for member in status["members"]}
    return Run(status["measured_s"], epochs, rates, time.perf_counter() - began, status["predicted_s"])


def _pairs(folder: Path) -> Run:
    """Train a few epochs of every member on two slots."""
    text = (folder / "ensemble.yaml").read_text().replace("max_epochs: 40", f"max_epochs: {PAIR_EPOCHS}")
    (folder / "pairs.yaml").write_text(text.replace("expected_epochs: 19", f"expected_epochs: {PAIR_EPOCHS}"))
    return _run(folder, PAIRED, "--ensemble", "pairs.yaml")


def _pool(folder: Path) -> Run:
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("keras_pool.py")), str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    return Run(said["seconds"], said["epochs"], {}, time.perf_counter() - began)


def hetctl(folder: Path, *arguments: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "HETCTL_HOME"}
    done = subprocess.run(
        [sys.executable, "-m", "hetctl", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment | {"HETCTL_SITE": "local"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) if "--json" in arguments else None


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
