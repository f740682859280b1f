"""Lockstep between nodes: MPI ranks lead nodes that are folders of one machine, with readers on each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.core.ensemble import Ensemble, Functions, Member
from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.core.profile import PreprocessPoint
from hetctl.core.run import LOCKSTEP, RoundFile, write_round
from hetctl.runtime import feeds
from hetctl.runtime.exchange import folder_of, node_here, preprocessors_of_a_node, together_on
from hetctl.runtime.feeds import Kitchen, LockstepFeed
from hetctl.runtime.preprocessors import Preprocessors, layout_of
from hetctl.runtime.sharing import node_folder
from hetctl.runtime.sharing.broadcast import NodeStream
from hetctl.runtime.sharing.ring import Ring, Shape
from hetctl.runtime.sharing.service import announce, await_exchange, exchange_serves
from hetctl.runtime.sources import MapSource
from hetctl.runtime.stream import Stream, epoch_order

SAMPLES = 200
PATIENCE_S = 30.0
FORK = get_context("fork")
CODE = Path(__file__).parents[2]

needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no Open MPI on this machine")

LEADER = """
import os, sys, types
from pathlib import Path
from hetctl.runtime import exchange, feeds
from hetctl.runtime.sharing import broadcast, node_folder
settings, folder = eval(sys.argv.pop()), Path(sys.argv[1]).parent
node_folder.MEMORY = folder / "memory"
feeds.AHEAD, feeds.JOIN_S, broadcast.STALL_S = settings["ahead"], settings["join_s"], settings["stall_s"]
exchange.load_framework = lambda name: types.SimpleNamespace(prepare=lambda cores, seed: None)
(folder / f"leader-{os.environ['OMPI_COMM_WORLD_RANK']}").write_text(str(os.getpid()))
sys.exit(exchange.main())
"""

DATA = """
import os
import numpy as np
class Rows:
    def __len__(self):
        return {samples}
    def __getitem__(self, number):
        if number == {bad}:
            raise ValueError(f"sample {{number}} is rotten")
        with open({log!r}, "a") as log:
            log.write(f"{{os.getpid()}} {{number}}\\n")
        return np.full(8, number, np.float32), np.int64(number)
def input_fn(data):
    rows = Rows()
    return {returned}
