"""Ranks that only report, to a driver's pool of ranks, through simulated agents."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from hetctl.cluster.launchers.agents import AGENTS
from hetctl.model.plan import Allocation
from hetctl.model.run import RunSpec
from hetctl.model.serialization import decode, encode
from hetctl.model.site import Node, Timeouts
from hetctl.runtime.agent.messages import FROM, AgentFacts
from hetctl.runtime.driver.rank_pool import RankPool
from hetctl.runtime.job_logs import private_log
from hetctl.runtime.transport import Address, Connection, connect
from hetctl.runtime.worker.messages import TRAIN, TaskMessage, TrainingSpec
from hetctl.runtime.worker.worker import output_to
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import AgentFiles
from hetctl.storage.patience import PATIENT

PATIENCE_S = 60.0
SILENT = Timeouts(hang_s=3600.0, silence_s=3600.0)
SRUN = "#!/bin/sh\nexec sleep 3600\n"
"""Starts no agents."""


@dataclass(frozen=True)
class ReportingRanks:
    """The ranks of members in training, each on a GPU of its own.

    Parameters
    ----------
    pool : RankPool
        The driver's.
    events : mapping of str to EventWriter
        By member, as its trainer has it: each event is told to the driver.
    """

    pool: RankPool
    events: dict[str, EventWriter]


@contextmanager
def reporting_ranks(
    folder: Path, spec: RunSpec, index: int, allocations: Sequence[Allocation]
) -> Iterator[ReportingRanks]:
    """Yield the ranks that train so in a round."""
    site = replace(spec.site, timeouts=SILENT)
    gpus: dict[str, list[int]] = {}
    for allocation in allocations:
        for place in allocation.placement:
            gpus.setdefault(place.node, []).extend(place.gpus)
    nodes = [Node(name, tuple(numbers)) for name, numbers in gpus.items()]
    with tempfile.TemporaryDirectory() as name, _srun_in(Path(name)):
        files = AgentFiles.within(Path(name))
        pool = RankPool(site, nodes, files, ())
        try:
            tasks = {a.member: _task(folder, spec, index, a) for a in allocations}
            for allocation in allocations:
                pool.start(tasks[allocation.member], allocation.placement)
            agents = {node.name: _agent(files, node.name) for node in nodes}
            events = {a.member: _writer(tasks[a.member], a, agents) for a in allocations}
            with output_to(private_log(files.log)):
                _until_all_train(pool, agents)
            with mock.patch("os.fsync"):
                # Ranks wait for their own nodes' disks: here, that would leave the driver's caches cold.
                yield ReportingRanks(pool, events)
        finally:
            pool.shutdown()


@contextmanager
def _srun_in(folder: Path) -> Iterator[None]:
    (folder / "logs").mkdir()
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{folder}:{path}"
    try:
        yield
    finally:
        os.environ["PATH"] = path


def _task(folder: Path, spec: RunSpec, index: int, allocation: Allocation) -> TaskMessage:
    alone = replace(spec.ensemble, members=(spec.ensemble.member(allocation.member),))
    training = TrainingSpec(
        spec.run, spec.run, index, alone, allocation, spec.checkpoints, time.time() + 3600, ()
    )
    return TaskMessage(TRAIN, str(folder), allocation.member, training)


def _agent(files: AgentFiles, node: str) -> Connection:
    facts = AgentFacts(AGENTS, node, {"SLURMD_NODENAME": node}, ())
    return connect(decode(Address, json.loads(files.address.read_text())), encode(facts), PATIENCE_S)


def _writer(task: TaskMessage, allocation: Allocation, agents: dict[str, Connection]) -> EventWriter:
    """Return the event writer of a rank, once that has said that it is ready."""
    (place,) = allocation.placement
    say = partial(_say, agents[place.node], place.gpus[0])
    say({"ready": True})
    return EventWriter(task.events, task.name, task.round, lambda length: say({"written": length}), PATIENT)


def _say(agent: Connection, gpu: int, message: Any) -> None:
    agent.send({FROM: gpu, "message": message})


def _until_all_train(pool: RankPool, agents: dict[str, Connection]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not all(running.assigned for running in pool._running.values()):
        assert time.monotonic() < limit, "not all ranks have begun"
        pool.reap()
        for agent in agents.values():
            list(agent.arrived())
