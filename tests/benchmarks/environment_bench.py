"""An environment archive that comes to eight nodes before their agents start.

python tests/benchmarks/environment_bench.py [--quick]
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agent_bench import SRUN
from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from hostnames import IMPORT
from workbench import alive, small_environment

from hetctl.model.site import Node, Queue, Site, Timeouts
from hetctl.runtime.driver.rank_pool import RankPool
from hetctl.storage.paths import AgentFiles

NODES, BYTES = 8, 10**9
MEMORY = Path("/dev/shm")
BAR = 1.5
PATIENCE_S = 600.0


def table(quick: bool = False) -> Table:
    """Bring the archive to agents that share a folder, to separate folders, and past a killed node."""
    size = BYTES // (50 if quick else 1)
    with tempfile.TemporaryDirectory(dir=MEMORY) as name, tempfile.TemporaryDirectory() as disk:
        folder = Path(name)
        archive = small_environment(Path(disk), size)
        # From the page cache, as the second copy on a real file system's server would be.
        archive.read_bytes()
        copy_s = _timed(lambda: shutil.copyfile(archive, folder / "copy"))
        (folder / "copy").unlink()
        alone_s = _staged(archive, folder / "one", 1, "node")
        shared_s = _staged(archive, folder / "shared", NODES, "node")
        apart_s = _staged(archive, folder / "apart", NODES, "$SLURMD_NODENAME")
        killed_s = _staged(archive, folder / "killed", NODES, "$SLURMD_NODENAME", kill=True)
    rows = (
        ("one copy of the file, memory to memory", f"{copy_s:.2f}", ""),
        ("one node", f"{alone_s:.2f}", "1.00"),
        (f"{NODES} agents of one machine, which share it", f"{shared_s:.2f}", f"{shared_s / alone_s:.2f}"),
        (f"{NODES} folders, each read from the last", f"{apart_s:.2f}", f"{apart_s / alone_s:.2f}"),
        (f"{NODES} folders, one killed half way", f"{killed_s:.2f}", f"{killed_s / alone_s:.2f}"),
    )
    return Table(
        f"An environment of {size / 1e9:g} GB on {NODES} nodes",
        ("what", "s until all have it", "over one node"),
        rows,
        (Figure(f"staging to {NODES} agents of one machine over one copy", shared_s / alone_s, BAR),),
        f"All nodes are agents on this machine of {os.cpu_count()} cores, with folders in its memory. With a "
        f"folder of its own each writes {size / 1e9:g} GB twice, as archive and unpacked, which machines of "
        "their own would do side by side.",
    )


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _staged(archive: Path, folder: Path, nodes: int, place: str, *, kill: bool = False) -> float:
    """Return the seconds until all nodes have the environment, all but a killed one."""
    home = folder / "home" / "runs" / "r"
    (home / "logs").mkdir(parents=True)
    (folder / "srun").write_text(SRUN.format(python=sys.executable, hostnames=IMPORT))
    (folder / "srun").chmod(0o755)
    site = Site(
        *("s", "slurm", "srun", nodes, 1, 1, 2**30, (Queue("q"),)),
        device="slot",
        stage=str(archive),
        stage_folder=str(folder / place),
        timeouts=Timeouts(join_s=PATIENCE_S),
    )
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{folder}:{before}"
    names = [Node(f"n{number}", (0,)) for number in range(1, nodes + 1)]
    began = time.monotonic()
    pool = RankPool(site, names, AgentFiles.within(home), ())
    try:
        pool.start_agents()
        wanted, log = nodes - kill, AgentFiles.within(home).log
        # Agents begin once they have it; their own imports are not part of it.
        while not log.exists() or log.read_text().count("agent: environment: /") < wanted:
            assert time.monotonic() < began + PATIENCE_S
            pool.reap()
            pool.wait(0.02)
            if kill and (folder / "n3").exists():
                kill = not _kill_half_way(folder, archive.stat().st_size // 2)
        return time.monotonic() - began
    finally:
        pool.shutdown()
        os.environ["PATH"] = before
        shutil.rmtree(folder, ignore_errors=True)


def _kill_half_way(folder: Path, size: int) -> bool:
    """Kill the third node's process once it has so many bytes; return true then."""
    for file in (folder / "n3").glob("*/*/archive"):
        if file.stat().st_size >= size:
            for pid in alive("hetctl.runtime.agent.environment"):
                with suppress(OSError):
                    if b"SLURMD_NODENAME=n3\0" in Path(f"/proc/{pid}/environ").read_bytes():
                        os.kill(pid, signal.SIGKILL)
            return True
    return False


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
