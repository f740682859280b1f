"""Cost of the state of a long run whose members hop: `status`, and the driver's snapshot.

The event files are written as a driver writes them, without training anything.

    python tests/benchmarks/hop_state_bench.py [--quick]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import state_bench
from tables import Figure, Table

from hetctl.model.ensemble import Partitions
from hetctl.model.events import DRIVER
from hetctl.model.plan import HOPPER
from hetctl.model.run import RunSpec
from hetctl.storage.paths import Home, RunFolder
from hetctl.storage.run_files import write_spec
from hetctl.storage.run_state import RunState

VISITS, CONFIGS, PARTITIONS = 100_000, 100, 16
WORKERS = tuple(f"node{node}:{gpu}" for node in range(2) for gpu in range(8))
VISIT_S = 80.0


def sample(folder: Path, visits: int) -> tuple[RunFolder, RunSpec]:
    """Write a run on 16 GPUs that is under way."""
    home = Home(folder / ".hetctl")
    spec = state_bench.large_spec(home)
    members = spec.ensemble.members[:CONFIGS]
    ensemble = replace(
        spec.ensemble, members=members, partitions=Partitions(PARTITIONS, "/p/{partition}.npz")
    )
    spec = replace(spec, ensemble=ensemble, phases=(HOPPER,), gpus=len(WORKERS))
    run = home.run(state_bench.RUN).create()
    began_at = time.time() - visits // len(WORKERS) * VISIT_S
    state_bench.append_events(run.events_of(DRIVER), 0, _told_by_driver(began_at))
    for number, member in enumerate(members):
        told = _visits(number, member.name, visits // CONFIGS, began_at)
        state_bench.append_events(run.events_of(member.name), 0, told)
    write_spec(run, spec)
    state_bench.enter(home, spec, began_at)
    return run, spec


def _told_by_driver(at: float) -> Iterator[dict[str, Any]]:
    names = [f"net-{number:05d}" for number in range(CONFIGS)]
    yield {"kind": "job_started", "time": at, "job": 0, "batch_id": "17", "nodes": [], "deadline": at + 9e5}
    yield {"kind": "round_started", "time": at, "job": 0, "predicted_s": 5e5, "members": names}
    plan = {"scheduler": "best", "predicted_s": 5e5, "lower_bound_s": 5e5, "reason": "start"}
    workers = {worker: [f"p{number}" for number in range(PARTITIONS)] for worker in WORKERS}
    yield {"kind": "hop_plan", "time": at, **plan, "workers": workers}


def _visits(config: int, name: str, count: int, began_at: float) -> Iterator[dict[str, Any]]:
    """Report the visits of a member, and its epochs with their checkpoints."""
    for visit in range(count):
        number, (epoch, place) = visit * CONFIGS + config, divmod(visit, 2 * PARTITIONS)
        at = began_at + number // len(WORKERS) * VISIT_S
        yield {
            **{"kind": "visit", "time": at + VISIT_S, "number": number, "epoch": epoch + 1},
            **{"evaluates": place >= PARTITIONS, "partition": place % PARTITIONS},
            **{"worker": WORKERS[number % len(WORKERS)], "began_at": at, "ended_at": at + VISIT_S},
            **{"waited_s": 0.25, "restore_s": 0.1, "train_s": 79.0, "save_s": 0.3, "hop_s": 0.2567},
            **{"bytes": 104_857_600, "samples": 5000, "loss": 0.5123456},
        }
        if place == 2 * PARTITIONS - 1:
            saved = state_bench.checkpoint(name, epoch + 1, 0)
            yield {"kind": "checkpoint", "time": at + VISIT_S, **saved}
            yield {**state_bench.epoch_done(config, epoch + 1, at + VISIT_S), "evaluate_s": 0.0}


def table(quick: bool = False) -> Table:
    """Measure `status` without and with a snapshot, and what the snapshot takes."""
    visits = VISITS // 20 if quick else VISITS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, spec = sample(folder, visits)
        command = ("-m", "hetctl", "status", state_bench.RUN)
        anew_s = state_bench.seconds_of(*command, folder=folder)
        state = RunState(run, spec.ensemble, spec.retries)
        state.refresh()
        began = time.process_time()
        state.keep()
        keep_s = time.process_time() - began
        status_s = min(state_bench.seconds_of(*command, folder=folder) for _ in range(3))
        size = len(json.dumps(json.loads(run.state.read_bytes().partition(b"\n")[0])["hops"]))
    rows = (
        ("`hetctl status` without a snapshot, s", f"{anew_s:.2f}"),
        ("`hetctl status`, s", f"{status_s:.2f}"),
        ("snapshot by the driver, ms", f"{1000 * keep_s:.0f}"),
        ("visits in the snapshot, KB", f"{size / 1000:.0f}"),
    )
    return Table(
        "State of a long run that hops",
        ("quantity", "value"),
        rows,
        (
            Figure("`hetctl status`, s", status_s, 1.0),
            Figure("snapshot by the driver, ms", 1000 * keep_s, 100.0),
        ),
        f"Processor time, files in the page cache: {visits:,} visits of {CONFIGS} members to {PARTITIONS} "
        f"partitions, on {len(WORKERS)} workers.",
    )


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
