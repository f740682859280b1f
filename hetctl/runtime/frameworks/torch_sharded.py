"""PyTorch networks that are divided among the ranks of a group by FSDP (``fully_shard``).

A rank holds its part of each parameter, and of its gradient and of the optimizer's state. The parameters of
a unit are gathered for its forward and its backward pass, as in Zhao et al., "PyTorch FSDP" (VLDB 2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parameter import is_lazy

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.frameworks.pytorch import TorchNetwork
from hetctl.runtime.frameworks.torch_batches import is_compiled
from hetctl.runtime.frameworks.torch_parts import Parts, make_parameters, pack, parameters_of, unpack
from hetctl.runtime.frameworks.torch_ranks import GradientShares, make_equal
from hetctl.runtime.frameworks.torch_shards import ShardCutter, read_shards, write_shards
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

LISTS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
"""Modules of which each item is a unit."""


class ShardedNetwork(TorchNetwork):
    """A module of which this rank holds a part; alone it holds all, and writes the same checkpoints."""

    evaluates_examples = True

    def __init__(
        self, parts: Parts, member: Member, functions: UserFunctions, group: Group, device: torch.device
    ) -> None:
        super().__init__(parts, member, functions, group, device)
        named = dict(self._model.named_parameters(remove_duplicate=False))
        self._cutter = ShardCutter(named, parameters_of(self._optimizer))
        self._folder: Path | None = None

    def evaluate(self, batches: Iterable[tuple[Samples, int]]) -> dict[str, float]:
        """Evaluate, as `TorchNetwork` does; release the gathered parameters after it."""
        found = super().evaluate(batches)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return found

    def save(self) -> dict[str, npt.NDArray[Any]]:
        """Return all state without the shards, for which there is `write_shards`."""
        return pack(self._cutter.cut(self._state())[0])

    def write_shards(self, folder: Path) -> None:
        """Write this rank's shards; all ranks call it.

        Raises
        ------
        OSError
            If a disk is full or read-only.
        """
        write_shards(self._cutter.cut(self._state())[1], folder, alone=self._group.size == 1)

    def open_shards(self, folder: Path) -> None:
        """Take the shards of later calls of `restore` and `adopt` from a folder."""
        self._folder = folder

    def _unpacked(self, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
        assert self._folder is not None
        state, shards = self._cutter.fill(unpack(arrays))
        read_shards(shards, self._folder, alone=self._group.size == 1)
        return state

    def _joined(self) -> GradientShares:
        make_equal(self._model.buffers())
        return GradientShares(self._model, self._group.size)

    def _weight_in_step(self, batches: Batches) -> float:
        # Of several ranks the gradients are weighted before they are added up.
        return batches.weight if self._group.size == 1 else 1.0


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
    """Divide the module unit by unit, and have the optimizer go on with the parts."""
    model, optimizer = parts.model, parts.optimizer
    whole = dict(model.named_parameters())
    _make_equal(whole.values(), device)
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
        optimizer.state[parts_of_whole[each]] = {
            key: _divided_like(value, each, mesh) for key, value in state.items()
        }


def _divided_like(value: Any, parameter: torch.Tensor, mesh: DeviceMesh) -> Any:
    """Return the part of a tensor that an optimizer keeps for a parameter from the start."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value.to(mesh.device_type), mesh, [Shard(0)])


def _make_equal(parameters: Iterable[torch.Tensor], device: torch.device) -> None:
    """Set parameters that may still be in the node's memory to rank 0's values, one after another."""
    with torch.no_grad():
        for parameter in parameters:
            values = parameter.to(device)
            make_equal([values])
            parameter.copy_(values)


def _units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules whose parameters are gathered at once: items of lists, and then the children.

    A module that shares a parameter with another one is left to the whole model: each would have its own.
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
    """Yield the items of the outermost lists, and of the whole model the other children, too."""
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
