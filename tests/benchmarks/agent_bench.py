"""Agents: time for ranks to start, and cost of a driver of many of them.

python tests/benchmarks/agent_bench.py [--quick]
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from hostnames import IMPORT

from hetctl.cluster.launchers import ResourceSet
from hetctl.cluster.launchers.agents import AGENTS
from hetctl.model.plan import Placement
from hetctl.model.site import Node, Queue, Site
from hetctl.model.training_settings import TENSORBOARD
from hetctl.runtime.agent.messages import StoreOrder
from hetctl.runtime.driver.rank_pool import RankPool
from hetctl.runtime.worker.hardware import peak_of_process
from hetctl.runtime.worker.messages import TRAIN, TaskMessage
from hetctl.storage.paths import AgentFiles

POLL_S = 0.05
"""As of the driver."""
PATIENCE_S = 300.0
BOARD = ", ".join(TENSORBOARD)
PRELOADED = {
    "pytorch": "import hetctl.runtime.frameworks.pytorch, torch._dynamo, " + BOARD,
    "tensorflow": "import hetctl.runtime.frameworks.tensorflow, " + BOARD,
}
BARS = {"pytorch": (1.5, 0.3), "tensorflow": (2.5, 1.2)}
"""Of the start over an import, and of seconds from a kill to the next rank."""
START_NODES, START_RANKS = (4, 1), 16
MANY_NODES, MANY_RANKS = 125, 8
DRIVE = "--drive"
"""Option with which this file drives many ranks, and prints the figures."""
WATCHED_S, SETTLE_S = 20.0, 5.0
REPEATS = 3
SRUN = """\
#!{python}
{hostnames}import os, subprocess
start = next(n for n, a in enumerate(sys.argv) if n and not a.startswith("--"))
nodes = hostnames(next(a.partition("=")[2] for a in sys.argv if a.startswith("--nodelist=")))
running = [subprocess.Popen(sys.argv[start:], env=os.environ | {{"SLURMD_NODENAME": node}}) for node in nodes]
sys.exit(max(process.wait() for process in running))
"""
"""Starts the agents of all nodes on this machine."""
SLEEPER = """\
#!{python}
import sys, threading
from hetctl.runtime.agent.__main__ import main
from hetctl.runtime.worker.messages import TRAIN
from hetctl.runtime.worker import worker

told = threading.Event()

class Inbox(worker.Inbox):
    def _take(self, message):
        super()._take(message)
        if "stop" in message:
            told.set()

def sleep(assignment, context):
    while not told.wait(2.0):
        context.heartbeat()