"""


class Round:
    """A round whose members have a GPU each; `nodes` has the batch sizes on each node."""

    def __init__(self, folder, nodes, *, bad=None, returned="rows, rows", **settings):
        self.folder, self.nodes, self.log = folder, nodes, folder / "log"
        self.settings = {"ahead": 24, "join_s": PATIENCE_S, "stall_s": PATIENCE_S, **settings}
        (folder / "leader.py").write_text(LEADER)
        (folder / "rows.py").write_text(
            DATA.format(samples=SAMPLES, bad=bad, log=str(self.log), returned=returned)
        )
        self.file = self._file()
        write_round(folder / "round.json", self.file)
        self.results = FORK.Queue()
        self.read = {
            (node, reader): FORK.Value("q", 0) for node in nodes for reader in range(len(nodes[node]))
        }
        self.readers = {}
        self.leaders = None

    def lead(self):
        """Start the leaders of all nodes."""
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        command = [*mpirun, "-np", str(len(self.nodes)), sys.executable, str(self.folder / "leader.py")]
        self.leaders = subprocess.Popen(
            [*command, str(self.folder / "round.json"), repr(self.settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{CODE}"},
        )

    def start(self, node, reader, **how):
        """Start a reader, which goes through so many epochs."""
        process = FORK.Process(target=self._read, args=(node, reader), kwargs=how, daemon=True)
        process.start()
        self.readers[node, reader] = process

    def start_all(self, **how):
        for node, reader in self.read:
            self.start(node, reader, **how)

    def seen(self):
        """Return what each reader that has not been killed saw of each epoch."""
        alive = [process for process in self.readers.values() if process.exitcode != -signal.SIGKILL]
        return dict(self.results.get(timeout=PATIENCE_S) for _ in alive)

    def ended(self):
        """Return exit code and output of the leaders, once they have ended."""
        output, _ = self.leaders.communicate(timeout=PATIENCE_S)
        return self.leaders.returncode, output

    def ring(self, node):
        base = self.folder / "memory" / f"hetctl-{os.getuid()}"
        return base / folder_of("r", node) / together_on(self.file, node).name

    def leader(self, rank):
        """Return the process number of a leader."""
        return int((self.folder / f"leader-{rank}").read_text())

    def prepared(self):
        """Return the samples that each process has prepared, in order."""
        by_process = defaultdict(list)
        for line in self.log.read_text().splitlines():
            process, number = map(int, line.split())
            by_process[process].append(number)
        return by_process

    def stop(self):
        for process in self.readers.values():
            process.kill()
            process.join()
        if self.leaders is not None:
            self.leaders.kill()
            print(self.leaders.communicate()[0])

    def _file(self):
        placed = [
            (node, index, size) for node, sizes in self.nodes.items() for index, size in enumerate(sizes)
        ]
        members = tuple(Member(f"{node}-{index}", batch_size=size) for node, index, size in placed)
        functions = Functions("rows:input_fn", "rows:input_fn")
        return RoundFile(
            run="r",
            index=0,
            job=0,
            deadline=0.0,
            ensemble=Ensemble("e", "none", functions, members, str(self.folder)),
            allocations=tuple(
                Allocation(f"{node}-{index}", 1, DATA_PARALLEL, 1.0, (Placement(node, (index,)),))
                for node, index, _ in placed
            ),
            checkpoints="",
            sharing=LOCKSTEP,
        )

    def _read(self, node, reader, epochs=2, pause_s=0.0):
        lockstep = replace(together_on(self.file, node), reader=reader)
        layout = layout_of(Rows())
        with node_folder.node_folder(folder_of("r", node)) as folder:
            batch = Stream(SAMPLES, self.nodes[node][reader], seed=1)
            feed = LockstepFeed(batch, Kitchen(layout, Nobody(), folder, None), lockstep)
            seen = [self._epoch(feed, epoch, self.read[node, reader], pause_s) for epoch in range(epochs)]
            feed.close()
        self.results.put(((node, reader), seen))

    @staticmethod
    def _epoch(feed, epoch, progress, pause_s):
        seen = []
        for (x, y), chunk in feed.batches(epoch + 1, 0):
            assert y.tolist() == chunk.numbers.tolist()
            assert np.array_equal(x, np.repeat(y.astype(np.float32)[:, None], 8, axis=1))
            seen += y.tolist()
            progress.value += len(y)
            time.sleep(pause_s)
        return seen


class Nobody:
    """The preprocessors of trainers for whom others prepare."""

    def prepare(self, *_):
        pass

    def check(self):
        pass


class Rows(MapSource):
    """What the leaders' data are, too."""

    def __init__(self):
        super().__init__(self, "training")

    def __len__(self):
        return SAMPLES

    def _read(self, number):
        return np.full(8, number, np.float32), np.int64(number)


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Make a round of nodes; whatever it has started ends with the test."""
    made = []

    def make(nodes, **how):
        made.append(Round(tmp_path, nodes, **how))
        return made[-1]

    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(node_folder, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(feeds, "AHEAD", 24)
    monkeypatch.setattr(feeds, "LOOK_S", 0.1)
    yield make
    for one in made:
        one.stop()


def orders(round_file, epochs):
    seed = together_on(round_file, "n1").seed
    return [epoch_order(SAMPLES, seed, epoch + 1).tolist() for epoch in range(epochs)]


def wait_until(condition):
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


# Between nodes


@needs_mpi
@pytest.mark.parametrize(
    "nodes",
    [{"n1": [8, 16], "n2": [8]}, {"n1": [8], "n2": [24, 8], "n3": [10]}],
    ids=["two nodes", "three nodes"],
)
def test_readers_on_all_nodes_see_the_same_samples_and_each_is_prepared_once(play, tmp_path, nodes):
    crew = play(nodes)
    crew.lead()
    crew.start_all(epochs=3)
    assert crew.seen() == dict.fromkeys(crew.read, orders(crew.file, 3))
    code, output = crew.ended()
    assert code == 0, output
    assert list((tmp_path / "memory" / f"hetctl-{os.getuid()}").iterdir()) == []
    # Each node has one preprocessor, which prepares every second, or third, chunk and nothing else.
    lockstep = together_on(crew.file, "n1")
    shares = {index: [] for index in range(len(nodes))}
    for index in shares:
        stream = NodeStream(SAMPLES, lockstep.chunk, lockstep.seed, node=index, nodes=len(nodes))
        shares[index] = [n for position in range(200) for n in stream.at(position).numbers.tolist()]
    found = []
    for numbers in crew.prepared().values():
        fitting = [index for index, share in shares.items() if numbers == share[: len(numbers)]]
        if set(numbers) != {0}:  # sample 0 tells everyone what samples look like
            found += fitting
    assert sorted(found) == sorted(shares)


@needs_mpi
def test_a_slow_reader_holds_all_nodes_back(play):
    crew = play({"n1": [8], "n2": [8]})
    crew.lead()
    crew.start("n2", 0, epochs=2, pause_s=0.02)
    crew.start("n1", 0, epochs=2)
    fast, slow = crew.read["n1", 0], crew.read["n2", 0]
    lead = 0
    while crew.results.empty():
        lead = max(lead, fast.value - slow.value)
        time.sleep(0.005)
    assert 0 < lead <= 8 * 6  # three slots of the slow node's ring, and what is on its way
    assert crew.seen() == dict.fromkeys(crew.read, orders(crew.file, 2))
    assert crew.ended()[0] == 0


@needs_mpi
@pytest.mark.parametrize("killed", [False, True])
def test_a_node_without_readers_does_not_stop_the_others(play, killed):
    crew = play({"n1": [8], "n2": [8, 8], "n3": [8]})
    crew.lead()
    crew.start("n1", 0, epochs=1, pause_s=0.02 if killed else 0.0)
    for reader in (0, 1):
        crew.start("n2", reader, epochs=4, pause_s=0.005)
    crew.start("n3", 0, epochs=3)
    if killed:
        wait_until(lambda: crew.read["n1", 0].value > 40)
        crew.readers["n1", 0].kill()
        crew.readers["n1", 0].join()
    epochs = {("n1", 0): 1, ("n2", 0): 4, ("n2", 1): 4, ("n3", 0): 3}
    if killed:
        del epochs["n1", 0]
    assert crew.seen() == {who: orders(crew.file, count) for who, count in epochs.items()}
    assert crew.ended()[0] == 0


@needs_mpi
def test_leaders_end_if_no_trainer_comes(play):
    crew = play({"n1": [8], "n2": [8]}, join_s=1.0)
    crew.lead()
    assert crew.ended()[0] == 0


# What goes wrong


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_readers_notice_that_a_leader_is_gone_and_go_on_where_it_ended(play, number):
    crew = play({"n1": [8], "n2": [8]}, stall_s=2.0)
    crew.lead()
    crew.start_all(epochs=2, pause_s=0.01)
    wait_until(lambda: all(read.value > 80 for read in crew.read.values()))
    assert exchange_serves(crew.ring("n1"))
    assert exchange_serves(crew.ring("n2"))
    os.kill(crew.leader(1), number)
    wait_until(lambda: not (exchange_serves(crew.ring("n1")) or exchange_serves(crew.ring("n2"))))
    assert crew.ended()[0] != 0
    source, lockstep = Rows(), together_on(crew.file, "n1")
    alone = Preprocessors(source, layout_of(source), 2)
    for node in ("n1", "n2"):
        alone.prepare(crew.ring(node), Stream(SAMPLES, lockstep.chunk, lockstep.seed), 1)
        wait_until(lambda: not crew.results.empty())
    assert crew.seen() == dict.fromkeys(crew.read, orders(crew.file, 2))
    alone.stop()


@needs_mpi
def test_a_sample_that_cannot_be_prepared_ends_the_exchange(play):
    crew = play({"n1": [8], "n2": [8]}, bad=77)
    crew.lead()
    crew.start_all()
    code, output = crew.ended()
    assert code != 0
    assert "sample 77 is rotten" in output
    assert not exchange_serves(crew.ring("n1"))
    assert not exchange_serves(crew.ring("n2"))


@needs_mpi
def test_different_data_on_the_nodes_are_refused(play):
    odd = "(rows, rows) if os.environ['OMPI_COMM_WORLD_RANK'] == '0' else ([(np.ones(8), 1)] * 200,) * 2"
    crew = play({"n1": [8], "n2": [8]}, returned=odd.replace("[(np.ones(8), 1)] * 200", "Other()"))
    with (crew.folder / "rows.py").open("a") as data:
        data.write("class Other(Rows):\n    def __len__(self):\n        return 199\n")
    crew.lead()
    code, output = crew.ended()
    assert code != 0
    assert "input_fn gives leader 1 other samples than leader 0" in output


@needs_mpi
def test_arrays_need_no_leaders(play):
    crew = play({"n1": [8], "n2": [8]}, returned="((np.ones((4, 2)), np.ones(4)),) * 2")
    crew.lead()
    assert crew.ended() == (0, "")


# The parts


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 9), st.integers(1, 5), st.integers(0, 30))
def test_nodes_share_a_stream(samples, chunk, seed, nodes, position):
    whole = Stream(samples, chunk, seed).at(position)
    turn, node = divmod(position, nodes)
    part = NodeStream(samples, chunk, seed, node=node, nodes=nodes).at(turn)
    assert (part.order, part.start, part.stop) == (whole.order, whole.start, whole.stop)
    assert part.numbers.tolist() == whole.numbers.tolist()


@pytest.mark.parametrize(("nodes", "expected"), [("a", 3), ("ab", 2), ("abc", 1)])
def test_the_nodes_together_meet_the_demand_of_the_slowest_member(nodes, expected):
    places = tuple(Placement(node, (0,)) for node in nodes)
    allocations = [
        Allocation("fast", len(nodes), DATA_PARALLEL, 900.0, places),
        Allocation("slow", len(nodes), DATA_PARALLEL, 300.0, places),
    ]
    assert preprocessors_of_a_node(allocations, [PreprocessPoint(1, 100.0)], 16) == expected


def test_a_leader_is_told_its_node_by_slurm_or_goes_by_its_rank(monkeypatch):
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert node_here(("a", "b"), 1) == "b"
    monkeypatch.setenv("SLURMD_NODENAME", "a")
    assert node_here(("a", "b"), 1) == "a"
    monkeypatch.setenv("SLURMD_NODENAME", "launch-node")
    assert node_here(("a", "b"), 1) == "b"


def test_a_ring_is_served_from_the_announcement_to_the_end(tmp_path):
    ring = tmp_path / "r.ring"
    Ring.create(ring, Shape(2, 8, 1), 1.0)
    assert not await_exchange(ring, 0.1)
    service = announce(ring)
    assert exchange_serves(ring)
    assert await_exchange(ring, 0.0)
    service.close()
    assert not exchange_serves(ring)
    assert not await_exchange(ring, PATIENCE_S)  # it has been there: nobody waits for it any more
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.ring", "r.ring.leader"]
