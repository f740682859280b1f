"""Chains in PyTorch: sequential modules, cut into stages that are built alone."""

from __future__ import annotations

import inspect
import random
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.frameworks.stage_network import Chain
from hetctl.runtime.frameworks.torch_batches import is_compiled, present_device
from hetctl.runtime.frameworks.torch_parts import Parts, generators, make_parameters, parts_of, set_generators
from hetctl.runtime.frameworks.torch_stages import OF_PARAMETERS, TorchStage

aten = torch.ops.aten
COPYING = {aten.clone, aten._to_copy}
"""Operations that make the weights of copied or converted layers."""
OVERWRITING = {aten.copy_, aten.fill_, aten.normal_, aten.uniform_, aten.zero_}
"""Operations that replace all values of a tensor."""
REGISTRATIONS = (register_module_parameter_registration_hook, register_module_buffer_registration_hook)


class TorchChain(Chain):
    """A sequential module; sequential modules inside it are cut, too.

    ``model_fn`` is always called with the present state of the random generators.
    """

    hint = 'return {"model": torch.nn.Sequential(..), ..}, nested ones included, without torch.compile'

    def _names(self) -> Iterable[str]:
        self._states = generators(), np.random.get_state(), random.getstate()
        parts, memory = self._call((), None)
        if problem := _problem(parts):
            raise self._uncut(problem)
        modules = _modules(parts.model)
        self._refuse_shared((layer, _tensors([module])) for layer, module in modules.items())
        self._is_lazy = any(is_lazy(parameter) for parameter in parts.model.parameters())
        # Lazy layers have weights only after a call.
        self._weights = None if self._is_lazy else _numbers(parts, memory)
        return modules

    def build(self, layers: range, sample: Samples, *, recomputes: bool = False) -> TorchStage:
        """Call ``model_fn`` with memory for these layers' weights, and for weights that determine them."""
        shapes_of = sample if self._is_lazy else None
        if self._weights is None:
            self._weights = _numbers(*self._call((), shapes_of))
        kept = {number for layer in layers for number in self._weights[layer]}
        if layers.stop == len(self.layers):
            kept |= self._weights[-1]
        parts, _ = self._call(kept, shapes_of)
        own = _part(parts, layers)
        device = present_device()
        make_parameters(own, sample, device)
        return TorchStage(layers, self.layers, own, device, recomputes=recomputes)

    def _call(self, kept: Collection[int], sample: Samples | None) -> tuple[Parts, PartialMemory]:
        states, numpy_state, python_state = self._states
        set_generators(states)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        memory = PartialMemory(kept)
        with memory:
            parts = parts_of(self._functions.model_fn(dict(self._member.config)), self._member.name)
            if sample is not None:
                make_parameters(parts, sample, present_device())
        return parts, memory


