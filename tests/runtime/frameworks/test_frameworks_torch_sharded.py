"""Metadata of divided checkpoints: a pickle of which only PyTorch's own classes are read."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from hetctl.model.errors import BadInputError
from hetctl.runtime.frameworks.torch_sharded import read_shards, write_shards

pytestmark = [
    pytest.mark.training,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_parts_are_read_as_they_were_written(dtype, tmp_path):
    written = {"model/a": torch.arange(12).reshape(3, 4).T.to(dtype), "model/b": torch.tensor(1).to(dtype)}
    write_shards(written, tmp_path, alone=True)
    read = {name: torch.zeros_like(tensor) for name, tensor in written.items()}
    read_shards(read, tmp_path, alone=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())


class ProgramOfAnother:
    """An object whose pickle makes a folder where it is loaded."""

    def __init__(self, folder):
        self._folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self._folder,)


def test_metadata_with_a_program_are_refused(tmp_path):
    tensors = {"model/a": torch.ones(3)}
    write_shards(tensors, tmp_path / "shards", alone=True)
    (tmp_path / "shards/.metadata").write_bytes(pickle.dumps(ProgramOfAnother(tmp_path / "made")))
    with pytest.raises(BadInputError, match=r"posix\.mkdir"):
        read_shards(tensors, tmp_path / "shards", alone=True)
    assert not (tmp_path / "made").exists()
