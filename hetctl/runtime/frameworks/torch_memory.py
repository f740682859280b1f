"""Memory for a part of a network while all of it is built: weights of other layers lose theirs in turn.

``model_fn`` runs as always, so that random numbers are drawn in the same order, and weights have the same
bits, as in the whole network. Meta tensors would cost less, but functions of ``torch.nn.init`` skip them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

COPYING = {aten.clone, aten._to_copy}
"""Operations by which copies of layers, and layers of another type, get their weights."""

OVERWRITING = {aten.copy_, aten.fill_, aten.normal_, aten.uniform_, aten.zero_}
"""Operations that leave nothing of the values that a tensor had before."""


REGISTRATIONS = (register_module_parameter_registration_hook, register_module_buffer_registration_hook)


class PartialMemory(TorchDispatchMode):  # type: ignore[misc]
    """Memory for chosen storages of weights; of the others those used last keep it, two of the largest size.

    A weight that lost its memory is zero when it is used again: keep those from which kept ones are computed.

    Parameters
    ----------
    kept : container of int
        Numbers of the storages that keep their memory. Storages of weights are numbered as they appear, in
        the same order whenever ``model_fn`` is called with the same states of the generators.
    """

    def __init__(self, kept: Container[int]) -> None:
        super().__init__()
        self._kept = kept
        # A storage that is referred to has an address that no other gets.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._numbers: dict[int, int] = {}
        self._recent: dict[int, int] = {}
        self._released: dict[int, int] = {}
        self._origins: dict[int, frozenset[int]] = {}
        self._largest = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> PartialMemory:
        """Notice tensors that modules register."""
        self._hooks = [register(self._on_registration) for register in REGISTRATIONS]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation on tensors that have their memory again."""
        given = _tensors_in((args, kwargs))
        for tensor in given:
            if isinstance(tensor, torch.nn.Parameter):
                self._note(tensor)
        is_overwritten = function.overloadpacket in OVERWRITING and self._is_whole(args[0])
        read = given[1:] if is_overwritten else given
        for tensor in given:
            self._refill(tensor)
        results = function(*args, **(kwargs or {}))
        self._follow(function, read, _tensors_in((results, _written_by(function, args))))
        self._release()
        return results

    def origins(self, tensor: torch.Tensor) -> frozenset[int]:
        """Return the numbers of the storages that determine the values of a tensor, its own included."""
        return frozenset() if is_lazy(tensor) else self._origins_at(_address(tensor))

    def _origins_at(self, address: int) -> frozenset[int]:
        own = {self._numbers[address]} if address in self._numbers else set()
        return self._origins.get(address, frozenset()) | own

    def _on_registration(self, _module: Any, _name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            self._note(tensor)

    def _note(self, tensor: torch.Tensor) -> None:
        if is_lazy(tensor) or not tensor.untyped_storage().resizable():
            return
        storage, address = tensor.untyped_storage(), _address(tensor)
        if address not in self._numbers:
            self._storages[address] = storage
            self._numbers[address] = len(self._numbers)
            self._use(address)

    def _use(self, address: int) -> None:
        """Make a storage of other layers the last used."""
        if address in self._numbers and self._numbers[address] not in self._kept:
            self._recent.pop(address, None)
            self._recent[address] = self._storages[address].nbytes()
            self._largest = max(self._largest, self._recent[address])

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        """Return true if no other values are in the tensor's storage."""
        stored_bytes = self._released.get(_address(tensor), tensor.untyped_storage().nbytes())
        return bool(tensor.is_contiguous() and tensor.numel() * tensor.element_size() == stored_bytes)

    def _refill(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address in self._released:
            storage = self._storages[address]
            storage.resize_(self._released.pop(address))
            storage.fill_(0)
        self._use(address)

    def _follow(self, function: Any, read: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Note copies of weights as weights, and from which weights the results were computed."""
        addresses = [_address(tensor) for tensor in read]
        is_copy = function.overloadpacket in COPYING and any(one in self._numbers for one in addresses)
        origins = frozenset[int]().union(*map(self._origins_at, addresses))
        for tensor in results:
            if is_copy:
                self._note(tensor)
            # Also without any: the address may have been that of a tensor which is gone.
            self._origins[_address(tensor)] = origins

    def _release(self) -> None:
        """Release memory that was used longest ago."""
        held = sum(self._recent.values())
        while held > 2 * self._largest:
            address, size_bytes = next(iter(self._recent.items()))
            del self._recent[address]
            self._released[address] = size_bytes
            self._storages[address].resize_(0)
            held -= size_bytes


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested values that have a shape already."""
    leaves = tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not is_lazy(leaf)]


def _written_by(function: Any, args: Any) -> list[Any]:
    """Return the arguments that an operation changes."""
    places = zip(function._schema.arguments, args, strict=False)
    return [value for place, value in places if place.alias_info and place.alias_info.is_write]


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
