"""Tensors that other ranks of a node open where they are, with files in the place of a GPU's memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from stage_ranks import layout_of, run_ranks

from hetctl.runtime.frameworks.stage_network import TensorMemory
from hetctl.runtime.stages.p2p_transport import receive

THREE = layout_of(1, 3, 3, in_flight=1)
NODES = ["a", "a", "b"]
LARGE = np.arange(300_000, dtype=np.float32)


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
