"""Stores of states on two nodes of a job, each with an agent of its own on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from hostnames import IMPORT
from workbench import alive, wait_for

from hetctl.cluster.launchers import ResourceSet
from hetctl.model.hops import RankEnded, StateFetched, StateSaved, StoreOpened, VisitEnd
from hetctl.model.plan import Placement
from hetctl.model.serialization import encode
from hetctl.model.site import Node, Queue, Site, Timeouts
from hetctl.runtime.agent.messages import AgentFacts, StoreOrder
from hetctl.runtime.data.sharing.node_folder import MEMORY, node_folder, state_folder
from hetctl.runtime.driver.agent_pool import MOST_RETURNS, AgentPool, AgentStep
from hetctl.runtime.driver.rank_pool import RankPool
from hetctl.runtime.transport import connect
from hetctl.runtime.worker.messages import TRAIN, TaskMessage
from hetctl.storage.paths import AgentFiles
from hetctl.storage.processes import Process

NODES = ("n1", "n2")
SITE = Site(
    *("s", "slurm", "srun", 2, 2, 2, 2**30, (Queue("q"),)),
    device="slot",
    timeouts=Timeouts(hang_s=60.0, silence_s=6.0, ending_s=5.0),
)
STATE = bytes(range(256)) * 4000
LARGE_BYTES = 2**28
"""Long enough that an agent can be killed while it sends it."""
SRUN = """\
#!{python}
{hostnames}import os, subprocess
start = next(n for n, a in enumerate(sys.argv) if n and not a.startswith("--"))
nodes = hostnames(next(a.partition("=")[2] for a in sys.argv if a.startswith("--nodelist=")))
running = [subprocess.Popen(sys.argv[start:], env=os.environ | {{"SLURMD_NODENAME": node}}) for node in nodes]
sys.exit(max(process.wait() for process in running))
"""
"""Starts the agents of all nodes on this machine; they connect as if each were on one of its own."""
PYTHON = """\
#!{python}
import json, os, sys, time
from pathlib import Path
from hetctl.runtime import transport
from hetctl.runtime.agent.__main__ import main
from hetctl.runtime.worker import worker
from hetctl.runtime.worker.messages import TRAIN

def work(assignment, context):
    folder = Path(assignment.task.folder)
    reports = json.loads((folder / "reports.json").read_text())
    context.send(visited=reports["visited"])
    (folder / "at_work").touch()
    while not (folder / "enough").exists():
        context.heartbeat()
        time.sleep(0.05)
    context.send(saved=reports["saved"])

def elsewhere(name):
    raise ConnectionRefusedError(f"no {{name}} on this machine")

transport._connected_locally = elsewhere
worker.WORK = {{TRAIN: work}}
sys.argv = sys.argv[2:]
os._exit(main())
"""
VISITED = VisitEnd(3, 1, False, 0, "n1:0", 1.0, 2.0, samples=64, loss=0.5, member="m")
SAVED = StateSaved("m", 3, 0, 64, "/x/m-3", 1000, "digest", 0.1)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job on two nodes whose members hop; partition 0 is on both nodes, and each has one of its own."""
    for name, text in (("srun", SRUN), ("python", PYTHON)):
        (tmp_path / name).write_text(text.format(python=sys.executable, hostnames=IMPORT))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for node, numbers in zip(NODES, ((0, 1), (0, 2)), strict=True):
        (tmp_path / node).mkdir()
        for number in numbers:
            (tmp_path / node / f"{number}.npz").touch()
    made = Job(tmp_path)
    yield made
    made.end()


