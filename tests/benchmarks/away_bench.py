"""Hops in real jobs while a node is away: ranks on a real Slurm whose visits last as a table says.

python tests/benchmarks/away_bench.py [--seeds N]
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tables import Figure, Table
from visits_bench import CONFIGS, SPREAD, WORKERS, Hopping, bound_s, makespan_s, running, visits_in

sys.path.insert(0, str(Path(__file__).parent.parent))
from slurm_cluster import SlurmCluster, missing_programs
from workbench import processes_on, wait_for

from hetctl.model.events import Event
from hetctl.storage.paths import Home, RunFolder
from hetctl.storage.progress_fold import events_in

SEEDS, QUICK_SEEDS = 10, 2
SHORTEST_S, LONGEST_S = 0.3, 3.0
"""Visits of the fastest and of the slowest member."""
STARTS_S = 300.0
"""Seconds within which a run has started its first visit."""
LEAST_AWAY, MOST_AWAY, FROM = 0.2, 0.6, 0.05
"""Least and largest share of the bound for which a node is away, and where the earliest begins."""


@dataclass(frozen=True)
class Absence:
    """Absence of a node, in seconds after the first visit's start."""

    node: str
    start_s: float
    end_s: float

    def begin(self, run: RunFolder) -> threading.Thread:
        """Play it in the background, from the run's first visit on."""
        player = threading.Thread(target=self._play, args=(run,), daemon=True)
        player.start()
        return player

    def _play(self, run: RunFolder) -> None:
        """Kill the node's agent and ranks, and let it stand still until it returns.

        The driver sees the end of its connection: it needs no `silence` to find the loss.
        """
        wait_for(lambda: run.events.exists() and _has_visit(run), STARTS_S)
        began = time.monotonic()
        time.sleep(self.start_s)
        there = processes_on(run.path, self.node)
        (keeper,) = (pid for pid in there if _parent(pid) not in there)
        os.kill(keeper, signal.SIGSTOP)
        for pid in there:
            if _parent(pid) == keeper:
                os.kill(pid, signal.SIGKILL)
        time.sleep(max(0.0, began + self.end_s - time.monotonic()))
        with suppress(ProcessLookupError):  # The run may have ended without it.
            os.kill(keeper, signal.SIGCONT)


def _has_visit(run: RunFolder) -> bool:
    return any(event.kind == "task_started" for event in events_in(run))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@dataclass(frozen=True)
class Outcome:
    """Makespans of a seed, and what its node did after its return."""

    absence: Absence
    bound_s: float
    best_s: float
    randomized_s: float
    visits_after: tuple[int, int]

    @property
    def ratio(self) -> float:
        return self.best_s / self.randomized_s


def hopping_of(seed: int) -> Hopping:
    """Return members whose speeds differ tenfold, and partitions on two neighbouring nodes each."""
    rng = np.random.default_rng(seed)
    whole = rng.permutation(np.geomspace(SHORTEST_S, LONGEST_S, CONFIGS))
    seconds = whole[:, None] * (1 + SPREAD * rng.standard_normal((CONFIGS, WORKERS)))
    homes = [(f"n{k + 1}", f"n{(k + 1) % WORKERS + 1}") for k in range(WORKERS)]
    return Hopping(seconds, homes, 1, nodes=WORKERS)


def absence_of(seed: int, bound: float) -> Absence:
    """Draw the absence of a node that is not the driver's; it ends before the bound."""
    rng = np.random.default_rng([seed, SEEDS])
    away = rng.uniform(LEAST_AWAY, MOST_AWAY)
    start = rng.uniform(FROM, 1 - away)
    return Absence(f"n{rng.integers(2, WORKERS + 1)}", start * bound, (start + away) * bound)


def run(cluster: SlurmCluster, folder: Path, seed: int) -> Outcome:
    """Run both schedulers with the same absence."""
    hopping = hopping_of(seed)
    bound = bound_s(hopping)
    absence = absence_of(seed, bound)
    found = {}
    for scheduler in ("best", "randomized"):
        home = folder / f"{scheduler}-{seed}"
        player = absence.begin(Home(home / ".hetctl").run("visits-001"))
        found[scheduler] = hopping.run(cluster, home, "--hop-scheduler", scheduler)
        player.join()
    after = tuple(visits_after(events, absence.node) for events in found.values())
    best_s, randomized_s = map(makespan_s, found.values())
    return Outcome(absence, bound, best_s, randomized_s, after)  # type: ignore[arg-type]


def visits_after(events: Sequence[Event], node: str) -> int:
    """Return the number of visits at a node after its return; 0 if it did not return in time."""
    back_at = min((event.time for event in events if event.kind == "node_joined"), default=math.inf)
    return sum(v["worker"] == f"{node}:0" and v["began_at"] > back_at for v in visits_in(events))


def table(quick: bool = False) -> Table:
    """Return the outcomes of all seeds; of two if quick."""
    return outcomes(QUICK_SEEDS if quick else SEEDS)


def outcomes(seeds: int) -> Table:
    """Let 16 members hop over 8 workers while one is away, by plan and by draw, and compare."""
    title = f"Hops in training: {CONFIGS} members on {WORKERS} workers of a real Slurm, of which one is away"
    if missing := missing_programs():
        return Table(title, (), (), (), f"No Slurm on this machine: {', '.join(missing)}.")
    with (
        tempfile.TemporaryDirectory(prefix="hetctl-away-", dir="/tmp") as name,
        running(nodes=WORKERS, gpus=1) as cluster,
    ):
        found = [run(cluster, Path(name), seed) for seed in range(seeds)]
    ratio = statistics.mean(one.ratio for one in found)
    note = (
        f"`hetctl submit --mode hopper` on a real Slurm of {WORKERS} nodes with 1 slot each, on this machine "
        f"with {os.cpu_count()} cores; {seeds} seeds. Each partition is on two nodes; visits sleep "
        f"{SHORTEST_S:g} to {LONGEST_S:g} s by member, with a deviation of {SPREAD:.0%}. The agent and the "
        f"rank of a node are killed, and it stands still for {LEAST_AWAY:.0%} to {MOST_AWAY:.0%} of the "
        "bound without an absence; then it returns, with an empty store and without networks. Both "
        "schedulers have the same absence. Makespans are to the bound."
    )
    header = (
        "seed",
        "node",
        "away, % of the bound",
        "`best`",
        "`randomized`",
        "ratio",
        "visits after its return",
    )
    return Table(
        title,
        header,
        tuple(row(seed, one) for seed, one in enumerate(found)),
        (Figure("`best` to `randomized`, mean", ratio, 1.0),),
        note,
    )


def row(seed: int, one: Outcome) -> tuple[str, ...]:
    """Set out a seed."""
    start, end = (100 * at / one.bound_s for at in (one.absence.start_s, one.absence.end_s))
    spans = (f"{start:.0f} to {end:.0f}", f"{one.best_s / one.bound_s:.3f}")
    others = (f"{one.randomized_s / one.bound_s:.3f}", f"{one.ratio:.3f}")
    return (str(seed), one.absence.node, *spans, *others, ", ".join(map(str, one.visits_after)))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    print(outcomes(parser.parse_args().seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
