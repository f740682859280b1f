"""PyTorch networks that are divided among the ranks of a group by FSDP (``fully_shard``).

A rank holds its part of each parameter, its gradient and the optimizer's state. The parameters of a unit are
gathered for its forward and its backward pass, as in Zhao et al., "PyTorch FSDP" (VLDB 2023).

Each rank writes and reads its own parts of tensors that have the shapes of parameters:
``torch.distributed.checkpoint`` reads them for any number of ranks.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parameter import is_lazy

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.frameworks.packed_state import other_variables
from hetctl.runtime.frameworks.pytorch import TorchNetwork
from hetctl.runtime.frameworks.torch_batches import is_compiled
from hetctl.runtime.frameworks.torch_parts import (
    Parts,
    make_parameters,
    pack,
    parameters_of,
    unpack,
)
from hetctl.runtime.frameworks.torch_ranks import GradientShares, make_equal
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

LISTS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
"""Modules whose items are units."""
SHARD = "shard"
"""Key of a mapping that replaces a tensor in the rest of a state; its value is the tensor's type."""
OF_NAMES = ("model", "gradients")
"""Entries of a state that map names of parameters to tensors."""

Shards = dict[str, torch.Tensor]


class ShardedNetwork(TorchNetwork):
    """A module that is divided among ranks; a single rank holds it whole, and writes the same checkpoints."""

    _folder: Path | None = None

    def evaluating(self, batches: Iterable[tuple[Samples, int]]) -> Generator[Any, Any, dict[str, float]]:
        """Evaluate as `TorchNetwork` does, then release the gathered parameters."""
        found = yield from super().evaluating(batches)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return found

    def save(self) -> dict[str, npt.NDArray[Any]]:
        """Return all state but the shards, which `write_shards` writes."""
        return pack(self._cut(self._state())[0])

    def write_shards(self, folder: Path) -> None:
        """Write this rank's shards; all ranks call it.

        Raises
        ------
        OSError
            If a disk is full or read-only.
        """
        write_shards(self._cut(self._state())[1], folder, alone=self._group.size == 1)

    def open_shards(self, folder: Path) -> None:
        """Set the folder from which `restore` and `adopt` read shards."""
        self._folder = folder

    def _unpacked(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
        assert self._folder is not None
        state, shards = self._fill(unpack(arrays))
        read_shards(shards, self._folder, alone=self._group.size == 1)
        return state

    def _cut(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], Shards]:
        """Return a state without the tensors with the shapes of their parameters, and these by name.

        Raises
        ------
        BadInputError
            If another tensor in the state is divided.
        """
        shards: Shards = {}

        def take(value: Any, owner: torch.Tensor, place: str) -> Any:
            if not _is_like(value, owner):
                return value
            shards[place] = value.detach()
            return {SHARD: str(value.dtype).removeprefix("torch.")}

        rest = self._mapped(state, take)
        _refuse_divided(rest, "")
        return rest, shards

    def _fill(self, rest: Mapping[str, Any]) -> tuple[dict[str, Any], Shards]:
        """Return a whole state with new, empty tensors, and these tensors by name."""
        shards: Shards = {}

        def put(value: Any, owner: torch.Tensor, place: str) -> Any:
            if not (isinstance(value, Mapping) and SHARD in value):
                return value
            shards[place] = torch.empty_like(owner.detach(), dtype=getattr(torch, value[SHARD]))
            return shards[place]

        return self._mapped(rest, put), shards

    def _mapped(
        self, state: Mapping[str, Any], change: Callable[[Any, torch.Tensor, str], Any]
    ) -> dict[str, Any]:
        """Return a copy of the state with the values of parameters changed."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        optimized = parameters_of(self._optimizer)
        changed = dict(state)
        for kind in OF_NAMES:
            if kind in state:
                changed[kind] = {
                    name: change(value, named[name], f"{kind}/{name}") if name in named else value
                    for name, value in state[kind].items()
                }
        optimizer = state["optimizer"]
        per_parameter = {
            number: {
                key: change(value, optimized[number], f"optimizer/{number}/{key}")
                for key, value in values.items()
            }
            for number, values in optimizer["state"].items()
        }
        return {**changed, "optimizer": {**optimizer, "state": per_parameter}}

    def _joined(self) -> GradientShares:
        make_equal(self._model.buffers())
        return GradientShares(self._model, self._group.size)


def sharded_network(
    parts: Parts,
    member: Member,
    functions: UserFunctions,
    group: Group,
    sample: Samples,
    device: torch.device,
) -> ShardedNetwork:
    """Return a member's network, divided among the ranks of its group.

    Raises
    ------
    BadInputError
        If it cannot be divided.
    """
    _check(parts, member.name)
    if group.size == 1 or any(map(is_lazy, parts.model.parameters())):
        make_parameters(parts, sample, device)
    if group.size > 1:
        _divide(parts, member.name, init_device_mesh(device.type, (group.size,)), device)
        make_parameters(parts, sample, device)
    return ShardedNetwork(parts, member, functions, group, device)


def _check(parts: Parts, name: str) -> None:
    """Refuse what FSDP does not divide, on any number of ranks."""
    own = set(parts.model.parameters())
    others = [each for each in parameters_of(parts.optimizer) if each not in own]
    scalar = next((each for each, value in parts.model.named_parameters() if value.dim() == 0), None)
    rules: tuple[tuple[bool, str, str], ...] = (
        (is_compiled(parts.model), "a compiled module", "return it without torch.compile"),
        (
            parts.loss_scale is not None,
            "a loss_scale, which sees the gradients of one rank alone",
            "compute in bfloat16, which needs none",
        ),
        (
            bool(others),
            f"an optimizer with {len(others)} parameters that are not the model's",
            "make them parameters of the model",
        ),
        (scalar is not None, f"the scalar parameter {scalar}", "give it the shape (1,)"),
    )
    for is_broken, what, hint in rules:
        if is_broken:
            raise BadInputError(
                f"model_fn returned {what} for {name}, which does not go with `shard: true`",
                f"{hint}, or leave out `shard`",
            )


def _divide(parts: Parts, name: str, mesh: DeviceMesh, device: torch.device) -> None:
    """Divide the module unit by unit, and give the optimizer the parts."""
    model, optimizer = parts.model, parts.optimizer
    whole = dict(model.named_parameters())
    make_equal(whole.values(), device)
    states = {each: optimizer.state.pop(each) for each in whole.values() if each in optimizer.state}
    for module in [*_units(model), model]:
        try:
            fully_shard(module, mesh=mesh)
        except (AssertionError, NotImplementedError, ValueError) as error:
            raise BadInputError(
                f"{type(module).__name__} of {name} cannot be divided: {error}", "leave out `shard`"
            ) from error
    parts_of_whole = {whole[name]: part for name, part in model.named_parameters()}
    for group in optimizer.param_groups:
        # In place: some optimizers keep the list itself.
        group["params"][:] = [parts_of_whole[each] for each in group["params"]]
    for each, state in states.items():
        # Some optimizers keep tensors from the start: this rank's part of those of the parameter's shape.
        optimizer.state[parts_of_whole[each]] = {
            key: distribute_tensor(value.to(mesh.device_type), mesh, [Shard(0)])
            if isinstance(value, torch.Tensor) and value.shape == each.shape
            else value
            for key, value in state.items()
        }


def _units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules whose parameters are gathered at once: items of lists, then the other children.

    A module that shares a parameter stays with the whole model: as a unit it would get its own copy.
    """
    uses = _uses(model)
    return [
        module
        for module in _candidates(model)
        if (own := _uses(module)) and all(uses[each] == count for each, count in own.items())
    ]