def _problem(parts: Parts) -> str:
    """Return which of the parts cannot be divided; empty if all can."""
    if not isinstance(parts.model, nn.Sequential):
        return f"{type(parts.model).__name__} as model instead of torch.nn.Sequential"
    if is_compiled(parts.model):
        return "a compiled module"
    if not _is_plain(parts.model):
        return f"{type(parts.model).__name__} as model, which has hooks or a forward method of its own"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parts.model.parameters()):
        return "parameters with hooks"
    if parts.waits_for_metric:
        return f"the scheduler {type(parts.scheduler).__name__}, which waits for a metric,"
    if parts.loss_scale is not None:
        return "a loss_scale, which only a train_fn can use,"
    if inspect.signature(parts.optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
        return f"the optimizer {type(parts.optimizer).__name__}, which computes the loss repeatedly"
    return ""


def _modules(model: nn.Module, path: str = "") -> dict[str, nn.Module]:
    """Return the layers by path and type, in order: all modules but plain sequences."""
    modules: dict[str, nn.Module] = {}
    # named_children() would leave out a repeated module.
    for name, child in model._modules.items():
        layer = {f"{path}{name}-{type(child).__name__}": child}
        modules |= _modules(child, f"{path}{name}.") if _is_plain(child) else layer
    return modules


def layer_paths(model: nn.Module) -> list[str]:
    """Return the names in a model of the layers into which it is cut, in order."""
    return [name.rpartition("-")[0] for name in _modules(model)]


def _is_plain(module: nn.Module | None) -> bool:
    """Return true if the module only calls its children one after the other."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and not any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks))
    )


def _tensors(parts: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers of all parts that are modules."""
    for part in parts:
        if isinstance(part, nn.Module):
            yield from (*part.parameters(), *part.buffers())


def _numbers(parts: Parts, memory: PartialMemory) -> list[frozenset[int]]:
    """Return the numbers of the storages that each layer needs; the last entry is the loss's."""
    owners = (*_modules(parts.model).values(), parts.loss)
    return [frozenset[int]().union(*map(memory.origins, _tensors([owner]))) for owner in owners]


def _part(parts: Parts, layers: range) -> Parts:
    """Return the parts with these layers alone, also in the optimizer; release the other layers."""
    modules = list(_modules(parts.model).values())
    own = [*modules[layers.start : layers.stop], *([parts.loss] if layers.stop == len(modules) else [])]
    kept = {id(tensor) for tensor in _tensors(own)}
    for group in parts.optimizer.param_groups:
        is_own = [id(parameter) in kept for parameter in group["params"]]
        for key in OF_PARAMETERS & group.keys():
            group[key] = list(compress(group[key], is_own))
    # Most optimizers have no state before their first step.
    for parameter in [one for one in parts.optimizer.state if id(one) not in kept]:
        del parts.optimizer.state[parameter]
    for tensor in _tensors([parts.model, parts.loss]):
        if id(tensor) not in kept and not is_lazy(tensor):
            tensor.data = tensor.new_empty(0)
    return replace(parts, model=nn.Sequential(*modules[layers.start : layers.stop]))


class PartialMemory(TorchDispatchMode):  # type: ignore[misc]
    """Memory for chosen storages of weights, and for the last used others, up to twice the largest of these.

    A weight that lost its memory is zero when it is used again: also keep those from which kept ones are
    computed. ``model_fn`` runs unchanged, so random numbers come in the same order, and weights have the same
    bits, as in the whole network. Meta tensors would cost less, but functions of ``torch.nn.init`` skip them.

    Parameters
    ----------
    kept : container of int
        Numbers of the storages that keep their memory. Storages of weights are numbered as they appear: each
        call of ``model_fn`` with the same states of the generators gives the same order.
    """

    def __init__(self, kept: Container[int]) -> None:
        super().__init__()
        self._kept = kept
        # While it is referred to, no other storage gets its address.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._numbers: dict[int, int] = {}
        self._recent: dict[int, int] = {}
        self._released: dict[int, int] = {}
        self._origins: dict[int, frozenset[int]] = {}
        self._largest = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> PartialMemory:
        """Notice tensors that modules register."""
        self._hooks = [
            register(lambda _module, _name, tensor: self._note(tensor)) for register in REGISTRATIONS
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give the tensors of an operation their memory back, and compute it."""
        given = _tensors_in((args, kwargs))
        for tensor in given:
            if isinstance(tensor, torch.nn.Parameter):
                self._note(tensor)
        is_overwritten = function.overloadpacket in OVERWRITING and self._is_whole(args[0])
        read = given[1:] if is_overwritten else given
        for address in map(_address, given):
            if address in self._released:
                self._storages[address].resize_(self._released.pop(address))
                self._storages[address].fill_(0)
            self._use(address)
        results = function(*args, **(kwargs or {}))
        places = zip(function._schema.arguments, args, strict=False)
        written = [value for place, value in places if place.alias_info and place.alias_info.is_write]
        self._follow(function, read, _tensors_in((results, written)))
        self._release()
        return results

    def origins(self, tensor: torch.Tensor) -> frozenset[int]:
        """Return the numbers of the storages that determine a tensor's values, including its own."""
        return frozenset() if is_lazy(tensor) else self._origins_at(_address(tensor))

    def _origins_at(self, address: int) -> frozenset[int]:
        own = {self._numbers[address]} if address in self._numbers else set()
        return self._origins.get(address, frozenset()) | own

    def _note(self, tensor: torch.Tensor | None) -> None:
        if tensor is None or is_lazy(tensor) or not tensor.untyped_storage().resizable():
            return
        storage, address = tensor.untyped_storage(), _address(tensor)
        if address not in self._numbers:
            self._storages[address] = storage
            self._numbers[address] = len(self._numbers)
            self._use(address)

    def _use(self, address: int) -> None:
        """Mark a storage that is not kept as used last."""
        if address in self._numbers and self._numbers[address] not in self._kept:
            self._recent.pop(address, None)
            self._recent[address] = self._storages[address].nbytes()
            self._largest = max(self._largest, self._recent[address])

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        """Return true if the tensor fills its storage."""
        stored_bytes = self._released.get(_address(tensor), tensor.untyped_storage().nbytes())
        return bool(tensor.is_contiguous() and tensor.numel() * tensor.element_size() == stored_bytes)

    def _follow(self, function: Any, read: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Note copies of weights as weights, and the weights from which results were computed."""
        addresses = [_address(tensor) for tensor in read]
        is_copy = function.overloadpacket in COPYING and any(one in self._numbers for one in addresses)
        origins = frozenset[int]().union(*map(self._origins_at, addresses))
        for tensor in results:
            if is_copy:
                self._note(tensor)
            # Also if there are none: a dead tensor may have had this address.
            self._origins[_address(tensor)] = origins

    def _release(self) -> None:
        """Release the least recently used memory."""
        held = sum(self._recent.values())
        while held > 2 * self._largest:
            address, size_bytes = next(iter(self._recent.items()))
            del self._recent[address]
            self._released[address] = size_bytes
            self._storages[address].resize_(0)
            held -= size_bytes


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested values, without lazy ones."""
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and not is_lazy(one)]


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
