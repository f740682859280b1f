"""CPU seconds in which a rank trains members of one shape fused, over those one after the other.

Both are the work of a rank on one core, from the assignment to the last checkpoint: building, stepping,
evaluating and saving; the fused one also tries widths.

    python tests/benchmarks/fused_bench.py [--quick]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from stage_memory_bench import in_a_process
from tables import Figure, Table
from torch import nn

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.plan import DATA_PARALLEL, FUSED, Allocation, Placement
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data.input_pipeline import Sharing
from hetctl.runtime.data.round_inputs import InputShare
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.fused import train_fused
from hetctl.runtime.worker.group import RankInfo
from hetctl.runtime.worker.messages import TRAIN, Assignment, TaskMessage, TrainingSpec
from hetctl.runtime.worker.training import train
from hetctl.storage.event_files import read_events

MEMBERS, SAMPLES, BATCH, EPOCHS = 16, 1437, 32, 5
LARGE = {"units": 1024, "batch": 128, "epochs": 16, "members": 3, "plain": 1}
SHAPES: dict[str, tuple[dict[str, int], float]] = {
    "perceptrons of 64 units": ({"units": 64}, 0.25),
    "perceptrons of 256 units": ({"units": 256}, 0.90),
    "two convolutions of 8 filters": ({"filters": 8}, 0.38),
    "two convolutions of 32 filters": ({"filters": 32}, 0.82),
    "perceptrons of 1,024 units": (LARGE, 1.01),
}
"""Config and bar of each shape; the last one gains nothing."""


def table(quick: bool = False) -> Table:
    """Measure all shapes, each in a process of its own."""
    rows, figures = [], []
    for name, (config, bar) in SHAPES.items():
        alone_s, fused_s = in_a_process(both, config, 2 if quick else config.get("epochs", EPOCHS))
        rows.append((name, f"{alone_s:.2f}", f"{fused_s:.2f}", f"{fused_s / alone_s:.2f}"))
        figures.append(Figure(f"{name}, fused over one after the other", fused_s / alone_s, bar))
    return Table(
        "Fused members: those of one shape on one core",
        ("members", "one after the other, CPU s", "fused, CPU s", "ratio"),
        tuple(rows),
        tuple(figures),
        f"{MEMBERS} members, {EPOCHS} epochs of {SAMPLES:,} samples in batches of {BATCH}, with evaluations"
        f" and checkpoints. Of 1,024 units {LARGE['members']} members, {LARGE['epochs']} epochs, batches of"
        f" {LARGE['batch']}, SGD.",
    )


def input_fn(_path):
    """Return images of 8 x 8 pixels."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(SAMPLES + 360, 1, 8, 8)).astype("float32")
    y = (x.reshape(len(x), -1) @ generator.normal(size=(64, 10))).argmax(1)
    return (x[:SAMPLES], y[:SAMPLES]), (x[SAMPLES:], y[SAMPLES:])


def model_fn(config):
    """Return a perceptron with two hidden layers, or two convolutions."""
    if units := config.get("units"):
        layers = [nn.Flatten(), nn.Linear(64, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(units, 10))
    else:
        width = config["filters"]
        first = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        model = nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(4 * width, 10))
    optimizer = (torch.optim.SGD if "plain" in config else torch.optim.Adam)(
        model.parameters(), lr=config["learning_rate"]
    )
    return {"model": model, "optimizer": optimizer, "loss": nn.CrossEntropyLoss()}


def both(config: dict[str, int], epochs: int) -> tuple[float, float]:
    """Return the seconds one after the other and fused; an epoch of two members warms up."""
    _seconds(config, 1, 2, fused=True)
    return _seconds(config, epochs, fused=False), _seconds(config, epochs, fused=True)


def _seconds(config: dict[str, int], epochs: int, members: int | None = None, *, fused: bool) -> float:
    members = members or config.get("members", MEMBERS)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as keep:
        for part in ("events", "logs"):
            (Path(folder) / part).mkdir()
        ways = (True, False) if fused else (False,)
        given = {
            way: [
                assignment(folder, _member(config, epochs, n), fused=way, seat=n + 1) for n in range(members)
            ]
            for way in ways
        }
        assignments = deque(given[fused])
        context = WorkerContext(
            Binding("localhost", 0, None, (0,)),
            keep,
            arrived=lambda: assignments.popleft() if assignments else None,
        )
        # Once for all members, either way.
        context.load_data(assignments[0].task.training.ensemble, Sharing())
        began = time.process_time()
        if fused:
            train_fused(assignments.popleft(), context)
        # Those that had to leave train alone.
        for one in given[False]:
            if not _is_done(one.task):
                train(one, context)
        return time.process_time() - began


def _is_done(task: TaskMessage) -> bool:
    file = task.events / f"{task.name}.jsonl"
    return file.exists() and any(event.kind == "converged" for event in read_events(file))


def _member(config: dict[str, int], epochs: int, number: int) -> Member:
    values = {**config, "learning_rate": 1e-3 * (1 + number)}
    batch = config.get("batch", BATCH)
    return Member(f"m{number}", values, batch, number, StopRule(patience=epochs, max_epochs=epochs))


def assignment(folder: str, member: Member, *, fused: bool, seat: int) -> Assignment:
    """Return the assignment of a member whose files are in a folder."""
    functions = Functions("fused_bench:input_fn", "fused_bench:model_fn")
    ensemble = Ensemble("e", "pytorch", functions, (member,), str(Path(__file__).parent))
    placement = (Placement("localhost", (0,), seat if fused else 0),)
    allocation = Allocation(member.name, 1, FUSED if fused else DATA_PARALLEL, 1.0, placement)
    spec = TrainingSpec(
        *("r", f"r-{folder}", 0, ensemble, allocation, f"{folder}/checkpoints/{member.name}"),
        deadline=time.time() + 3600,
        shares=(InputShare(),),
    )
    task = TaskMessage(FUSED if fused else TRAIN, folder, member.name, spec)
    return Assignment(task, RankInfo(0, 1, f"key-{member.name}"), time.time())


if __name__ == "__main__":
    print(table(quick="--quick" in sys.argv[1:]))
