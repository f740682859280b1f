"""Messages between real processes: their order, their ways, tensors opened where they are, a rank's end."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from stage_ranks import layout_of, run_ranks

from hetctl.runtime.frameworks.stage_network import TensorMemory
from hetctl.runtime.stages.p2p_transport import SharedSlots, receive
from hetctl.runtime.tls import new_certificate
from hetctl.runtime.transport import JobIdentity
from hetctl.runtime.worker.group import LostPeerError

TWO = layout_of(1, 2, 2, in_flight=1)
LARGE = np.arange(300_000, dtype=np.float32).reshape(3, -1)


@pytest.mark.parametrize(
    ("nodes", "encrypts_data"),
    [("aa", None), ("ab", None), ("ab", True), ("ab", False)],
    ids=["one node", "two on a machine", "two nodes", "two nodes, in clear"],
)
def test_messages_arrive_whole_and_in_order(nodes, encrypts_data):
    def work(rank):
        if rank.transport.rank == 0:
            for number in range(20):
                tensors = (LARGE * number, np.array(number)) if number % 2 else ()
                rank.transport.send(1, "numbered", tensors, number=number)
            assert receive(rank.transport.inbox).kind == "all"
            return rank.transport.take_sent()
        found = [receive(rank.transport.inbox) for _ in range(20)]
        assert [message.fields["number"] for message in found] == list(range(20))
        for message in found[1::2]:
            assert np.array_equal(message.tensors[0], LARGE * message.fields["number"])
            assert message.tensors[0].flags.writeable
        rank.transport.send(0, "all")
        return None

    identity = None if encrypts_data is None else JobIdentity(new_certificate(), encrypts_data)
    traffic, _ = run_ranks(TWO, work, nodes, identity=identity)
    way = "within_node" if nodes == "aa" else "between_nodes"
    assert traffic == {way: {"numbered": 10 * (LARGE.nbytes + 8)}}


def test_messages_to_oneself_reach_the_queues_of_their_kinds():
    def work(rank):
        rank.transport.send(rank.transport.rank, "own", (LARGE,), number=rank.transport.rank)
        message = receive(rank.transport.inbox, 10)
        assert receive(rank.transport.inbox, 0) is None
        return message.sender, message.kind, message.fields["number"]

    assert run_ranks(TWO, work) == [(0, "own", 0), (1, "own", 1)]


def test_the_end_of_a_rank_is_noticed():
    def work(rank):
        rank.transport.send(1 - rank.transport.rank, "hello", (LARGE,))
        assert receive(rank.transport.inbox, 10).kind == "hello"
        if rank.transport.rank == 1:
            assert receive(rank.transport.inbox, 10).kind == "go"
            os._exit(0)
        rank.transport.send(1, "go")
        with pytest.raises(LostPeerError, match="rank 1"):
            receive(rank.transport.inbox, 10)
        return "noticed"

    assert run_ranks(TWO, work, ends={1}) == ["noticed", None]


def test_slots_are_used_again_and_leave_nothing():
    slots = SharedSlots()
    _, first, _ = slots.fill((LARGE, np.ones(3)))
    _, second, _ = slots.fill((LARGE,))
    assert second != first
    assert not slots.has_room
    slots.release(first)
    assert slots.has_room
    assert slots.fill((LARGE, LARGE)) == (os.getpid(), first, 2 * LARGE.nbytes)
    slots.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(first)


THREE = layout_of(1, 3, 3, in_flight=1)
NODES = ["a", "a", "b"]


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file."""

    path: str
    values: np.ndarray

    @property
    def nbytes(self):
        return self.values.nbytes


@dataclass
class FileMemory(TensorMemory):
    """Memory in which tensors are files; a rank opens those of the folders that it reaches.

    Parameters
    ----------
    offset : float
        What is added to the values of opened tensors: memory of another one would have other values, too.
    """

    folder: Path
    is_reached: bool = True
    is_shared: bool = True
    offset: float = 0.0
    numbers: count = field(default_factory=count)

    def array(self, tensor):
        return tensor.values if isinstance(tensor, FileTensor) else tensor

    def tensor(self, values):
        path = self.folder / f"{os.getpid()}-{next(self.numbers)}.npy"
        np.save(path, values)
        return FileTensor(str(path), values)

    def filled(self, value, size):
        return self.tensor(np.full(size, value))

    def exported(self, tensor):
        if not self.is_shared:
            raise RuntimeError("cudaMallocAsync does not yet support shareIpcHandle")
        return tensor.path if isinstance(tensor, FileTensor) else None

    def opened(self, handle):
        if not self.is_reached:
            raise RuntimeError("peer access is not supported")
        return FileTensor(handle, np.load(handle) + self.offset)


def passed_by_rank_0(folder, **memory_options):
    """Return what the other ranks get of a tensor that rank 0 sends."""

    def work(rank):
        memory = rank.memory
        if rank.transport.rank == 0:
            for target in (1, 2):
                rank.transport.send(target, "passed", (memory.tensor(LARGE), np.arange(3)), number=target)
            return None
        message = receive(rank.transport.inbox)
        tensor, small = message.tensors
        assert message.fields == {"number": rank.transport.rank}
        assert np.array_equal(small, np.arange(3))
        assert np.array_equal(memory.array(tensor), LARGE)
        return type(tensor).__name__

    return run_ranks(THREE, work, NODES, memory=lambda: FileMemory(folder, **memory_options))[1:]


def test_a_rank_of_the_same_node_opens_a_tensor_where_it_is(tmp_path):
    assert passed_by_rank_0(tmp_path) == ["FileTensor", "ndarray"]


@pytest.mark.parametrize("failure", [{"is_reached": False}, {"is_shared": False}, {"offset": 1.0}])
def test_a_rank_that_cannot_open_tensors_gets_copies(tmp_path, failure):
    assert passed_by_rank_0(tmp_path, **failure) == ["ndarray", "ndarray"]
