"""Commands on members of a running job: time to the effect, and what the others lose.

Networks of PyTorch train on digits, on slots of this machine and on nodes of a real Slurm.

    python tests/benchmarks/edits_bench.py [--quick]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paced_bench import hetctl
from tables import Figure, Table
from visits_bench import prepared, running

sys.path.insert(0, str(Path(__file__).parent.parent))
from slurm_cluster import missing_programs
from workbench import wait_for

from hetctl.model.events import Event
from hetctl.storage.paths import Home, RunFolder
from hetctl.storage.progress_fold import events_in

NETWORK = """
import torch
from sklearn.datasets import load_digits
from torch import nn


def input_fn(path):
    digits = load_digits()
    images = (digits.images / 16).astype("float32")[:, None]
    return (images[:1437], digits.target[:1437]), (images[1437:], digits.target[1437:])


def model_fn(config):
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["learning_rate"])
    return {"model": model, "optimizer": optimizer, "loss": nn.CrossEntropyLoss()}
"""
SITE = "extends: local\ngpus_per_node: 3\ncores_per_node: 3\n"
NODES, SLOTS = 3, 3
STAYS = "stays"
"""Member about which no command is."""
MEMBERS = {STAYS: 0.001, "leaves": 0.002}
ROUNDS, QUICK_ROUNDS = 2, 1
BAR_S = 2.0
Effect = Callable[[Sequence[Event], str, float], float | None]
"""Function of the events, a member and a time: the time of the first effect after it, or None."""


def first(kind: str) -> Effect:
    """Return the effect that a member's event of a kind is."""

    def found(events: Sequence[Event], member: str, after: float) -> float | None:
        times = (
            e.time
            for e in events
            if e.kind == kind and e.time > after and member in (e.source, e.data.get("member"))
        )
        return min(times, default=None)

    return found


@dataclass(frozen=True)
class Running:
    """A run that goes on."""

    folder: Path
    environment: Mapping[str, str]
    run: RunFolder

    def effect_s(self, *command: str, member: str, effect: Effect) -> tuple[float, float]:
        """Give a command; return the seconds to its effect, from its request and from its process's start."""
        began = time.time()
        hetctl(self.folder, dict(self.environment), *command)
        asked = max(e.time for e in events_in(self.run) if e.kind == "request")
        seen = wait_for(lambda: effect(events_in(self.run), member, began), 60)
        return seen - asked, seen - began

    def wait_for_epoch(self, member: str) -> None:
        """Wait until a member finishes one more epoch."""
        done = len(self.epochs(member))
        wait_for(lambda: len(self.epochs(member)) > done, 60)

    def epochs(self, member: str) -> list[Event]:
        """Return the finished epochs of a member."""
        return [e for e in events_in(self.run) if e.kind == "epoch" and e.source == member]


def write_members(folder: Path, members: Mapping[str, float]) -> None:
    """Write the ensemble file."""
    entries = [{"name": name, "config": {"learning_rate": rate}} for name, rate in members.items()]
    (folder / "ensemble.yaml").write_text(
        "name: edits\nframework: pytorch\nfunctions: {input_fn: nets:input_fn, model_fn: nets:model_fn}\n"
        "batch_size: 32\nmax_gpus: 1\n"
        f"stop: {{metric: val_loss, patience: 5000, max_epochs: 5000}}\nmembers: {json.dumps(entries)}\n"
    )


def commands_of(running: Running, rounds: int) -> Iterator[tuple[str, float, float]]:
    """Yield each command with the seconds to its effect, of several rounds."""
    members = dict(MEMBERS)
    begun, ended = first("task_started"), first("task_ended")

    def joins(name: str) -> tuple[float, float]:
        members[name] = 0.003
        write_members(running.folder, members)
        seconds = running.effect_s("add", name, member=name, effect=begun)
        running.wait_for_epoch(name)
        return seconds

    for number in range(rounds):
        yield "pause", *running.effect_s("pause", "leaves", member="leaves", effect=ended)
        yield "resume", *running.effect_s("resume", "leaves", member="leaves", effect=begun)
        yield "add", *joins(f"limited{number}")
        change = ("change", f"limited{number}", "--max-epochs", "1")
        yield "change", *running.effect_s(*change, member=f"limited{number}", effect=first("converged"))
        yield "add", *joins(f"dropped{number}")
        yield "drop", *running.effect_s("drop", f"dropped{number}", member=f"dropped{number}", effect=ended)
        running.wait_for_epoch("leaves")
        yield "cancel", *running.effect_s("cancel", "edits-001", "leaves", member="leaves", effect=ended)
        running.effect_s("resume", "leaves", member="leaves", effect=begun)
        running.wait_for_epoch("leaves")


