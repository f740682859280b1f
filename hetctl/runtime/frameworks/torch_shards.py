"""Parts of a PyTorch state that have the shapes of parameters, written and read by each rank for itself.

``torch.distributed.checkpoint`` writes what a rank holds of each, and reads it back for any number of ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from hetctl.model.errors import BadInputError
from hetctl.runtime.frameworks.torch_parts import other_variables

SHARD = "shard"
"""Key of the mapping that stands for a tensor in the rest of a state; its value is the tensor's type."""
OF_NAMES = ("model", "gradients")
"""Entries of a state that map names of parameters to tensors."""

Shards = dict[str, torch.Tensor]

CHECKPOINT = "torch.distributed.checkpoint"
OF_METADATA = frozenset(
    {
        *(
            (f"{CHECKPOINT}.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (f"{CHECKPOINT}.filesystem", "_StorageInfo"),
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    }
)
"""Modules and names in the metadata that PyTorch has written, which are in a pickle."""


class ShardCutter:
    """Division of a state into tensors with the shapes of their parameters, and the rest.

    Parameters
    ----------
    named : mapping of str to Tensor
        Parameters of the model by name.
    optimized : list of Tensor
        Parameters in the order of the optimizer's state.
    """

    def __init__(self, named: Mapping[str, torch.Tensor], optimized: list[torch.Tensor]) -> None:
        self._named = named
        self._optimized = optimized

    def cut(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], Shards]:
        """Return the rest of a state, and its shards by name.

        Raises
        ------
        BadInputError
            If a rank's part of another tensor is left.
        """
        shards: Shards = {}

        def take(value: Any, owner: torch.Tensor | None, place: str) -> Any:
            if owner is None or not _is_like(value, owner):
                return value
            shards[place] = value.detach()
            return {SHARD: str(value.dtype).removeprefix("torch.")}

        rest = self._mapped(state, take)
        _refuse_divided(rest, "")
        return rest, shards

    def fill(self, rest: Mapping[str, Any]) -> tuple[dict[str, Any], Shards]:
        """Return a whole state with new tensors, and these by name: their values are still to be read."""
        shards: Shards = {}

        def put(value: Any, owner: torch.Tensor | None, place: str) -> Any:
            if owner is None or not (isinstance(value, Mapping) and SHARD in value):
                return value
            shards[place] = torch.empty_like(owner.detach(), dtype=getattr(torch, value[SHARD]))
            return shards[place]

        return self._mapped(rest, put), shards

    def _mapped(
        self, state: Mapping[str, Any], change: Callable[[Any, torch.Tensor | None, str], Any]
    ) -> dict[str, Any]:
        """Return a copy of the state in which the values that belong to a parameter are changed."""
        changed = dict(state)
        for kind in OF_NAMES:
            if kind in state:
                changed[kind] = {
                    name: change(value, self._named.get(name), f"{kind}/{name}")
                    for name, value in state[kind].items()
                }
        optimizer = state["optimizer"]
        per_parameter = {
            number: {
                key: change(value, self._optimized[number], f"optimizer/{number}/{key}")
                for key, value in values.items()
            }
            for number, values in optimizer["state"].items()
        }
        return {**changed, "optimizer": {**optimizer, "state": per_parameter}}


def write_shards(shards: Shards, folder: Path, *, alone: bool) -> None:
    """Write what this rank holds into the folder; all ranks of the group call it.

    Raises
    ------
    OSError
        If a disk is full or read-only.
    """
    with _plain_errors():
        dcp.save(shards, storage_writer=dcp.FileSystemWriter(folder), no_dist=alone)


def read_shards(shards: Shards, folder: Path, *, alone: bool) -> None:
    """Read what this rank holds from the folder, which any number of ranks has written.

    Raises
    ------
    BadInputError
        If they are of another network.
    """
    try:
        with _plain_errors():
            dcp.load(shards, storage_reader=CheckedReader(folder), no_dist=alone)
    except (KeyError, RuntimeError, ValueError) as error:
        raise other_variables(error) from error


class CheckedReader(dcp.FileSystemReader):  # type: ignore[misc]
    """Reader of parts whose metadata hold nothing but what PyTorch writes: a pickle could run any program.

    Raises
    ------
    BadInputError
        If the metadata hold anything else.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with (folder / ".metadata").open("rb") as file:
            self._metadata = PlainUnpickler(file).load()

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        """Return the metadata."""
        return self._metadata


class PlainUnpickler(pickle.Unpickler):
    """Reader of a pickle in which nothing but `OF_METADATA` is named."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what the pickle names; BadInputError for anything else."""
        if (module, name) not in OF_METADATA:
            raise BadInputError(f"the metadata of a checkpoint name {module}.{name}, which PyTorch does not")
        return super().find_class(module, name)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the first rank's error in the place of PyTorch's collection of them, which is no Exception."""
    try:
        yield
    except CheckpointException as collected:
        (error, _), *_ = collected.failures.values()
        raise error from None


def _is_like(value: Any, owner: torch.Tensor) -> bool:
    """Return true for a tensor that is divided as its parameter is; on one rank neither is."""
    if not isinstance(value, torch.Tensor) or value.shape != owner.shape:
        return False
    if isinstance(owner, DTensor):
        return isinstance(value, DTensor) and value.placements == owner.placements
    return True


def _refuse_divided(value: Any, place: str) -> None:
    if isinstance(value, DTensor):
        raise BadInputError(
            f"the state of the network holds at {place} a part of a tensor of shape {tuple(value.shape)},"
            " which is no parameter's",
            "with `shard: true` keep whole tensors there (full_tensor()), or leave out `shard`",
        )
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    for key, each in value.items() if isinstance(value, Mapping) else ():
        _refuse_divided(each, f"{place}/{key}".lstrip("/"))
