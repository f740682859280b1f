"""Ranks in processes of their own, forked as by agents: from a process that has imported the frameworks.

The import takes seconds of each core, and so tests with many ranks share it.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from workbench import wait_for

from hetctl.model.serialization import decode
from hetctl.runtime.agent.binding import THREAD_VARIABLES, Binding
from hetctl.runtime.transport import Address
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import RankInfo
from hetctl.runtime.worker.messages import write_address

PATIENCE_S = 180.0
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["preloaded"])


def fork(work: Callable[..., object], *arguments, log: Path | None = None) -> BaseProcess:
    """Start a function in a process of its own, with one thread of the numerical libraries, as in ranks.

    Parameters
    ----------
    work : callable
        Function of a module; its result is the process's exit code, None for 0.
    log : Path, optional
        File for what the process prints.
    """
    process = FORKED.Process(target=_run, args=(work, arguments, log), daemon=True)
    with _environment_of_ranks():
        process.start()
    return process


def result_of(work: Callable[..., object], *arguments):
    """Return the result of a function that runs in such a process, or raise its error."""
    with _environment_of_ranks(), ProcessPoolExecutor(1, FORKED) as processes:
        return processes.submit(work, *arguments).result()


def run_ranks(work: Callable[..., object], ranks: int, folder: Path, *arguments) -> None:
    """Run a function in so many processes; each gets its rank first, then the arguments."""
    logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    processes = [fork(work, rank, *arguments, log=log) for rank, log in enumerate(logs)]
    for process in processes:
        process.join(PATIENCE_S)
        process.kill()
        process.join()
    printed = "".join(log.read_text() for log in logs if log.exists())
    assert [process.exitcode for process in processes] == [0] * ranks, printed


def rank_info_in(folder: Path | str, rank: int, size: int):
    """Return a rank's place in a group, and what it announces its address with if it leads."""
    master = Path(folder) / f"master-of-{size}.json"
    if rank == 0:
        return RankInfo(0, size, "key"), lambda address: write_address(master, address)
    wait_for(master.exists)
    return RankInfo(rank, size, "key", decode(Address, json.loads(master.read_text()))), None


def rank_in(folder: Path | str, rank: int, size: int, keep: ExitStack):
    """Return a rank's place in a group, and its context."""
    rank_info, publish_address = rank_info_in(folder, rank, size)

    def send(master=None, **_):
        if master is not None:
            publish_address(master)

    return rank_info, WorkerContext(Binding("localhost", 0, None, (0,)), keep, send)


@contextmanager
def _environment_of_ranks():
    """Set the variables of the process that forks, which the first start starts."""
    before = dict(os.environ)
    # It finds no modules beside those of packages.
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1") | {"PYTHONPATH": str(Path(__file__).parent)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(work, arguments, log: Path | None) -> None:
    # As in the template of ranks: collections would visit the objects of both frameworks.
    gc.freeze()
    if log:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    sys.exit(work(*arguments))