@dataclass(frozen=True)
class Outcome:
    """Seconds to the effect by command, from request and from process, and what the other member lost."""

    seconds: Mapping[str, Sequence[tuple[float, float]]]
    starts: int
    repeated: int
    gap: float


def outcome_on(running: Running, rounds: int) -> Outcome:
    """Submit the run, give all commands, and cancel it."""
    hetctl(running.folder, dict(running.environment), "submit", "--gpus", str(SLOTS), "--time", "20m")
    try:
        wait_for(lambda: all(len(running.epochs(name)) > 1 for name in MEMBERS), 300)
        began, found = len(running.epochs(STAYS)), {}
        for command, *seconds in commands_of(running, rounds):
            found.setdefault(command, []).append(seconds)
    finally:
        hetctl(running.folder, dict(running.environment), "cancel")
    events, epochs = events_in(running.run), running.epochs(STAYS)
    starts = [e for e in events if e.kind == "task_started" and e.data["member"] == STAYS]
    ends = [e.data["finished_at"] for e in epochs[began:]]
    gaps = [after - before for before, after in pairwise(ends)]
    numbers = [e.data["epoch"] for e in epochs]
    repeated = len(numbers) - len(set(numbers))
    return Outcome(found, len(starts), repeated, max(gaps) / statistics.median(gaps))


def table(quick: bool = False) -> Table:
    """Give commands on members of running jobs, on slots and on Slurm."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    rows, figures, found = [], [], {}
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="hetctl-edits-", dir="/tmp"))
        folder = project(Path(name) / "slots")
        (folder / "site-configs").mkdir()
        (folder / "site-configs" / "lab.yaml").write_text(SITE)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HETCTL_")}
        found["slots"] = outcome_on(running_in(folder, {**kept, "HETCTL_SITE": "lab"}), rounds)
        if not missing_programs():
            cluster = stack.enter_context(running(nodes=NODES, gpus=SLOTS // NODES))
            folder = project(Path(name) / "slurm")
            environment = prepared(folder, cluster, SLOTS // NODES, [f"{STAYS},1,3000,100000\n"], NODES)
            found["Slurm"] = outcome_on(running_in(folder, environment), rounds)
    for where, outcome in found.items():
        for command, seconds in outcome.seconds.items():
            request, process = (sorted(each) for each in zip(*seconds, strict=True))
            cells = (statistics.median(request), request[-1], statistics.median(process), process[-1])
            rows.append((f"{command}, {where}", *(f"{cell:.2f}" for cell in cells)))
        worst = max(request for seconds in outcome.seconds.values() for request, _ in seconds)
        figures += [
            Figure(f"request to effect, worst, {where}, s", worst, BAR_S),
            Figure(f"starts of the member without a command, {where}", outcome.starts, 1),
            Figure(f"epochs that it trained again, {where}", outcome.repeated, 0),
        ]
    gaps = ", ".join(f"{outcome.gap:.1f} ({where})" for where, outcome in found.items())
    return Table(
        "Commands on members of a running job",
        ("command", "from the request, s", "worst", "from the process's start, s", "worst"),
        tuple(rows),
        tuple(figures),
        f"{SLOTS} slots, or nodes of a real Slurm with a GPU each; PyTorch on digits. The effect is the start"
        " or end of the member's task, or its convergence. Longest time between two epochs of the member"
        f" without a command, over the median: {gaps}.",
    )


def project(folder: Path) -> Path:
    """Write a project's files; return its folder."""
    folder.mkdir()
    (folder / "nets.py").write_text(NETWORK)
    write_members(folder, MEMBERS)
    return folder


def running_in(folder: Path, environment: Mapping[str, str]) -> Running:
    return Running(folder, environment, Home(folder / ".hetctl").run("edits-001"))


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
