"""Lockstep between nodes: MPI ranks lead nodes that are folders of one machine, with readers on each."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from led_round import PATIENCE_S, PREFETCH_SAMPLES, SAMPLES, LedRound, Rows, orders, wait_until

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.profile import PreprocessPoint
from hetctl.runtime.data import loaders
from hetctl.runtime.data.node_exchange import NodeStream, RingWriter, node_here, preprocessors_of_a_node
from hetctl.runtime.data.preprocessors import Preprocessors
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sharing import node_folder
from hetctl.runtime.data.sharing.ring import Ring, RingShape
from hetctl.runtime.data.sharing.shared_file import announce, await_exchange, leader_fills

needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no Open MPI on this machine")


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Return a function that creates a round of nodes; its processes end with the test."""
    made = []

    def make(nodes, **how):
        made.append(LedRound(tmp_path, nodes, **how))
        return made[-1]

    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(node_folder, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(loaders, "PREFETCH_SAMPLES", PREFETCH_SAMPLES)
    yield make
    for one in made:
        one.stop()


# Between nodes


@needs_mpi
@pytest.mark.parametrize(
    "nodes",
    [{"n1": [8, 16], "n2": [8]}, {"n1": [8], "n2": [24, 8], "n3": [10]}],
    ids=["two nodes", "three nodes"],
)
def test_readers_on_all_nodes_see_samples_that_are_prepared_once(play, tmp_path, nodes):
    crew = play(nodes)
    crew.lead()
    crew.start_all(epochs=3)
    assert crew.seen() == dict.fromkeys(crew.read, orders(crew.inputs, 3))
    code, output = crew.ended()
    assert code == 0, output
    assert list((tmp_path / "memory" / f"hetctl-{os.getuid()}").iterdir()) == []
    # Each node has one preprocessor, which prepares every second, or third, chunk and nothing else.
    lockstep = crew.inputs.lockstep_on("n1")
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
    fast, slow = crew.read["n1", 0], crew.read["n2", 0]
    crew.start("n1", 0, epochs=2)
    wait_until(lambda: fast.value)
    lead = fast.value
    crew.start("n2", 0, epochs=2, pause_s=0.02)
    while crew.results.empty():
        lead = max(lead, fast.value - slow.value)
        time.sleep(0.005)
    assert 0 < lead <= 8 * 6  # three slots of the slow node's ring, and what is on its way
    assert crew.seen() == dict.fromkeys(crew.read, orders(crew.inputs, 2))
    assert crew.ended()[0] == 0


@needs_mpi
@pytest.mark.parametrize("killed", [False, True], ids=["left", "killed"])
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
    assert crew.seen() == {who: orders(crew.inputs, count) for who, count in epochs.items()}
    assert crew.ended()[0] == 0


@needs_mpi
def test_leaders_end_if_no_trainer_comes(play):
    crew = play({"n1": [8], "n2": [8]}, lockstep_s=1.0)
    crew.lead()
    assert crew.ended()[0] == 0


# Failures


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_readers_continue_where_a_lost_leader_ended(play, number, request):
    crew = play({"n1": [8], "n2": [8]}, samples_s=10.0)
    crew.lead()
    crew.start_all(epochs=2, pause_s=0.01)
    wait_until(lambda: all(read.value > 80 for read in crew.read.values()))
    assert leader_fills(crew.ring("n1"))
    assert leader_fills(crew.ring("n2"))
    os.kill(crew.leader(1), number)
    wait_until(lambda: not (leader_fills(crew.ring("n1")) or leader_fills(crew.ring("n2"))))
    assert crew.ended()[0] != 0
    lockstep = crew.inputs.lockstep_on("n1")
    alone = Preprocessors(Rows(), 2)
    request.addfinalizer(alone.stop)
    for node in ("n1", "n2"):
        alone.prepare(crew.ring(node), Stream(SAMPLES, lockstep.chunk, lockstep.seed), 1)
        wait_until(lambda: not crew.results.empty())
    assert crew.seen() == dict.fromkeys(crew.read, orders(crew.inputs, 2))


@needs_mpi
def test_a_sample_that_cannot_be_prepared_ends_the_exchange(play):
    crew = play({"n1": [8], "n2": [8]}, bad=77)
    crew.lead()
    crew.start_all()
    code, output = crew.ended()
    assert code != 0
    assert "sample 77 is rotten" in output
    assert not leader_fills(crew.ring("n1"))
    assert not leader_fills(crew.ring("n2"))


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
def test_leaders_that_do_not_meet_end(play):
    slow = "time.sleep(3600) if os.environ['OMPI_COMM_WORLD_RANK'] == '1' else (rows, rows)"
    crew = play({"n1": [8], "n2": [8]}, returned=slow, leaders_s=1.0)
    crew.lead()
    code, output = crew.ended()
    assert code != 0
    assert "Timeout (0:00:01)!" in output


@needs_mpi
def test_arrays_need_no_leaders(play):
    crew = play({"n1": [8], "n2": [8]}, returned="((np.ones((4, 2)), np.ones(4)),) * 2")
    crew.lead()
    assert crew.ended() == (0, "")


# Ring writers and streams


@pytest.fixture
def writer(tmp_path):
    """Return a writer to a ring of three slots for one reader, who is awaited for a moment, and its path."""
    path = tmp_path / "r.ring"
    Ring.create(path, RingShape(3, 8, 1), 0.3).close()
    return RingWriter(path), path


def deliver(writer, position):
    wait_until(lambda: writer.buffer(position) is not None)
    writer.buffer(position)[:] = position
    writer.publish(position, 8)


def test_a_late_reader_may_fill_the_ring_its_leader_has_left(writer):
    writer, path = writer
    for position in range(5):
        deliver(writer, position)
    assert writer.left
    assert not leader_fills(path)
    with closing(Ring(path)) as late:
        assert late.register_reader(0) == 0
        assert [late.read(position, 0.0)[0] for position in range(3)] == [0, 1, 2]
        late.release(0)
        assert late.claim(1.0) == 3


def test_a_leader_leaves_a_ring_with_another_producer(writer):
    writer, path = writer
    reader, other = Ring(path), Ring(path)
    reader.register_reader(0)
    assert writer.buffer(0) is not None
    assert other.claim(0.0) == 1
    assert writer.buffer(1) is not None  # where nobody reads; what is on its way to the ring still arrives
    assert leader_fills(path)
    deliver(writer, 0)
    assert not leader_fills(path)
    assert reader.read(0, 0.0).tolist() == [0] * 8
    assert other.claim(1.0) == 2  # which the leader had claimed by mistake


def test_a_full_ring_has_no_slot_until_a_release(writer):
    writer, path = writer
    reader = Ring(path)
    reader.register_reader(0)
    for position in range(3):
        deliver(writer, position)
    assert writer.buffer(3) is None
    reader.read(0, 0.0)
    reader.release(0)
    deliver(writer, 3)
    reader.unregister_reader()
    deliver(writer, 4)
    assert writer.left


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 9), st.integers(1, 5), st.integers(0, 30))
def test_nodes_share_a_stream(samples, chunk, seed, nodes, position):
    whole = Stream(samples, chunk, seed).at(position)
    turn, node = divmod(position, nodes)
    part = NodeStream(samples, chunk, seed, node=node, nodes=nodes).at(turn)
    assert (part.order, part.start, part.stop) == (whole.order, whole.start, whole.stop)
    assert part.numbers.tolist() == whole.numbers.tolist()