worker.Inbox = Inbox
worker.WORK[TRAIN] = sleep
sys.argv = sys.argv[2:]
sys.exit(main())
"""
"""A Python whose ranks only sleep, and report every two seconds."""


def start_table(quick: bool = False) -> Table:
    """Start 16 ranks on four nodes and on one, and kill some."""
    rows, figures = [], []
    for framework, (start_bar, kill_bar) in BARS.items():
        times = range(1 if quick else REPEATS)
        import_s = statistics.median(_import_s(framework) for _ in times)
        kills = []
        for nodes in START_NODES:
            measured = [_start(framework, nodes) for _ in times]
            start_s = statistics.median(start for start, _ in measured)
            kills += [kill for _, kill in measured]
            rows.append((framework, str(nodes), f"{import_s:.2f}", f"{start_s:.2f}"))
            name = f"{framework}: start over one import, {nodes} node{'s' * (nodes > 1)}"
            figures.append(Figure(name, start_s / import_s, start_bar))
        kill_s = statistics.median(kills)
        figures.append(Figure(f"{framework}: seconds from a kill to the next rank", kill_s, kill_bar))
    return Table(
        f"{START_RANKS} ranks on {' nodes and on '.join(map(str, START_NODES))}",
        ("framework", "nodes", "one import, s", "start to last rank ready, s"),
        tuple(rows),
        tuple(figures),
        f"The nodes are agents on this machine; their templates import side by side on {os.cpu_count()} "
        "cores. One import is a process that does nothing else, from its start to its end. A rank is ready "
        "when it waits for its first task.",
    )


def many_table(quick: bool = False) -> Table:
    """Drive a thousand ranks that report every two seconds."""
    nodes = MANY_NODES // 8 if quick else MANY_NODES
    # In a process of its own: this one has the memory of all that benchmarks import.
    command = [sys.executable, __file__, DRIVE, str(nodes)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    driver = Driver(**json.loads(printed.splitlines()[-1]))
    ranks = nodes * MANY_RANKS
    started, share, memory = f"{driver.start_s:.0f}", f"{driver.share:.1%}", f"{driver.memory_mib:.0f}"
    return Table(
        f"A driver of {ranks} ranks on {nodes} nodes",
        ("ranks", "agents", "started in, s", "driver, share of a core", "driver, MiB"),
        ((str(ranks), str(nodes), started, share, memory),),
        (
            Figure("driver, share of a core", driver.share, 0.05),
            Figure("driver, MB", driver.memory_mib * 1.048576, 200),
            Figure("seconds from a stop to the end of all ranks", driver.stop_s, 1.0),
            Figure("seconds from a kill to its report", driver.known_s, 0.2),
        ),
        "Real processes, all on this machine, whose task is to sleep and to report every two seconds.",
    )


@dataclass(frozen=True)
class Driver:
    """Figures of a driver of many ranks; `share` is that of a core."""

    start_s: float
    share: float
    known_s: float
    stop_s: float
    memory_mib: float


def _drive(nodes: int) -> Driver:
    with _sleepers(nodes) as (pool, folder):
        began = time.monotonic()
        for node in pool.nodes:
            for gpu in node.gpus:
                _engage(pool, folder, node.name, gpu)
        until(pool, lambda: all(e.assigned for e in pool._running.values()))
        _rest(pool, SETTLE_S)
        start_s = time.monotonic() - began
        cpu, wall = time.process_time(), time.monotonic()
        _rest(pool, WATCHED_S)
        share = (time.process_time() - cpu) / (time.monotonic() - wall)
        known_s = statistics.median(_kill_one(pool) for _ in range(5))
        stop_s = _stop_all(pool)
    return Driver(start_s, share, known_s, stop_s, peak_of_process() / 2**20)


def _start(framework: str, nodes: int) -> tuple[float, float]:
    """Return the seconds to the last rank ready, and from a killed rank to the next one."""
    with ranks_on(nodes, START_RANKS // nodes, framework, sys.executable) as (pool, _):
        began = time.monotonic()
        sets = [ResourceSet(node.name, node.gpus) for node in pool.nodes]
        pool.agents.start_step(AGENTS, sets)
        gpus = [(node.name, gpu) for node in pool.nodes for gpu in node.gpus]
        for gpu in gpus:
            pool._rank_for(gpu, AGENTS, None)
        until(pool, lambda: all(pool._slots[gpu].ready for gpu in gpus))
        start_s = time.monotonic() - began
        return start_s, statistics.median(_replace_one(pool, gpus[n]) for n in range(5))


def _replace_one(pool: RankPool, gpu: tuple[str, int]) -> float:
    victim = _rank_of(gpu)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    until(pool, lambda: gpu not in pool._slots)
    pool._rank_for(gpu, AGENTS, None)
    until(pool, lambda: pool._slots[gpu].ready)
    return time.monotonic() - began


def _kill_one(pool: RankPool) -> float:
    gpu = next(slot.gpu for group in pool._running.values() for slot in group.working)
    victim = _rank_of(gpu)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    until(pool, lambda: gpu not in pool._slots)
    return time.monotonic() - began


def _stop_all(pool: RankPool) -> float:
    """Tell all groups to stop; return when the last of them has left."""
    names = list(pool._running)
    began = time.monotonic()
    for name in names:
        pool.stop(name, "deadline")
    until(pool, lambda: not pool.busy)
    return time.monotonic() - began


def _rest(pool: RankPool, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pool.reap()
        time.sleep(POLL_S)


def until(pool: RankPool, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        pool.reap()
        time.sleep(POLL_S)


def _rank_of(gpu: tuple[str, int]) -> int:
    """Return the process of a rank: by its name, and its agent's variable."""
    node, number = gpu
    for path in Path("/proc").glob("[0-9]*/comm"):
        if path.read_text().strip() == f"hetctl-rank-{number}":
            there = path.with_name("environ").read_bytes().split(b"\0")
            if f"SLURMD_NODENAME={node}".encode() in there:
                return int(path.parent.name)
    raise AssertionError(f"no rank on {gpu}")


def _engage(pool: RankPool, folder: Path, node: str, gpu: int) -> None:
    name = f"{node}-{gpu}"
    pool.start(TaskMessage(TRAIN, str(folder), name), (Placement(node, (gpu,)),))


@contextmanager
def _sleepers(nodes: int) -> Iterator[tuple[RankPool, Path]]:
    with tempfile.TemporaryDirectory() as name:
        python = Path(name) / "python"
        python.write_text(SLEEPER.format(python=sys.executable))
        python.chmod(0o755)
        with ranks_on(nodes, MANY_RANKS, None, str(python)) as found:
            yield found


@contextmanager
def ranks_on(
    nodes: int, ranks: int, framework: str | None, python: str, store: StoreOrder | None = None
) -> Iterator[tuple[RankPool, Path]]:
    """Yield a pool whose step starts its agents on this machine."""
    site = Site("s", "slurm", "srun", nodes, ranks, ranks, 2**36, (Queue("q"),), device="slot")
    path, executable = os.environ["PATH"], sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("tools", "logs", "events"):
            (folder / part).mkdir()
        srun = folder / "tools" / "srun"
        srun.write_text(SRUN.format(python=executable, hostnames=IMPORT))
        srun.chmod(0o755)
        os.environ["PATH"] = f"{srun.parent}:{path}"
        sys.executable = python
        files = AgentFiles.within(folder)
        places = [Node(f"n{n}", tuple(range(ranks))) for n in range(nodes)]
        pool = RankPool(site, places, files, (framework,) if framework else ())
        pool.agents.store = store
        try:
            yield pool, folder
        finally:
            pool.shutdown()
            os.environ["PATH"], sys.executable = path, executable


def _import_s(framework: str) -> float:
    """Return the seconds that a process takes for one import."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", PRELOADED[framework]], check=True)
    return time.monotonic() - began


if __name__ == "__main__":
    if DRIVE in sys.argv:
        print(json.dumps(asdict(_drive(int(sys.argv[-1])))))
        sys.exit()
    print(start_table("--quick" in sys.argv), many_table("--quick" in sys.argv), sep="\n\n")
