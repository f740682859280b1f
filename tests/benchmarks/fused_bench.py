"""CPU seconds in which a rank trains members of one shape fused, over those one after the other.

Both are the work of a rank on one core, from the assignment to the last checkpoint: building, stepping,
evaluating and saving; the fused one also tries widths. Members alone train before and after the fused ones,
whose time is over the mean of both: the speed of a core changes within a minute.

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

MEMBERS, BATCH, STEPS, EPOCHS = 16, 32, 450, 1
SHORT = {"steps": 45, "epochs": 5}
LARGE = {"units": 1024, "batch": 128, "steps": 12, "epochs": 32, "members": 3, "plain": 1}
SHAPES: dict[str, tuple[dict[str, int], float | None]] = {
    "perceptrons of 64 units": ({"units": 64}, 0.25),
    "perceptrons of 256 units": ({"units": 256}, 0.90),
    "two convolutions of 8 filters": ({"filters": 8}, 0.38),
    "two convolutions of 32 filters": ({"filters": 32}, 0.82),
    "perceptrons of 1,024 units": (LARGE, 1.01),
    "perceptrons of 64 units, short epochs": ({"units": 64, **SHORT}, None),
    "two convolutions of 8 filters, short epochs": ({"filters": 8, **SHORT}, None),
}
"""Config and bar of each shape. Those of 1,024 units gain nothing; bars are of steps, not of short epochs."""


def table(quick: bool = False) -> Table:
    """Measure all shapes, each in a process of its own."""
    rows, figures = [], []
    for name, (config, bar) in SHAPES.items():
        before_s, fused_s, after_s = in_a_process(both, {**config, "epochs": 1} if quick else config)
        ratio = fused_s / ((before_s + after_s) / 2)
        rows.append((name, f"{before_s:.2f}, {after_s:.2f}", f"{fused_s:.2f}", f"{ratio:.2f}"))
        if bar:
            figures.append(Figure(f"{name}, fused over one after the other", ratio, bar))
    return Table(
        "Fused members: those of one shape on one core",
        ("members", "one after the other before and after, CPU s", "fused, CPU s", "ratio"),
        tuple(rows),
        tuple(figures),
        f"{MEMBERS} members, an epoch of {STEPS} steps with batches of {BATCH}, with an evaluation and a"
        f" checkpoint; short epochs: {SHORT['epochs']} of {SHORT['steps']} steps. Of 1,024 units"
        f" {LARGE['members']} members, {LARGE['epochs']} epochs of {LARGE['steps']} steps with batches of"
        f" {LARGE['batch']}, SGD.",
    )


def input_fn(path):
    """Return as many images of 8 x 8 pixels as the path is named for."""
    generator, samples = np.random.default_rng(1), int(Path(path).name)
    x = generator.normal(size=(samples + 360, 1, 8, 8)).astype("float32")
    y = (x.reshape(len(x), -1) @ generator.normal(size=(64, 10))).argmax(1)
    return (x[:samples], y[:samples]), (x[samples:], y[samples:])


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


def both(config: dict[str, int]) -> tuple[float, float, float]:
    """Return the seconds one after the other, fused, and one after the other again."""
    _seconds({**config, "members": 2, **SHORT, "epochs": 1}, fused=True)
    return tuple(_seconds(config, fused=way) for way in (False, True, False))


def _seconds(config: dict[str, int], *, fused: bool) -> float:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as keep:
        for part in ("events", "logs"):
            (Path(folder) / part).mkdir()
        ways = (True, False) if fused else (False,)
        numbers = range(config.get("members", MEMBERS))
        given = {
            way: [assignment(folder, _member(config, n), fused=way, seat=n + 1) for n in numbers]
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


def _member(config: dict[str, int], number: int) -> Member:
    values = {**config, "learning_rate": 1e-3 * (1 + number)}
    batch, epochs = config.get("batch", BATCH), config.get("epochs", EPOCHS)
    return Member(f"m{number}", values, batch, number, StopRule(patience=epochs, max_epochs=epochs))


def assignment(folder: str, member: Member, *, fused: bool, seat: int) -> Assignment:
    """Return the assignment of a member whose files are in a folder."""
    functions = Functions("fused_bench:input_fn", "fused_bench:model_fn")
    samples = member.batch_size * member.config.get("steps", STEPS)
    ensemble = Ensemble("e", "pytorch", functions, (member,), str(Path(__file__).parent), str(samples))
    placement = (Placement("localhost", (0,), seat if fused else 0),)
    allocation = Allocation(member.name, 1, FUSED if fused else DATA_PARALLEL, 1.0, placement)
    spec = TrainingSpec(
        *("r", f"r-{folder}", 0, ensemble, allocation, f"{folder}/checkpoints/{member.name}"),
        deadline=time.time() + 86400,
        shares=(InputShare(),),
    )
    task = TaskMessage(FUSED if fused else TRAIN, folder, member.name, spec)
    return Assignment(task, RankInfo(0, 1, f"key-{member.name}"), time.time())


if __name__ == "__main__":
    print(table(quick="--quick" in sys.argv[1:]))