class Job:
    """The driver's side of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder.name
        self._over = False
        for name in ("events", "logs"):
            (folder / name).mkdir()
        (folder / "reports.json").write_text(json.dumps({"visited": encode(VISITED), "saved": encode(SAVED)}))
        paths = tuple(f"{folder}/$SLURMD_NODENAME/{number}.npz" for number in range(4))
        order = StoreOrder(self.run, paths)
        nodes = [Node(name, (0, 1)) for name in NODES]
        self.rank_pool = RankPool(SITE, nodes, AgentFiles.within(folder), ())
        self.rank_pool.agents.store = order
        self.rank_pool.start_agents()
        self.opened = {event.node: event.partitions for event in self.wait_for(StoreOpened, len(NODES))}

    def end(self) -> None:
        if not self._over:
            self._over = True
            self.rank_pool.shutdown()
        wait_for(lambda: not alive(str(self.folder)))

    def reports(self, kind) -> list:
        """Return the events of a kind so far."""
        return [event for event in self.rank_pool.reports if isinstance(event, kind)]

    def wait_for(self, kind, count=1) -> list:
        """Wait until so many events of a kind have been reported; remove them, and return them."""
        found = self.wait_until(lambda: len(self.reports(kind)) >= count and self.reports(kind))
        self.rank_pool.reports = [e for e in self.rank_pool.reports if not isinstance(e, kind)]
        return found

    def wait_until(self, condition):
        """Wait until a condition is met; return its result."""
        return wait_for(lambda: (self.rank_pool.reap(), condition())[1])

    def store(self, node: str) -> Path:
        return MEMORY / f"hetctl-{os.getuid()}" / state_folder(self.run, node)

    def states(self, node: str) -> list[str]:
        """Return the names of all files of a store but those that no copy has to do with."""
        known = (".users", ".spare", ".spare-in-making")
        return sorted(path.name for path in self.store(node).iterdir() if path.name not in known)

    def fetched(self) -> StateFetched:
        """Wait for the end of a copy."""
        return self.wait_for(StateFetched)[0]

    def works_on(self, node: str) -> None:
        """Assert that a rank on a node does its work."""
        (self.folder / "enough").touch()
        self.start(node)
        (ended,) = wait_for(self.rank_pool.reap)
        assert (ended.exit_code, ended.lost_nodes) == (0, ())

    def start(self, node: str) -> None:
        self.rank_pool.start(TaskMessage(TRAIN, str(self.folder), "m"), (Placement(node, (0,)),))

    def processes_of(self, node: str) -> list[int]:
        """Return the processes on a node: keeper, agent, template and ranks."""
        there = alive(str(AgentFiles.within(self.folder).address))
        here = f"SLURMD_NODENAME={node}".encode()
        return [pid for pid in there if here in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]

    def keeper_of(self, node: str) -> int:
        """Return the keeper of a node: its parent is not of the node."""
        (found,) = (pid for pid in self.processes_of(node) if _parent(pid) not in self.processes_of(node))
        return found

    def agent_of(self, node: str) -> int:
        """Return the agent of a node: its parent is the keeper."""
        keeper = self.keeper_of(node)
        (found,) = (pid for pid in self.processes_of(node) if _parent(pid) == keeper)
        return found

    def rank_of(self, node: str) -> int:
        """Return a rank of a node, which has begun its work."""
        (found,) = (pid for pid in self.processes_of(node) if b"hetctl-rank" in _name(pid))
        return found

    def names(self) -> list[str]:
        """Return the nodes in use."""
        return sorted(node.name for node in self.rank_pool.nodes)

    def signal(self, node: str, number: signal.Signals) -> None:
        for pid in self.processes_of(node):
            os.kill(pid, number)


def _name(pid: int) -> bytes:
    return Path(f"/proc/{pid}/comm").read_bytes()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_agents_tell_which_partitions_their_nodes_have(job):
    assert job.opened == {"n1": {0, 1}, "n2": {0, 2}}


def test_a_state_hops_from_node_to_node(job):
    (job.store("n1") / "m-1").write_bytes(STATE)
    job.rank_pool.agents.fetch("n2", "m-1", "n1")
    result = job.fetched()
    assert (result.node, result.state, result.bytes, result.error) == ("n2", "m-1", len(STATE), "")
    assert (job.store("n2") / "m-1").read_bytes() == STATE


def test_states_hop_both_ways_while_ranks_work(job):
    job.start("n2")
    job.wait_until((job.folder / "at_work").exists)
    for node in NODES:
        for number in range(3):
            (job.store(node) / f"{node}-{number}").write_bytes(STATE + node.encode())
    for number in range(3):
        job.rank_pool.agents.fetch("n2", f"n1-{number}", "n1")
        job.rank_pool.agents.fetch("n1", f"n2-{number}", "n2")
    assert [result.error for result in job.wait_for(StateFetched, 6)] == [""] * 6
    for node, other in (NODES, NODES[::-1]):
        assert all((job.store(other) / f"{node}-{n}").read_bytes() == STATE + node.encode() for n in range(3))
    (job.folder / "enough").touch()
    (ended,) = wait_for(job.rank_pool.reap)
    assert ended.exit_code == 0


def test_reports_of_ranks_arrive_at_once(job):
    job.start("n1")
    while not job.reports(VisitEnd):
        assert job.rank_pool.reap() == []
        job.rank_pool.wait(120.0)
    assert job.rank_pool.reports == [VISITED]
    (job.folder / "enough").touch()
    assert job.wait_for(StateSaved) == [SAVED]


def test_the_end_of_a_rank_is_reported_also_of_one_at_work(job):
    """It may still have been writing the checkpoint of the member before."""
    job.start("n1")
    job.wait_until((job.folder / "at_work").exists)
    os.kill(job.rank_of("n1"), signal.SIGKILL)
    assert job.wait_for(RankEnded) == [RankEnded("n1:0")]


def test_an_unknown_state_is_an_error(job):
    job.rank_pool.agents.fetch("n2", "m-9", "n1")
    assert "does not have m-9" in job.fetched().error
    assert job.states("n2") == []


def test_forgotten_states_are_deleted(job):
    for node in NODES:
        for name in ("m-1", "m-2"):
            (job.store(node) / name).write_bytes(STATE)
    job.rank_pool.agents.forget(["m-1"], NODES)
    job.wait_until(lambda: [job.states(node) for node in NODES] == [["m-2"]] * 2)


def test_a_source_that_dies_leaves_no_part_of_a_state(job):
    with (job.store("n1") / "m-1").open("wb") as file:
        file.truncate(LARGE_BYTES)
    source = job.keeper_of("n1")
    job.rank_pool.agents.fetch("n2", "m-1", "n1")
    while not job.states("n2"):
        assert not job.reports(StateFetched)
    os.kill(source, signal.SIGKILL)
    result = job.fetched()
    assert (result.node, bool(result.error)) == ("n2", True)
    assert job.states("n2") == []
    job.wait_until(lambda: [node.name for node in job.rank_pool.nodes] == ["n2"])
    job.rank_pool.agents.fetch("n2", "m-1", "n1")
    assert "is lost" in job.fetched().error
    # The next user of any such folder on the node removes what is left.
    with node_folder(f"{job.run}-next"):
        assert not job.store("n1").exists()


def test_a_node_that_stood_still_comes_back_with_nothing(job):
    job.start("n1")
    job.wait_until((job.folder / "at_work").exists)
    rank = Process.of(job.rank_of("n1"))
    (job.store("n1") / "m-1").write_bytes(STATE)
    job.signal("n1", signal.SIGSTOP)
    (ended,) = wait_for(job.rank_pool.reap)
    assert (ended.lost_nodes, job.names()) == (("n1",), ["n2"])
    job.signal("n1", signal.SIGCONT)
    assert job.wait_for(StoreOpened) == [StoreOpened("n1", {0, 1})]
    assert (job.names(), job.rank_pool.returned, job.states("n1")) == (["n1", "n2"], ["n1"], [])
    assert not rank.alive
    job.works_on("n1")


@pytest.mark.parametrize("victim", ["agent", "template"])
def test_a_node_whose_agent_is_killed_is_used_at_once(job, victim):
    job.start("n1")
    job.wait_until((job.folder / "at_work").exists)
    rank = Process.of(job.rank_of("n1"))
    (job.store("n1") / "m-1").write_bytes(STATE)
    os.kill(job.agent_of("n1") if victim == "agent" else _parent(rank.pid), signal.SIGKILL)
    (ended,) = wait_for(job.rank_pool.reap)
    assert ended.lost_nodes == ("n1",)
    assert job.wait_for(StoreOpened) == [StoreOpened("n1", {0, 1})]
    assert (job.names(), job.rank_pool.returned, job.states("n1")) == (["n1", "n2"], ["n1"], [])
    assert not rank.alive
    job.works_on("n1")


def test_a_node_whose_keeper_is_killed_is_lost_for_good(job):
    os.kill(job.keeper_of("n1"), signal.SIGKILL)
    job.wait_until(lambda: job.names() == ["n2"])
    assert job.processes_of("n1") == []


def test_a_node_that_is_lost_again_and_again_is_given_up(job):
    for _ in range(MOST_RETURNS):
        assert job.names() == ["n1", "n2"]
        os.kill(job.agent_of("n1"), signal.SIGKILL)
        job.wait_for(StoreOpened)
    os.kill(job.agent_of("n1"), signal.SIGKILL)
    job.wait_until(lambda: job.names() == ["n2"])
    wait_for(lambda: job.processes_of("n1") == [])


def test_a_node_that_returns_too_often_is_refused_alone(tmp_path):
    """Its agents lose their connections, and live on: their keeper starts them again without a limit."""
    losses = []

    class Losses:
        def on_loss(self, step, _exit_code, node="", *_):
            losses.append((step, node))

        def __getattr__(self, name):
            return lambda *_: None

    (tmp_path / "logs").mkdir()
    pool = AgentPool(SITE, [Node(name, (0, 1)) for name in NODES], AgentFiles.within(tmp_path), (), Losses())
    sets = {name: ResourceSet(name, (0, 1)) for name in NODES}
    until = time.monotonic() + 600
    pool._running["agents"] = AgentStep(sets, False, tmp_path / "logs" / "agents.log", 0, until)

    def joined(node):
        facts = AgentFacts("agents", node, {"SLURMD_NODENAME": node}, (0, 1))
        connection = connect(pool._listener.address, encode(facts), 60)
        answered = lambda: pool.receive() or connection._poll.select(0.05)  # noqa: E731
        wait_for(answered)
        return connection, connection.receive(60)

    other, _ = joined("n2")
    for _ in range(MOST_RETURNS + 1):
        connection, answer = joined("n1")
        assert "shutdown" not in answer
        connection.close()
        wait_for(lambda: (other.send({}), pool.receive(), [node.name for node in pool.nodes])[2] == ["n2"])
    _, answer = joined("n1")
    assert answer == {"shutdown": True}
    assert losses == [("agents", "n1")] * (MOST_RETURNS + 1)
    assert pool._running["agents"].released_at is None
    pool.shutdown()


def test_stores_end_with_the_job(job):
    stores = [job.store(node) for node in NODES]
    (stores[0] / "m-1").write_bytes(STATE)
    assert all(store.exists() for store in stores)
    job.end()
    assert not any(store.exists() for store in stores)