def _uses(module: torch.nn.Module) -> Counter[torch.Tensor]:
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))


def _candidates(model: torch.nn.Module, *, is_root: bool = True) -> Iterator[torch.nn.Module]:
    """Yield the items of the outermost lists, and the whole model's other children."""
    for child in model.children():
        if isinstance(child, LISTS):
            yield from _items(child)
        else:
            yield from _candidates(child, is_root=False)
            if is_root:
                yield child


def _items(modules: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for item in modules.children():
        if isinstance(item, LISTS):
            yield from _items(item)
        else:
            yield item


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
"""Modules and names in PyTorch's pickled metadata."""


def write_shards(shards: Shards, folder: Path, *, alone: bool) -> None:
    """Write this rank's shards into the folder; all ranks of the group call it.

    Raises
    ------
    OSError
        If a disk is full or read-only.
    """
    with _plain_errors():
        dcp.save(shards, storage_writer=dcp.FileSystemWriter(folder), no_dist=alone)


def read_shards(shards: Shards, folder: Path, *, alone: bool) -> None:
    """Read this rank's shards from the folder, which any number of ranks may have written.

    Raises
    ------
    BadInputError
        If the shards belong to another network.
    """
    try:
        with _plain_errors():
            dcp.load(shards, storage_reader=CheckedReader(folder), no_dist=alone)
    except (KeyError, RuntimeError, ValueError) as error:
        raise other_variables(error) from error


class CheckedReader(dcp.FileSystemReader):  # type: ignore[misc]
    """Reader of shards that refuses unknown metadata: a pickle could run any program.

    Raises
    ------
    BadInputError
        If the metadata hold anything that PyTorch does not write.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with (folder / ".metadata").open("rb") as file:
            self._metadata = PlainUnpickler(file).load()

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        """Return the metadata."""
        return self._metadata


class PlainUnpickler(pickle.Unpickler):
    """Reader of a pickle that may name nothing but `OF_METADATA`."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an object of `OF_METADATA`; BadInputError for any other."""
        if (module, name) not in OF_METADATA:
            raise BadInputError(f"the metadata of a checkpoint name {module}.{name}, which PyTorch does not")
        return super().find_class(module, name)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the first rank's error instead of PyTorch's collection, which is no Exception."""
    try:
        yield
    except CheckpointException as collected:
        (error, _), *_ = collected.failures.values()
        raise error from None


def _is_like(value: Any, owner: torch.Tensor) -> bool:
    """Return true for a tensor that is divided like its parameter, or not at all on one rank."""
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