@pytest.mark.parametrize(("nodes", "expected"), [("a", 3), ("ab", 2), ("abc", 1)])
def test_all_nodes_together_supply_the_slowest_member(nodes, expected):
    places = tuple(Placement(node, (0,)) for node in nodes)
    allocations = [
        Allocation("fast", len(nodes), DATA_PARALLEL, 900.0, places),
        Allocation("slow", len(nodes), DATA_PARALLEL, 300.0, places),
    ]
    assert preprocessors_of_a_node(allocations, [PreprocessPoint(1, 100.0)], 16) == expected


def test_the_node_of_a_leader_follows_slurm_or_its_rank(monkeypatch):
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert node_here(("a", "b"), 1) == "b"
    monkeypatch.setenv("SLURMD_NODENAME", "a")
    assert node_here(("a", "b"), 1) == "a"
    monkeypatch.setenv("SLURMD_NODENAME", "launch-node")
    assert node_here(("a", "b"), 1) == "b"


def test_a_ring_is_served_from_the_announcement_to_the_end(tmp_path):
    ring = tmp_path / "r.ring"
    Ring.create(ring, RingShape(2, 8, 1), 1.0)
    assert not await_exchange(ring, 0.1)
    service = announce(ring)
    assert leader_fills(ring)
    assert await_exchange(ring, 0.0)
    service.close()
    assert not leader_fills(ring)
    assert not await_exchange(ring, PATIENCE_S)  # it has been there: nobody waits for it any more
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.ring", "r.ring.leader"]
