"""Chains in PyTorch: sequential modules that are cut into stages, of which each is built alone."""

from __future__ import annotations

import inspect
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.frameworks.torch_memory import PartialMemory
from hetctl.runtime.frameworks.torch_padding import is_compiled
from hetctl.runtime.frameworks.torch_parts import Parts, make_parameters, parts_of
from hetctl.runtime.frameworks.torch_stages import OF_PARAMETERS, TorchStage
from hetctl.runtime.frameworks.torch_state import generators, set_generators
from hetctl.runtime.frameworks.torch_tensors import present_device
from hetctl.runtime.worker.user_functions import UserFunctions

HINT = 'return {"model": torch.nn.Sequential(..), ..}, nested ones included, without torch.compile'


class TorchChain:
    """A sequential module; sequential modules inside it are cut, too.

    ``model_fn`` is called here, and again in each `build`, always with the generators of random numbers as
    they are now.

    Raises
    ------
    BadInputError
        If the module, or its optimizer, cannot be divided.
    """

    def __init__(self, member: Member, functions: UserFunctions) -> None:
        self._member = member
        self._functions = functions
        self._states = generators(), np.random.get_state(), random.getstate()
        parts, memory = self._call((), None)
        _check(member.name, parts)
        modules = _modules(parts.model)
        _check_shared(member.name, modules)
        self.layers = tuple(modules)
        if len(self.layers) < 2:
            raise _uncut(member.name, f"one layer alone, {', '.join(modules)},")
        self._is_lazy = any(is_lazy(parameter) for parameter in parts.model.parameters())
        # Layers that wait for their inputs have weights only when they are called.
        self._weights = None if self._is_lazy else _numbers(parts, memory)

    def build(self, layers: range, sample: Samples) -> TorchStage:
        """Call ``model_fn`` with memory for the weights of these layers, and those that determine them."""
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
        return TorchStage(layers, self.layers, own, device)

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


def _check(name: str, parts: Parts) -> None:
    """Refuse parts of a network that cannot be divided."""
    problem = None
    if not isinstance(parts.model, nn.Sequential):
        problem = f"{type(parts.model).__name__} as model instead of torch.nn.Sequential"
    elif is_compiled(parts.model):
        problem = "a compiled module"
    elif not _is_plain(parts.model):
        problem = f"{type(parts.model).__name__} as model, which has hooks or a forward method of its own"
    elif any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parts.model.parameters()):
        problem = "parameters with hooks"
    elif parts.waits_for_metric:
        problem = f"the scheduler {type(parts.scheduler).__name__}, which waits for a metric,"
    elif parts.loss_scale is not None:
        problem = "a loss_scale, which only a train_fn can use,"
    elif inspect.signature(parts.optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
        problem = f"the optimizer {type(parts.optimizer).__name__}, which computes the loss repeatedly"
    if problem:
        raise _uncut(name, problem)


def _uncut(name: str, problem: str) -> BadInputError:
    return BadInputError(f"model_fn returned {problem} for {name}: it cannot be cut into stages", HINT)


def _check_shared(name: str, modules: dict[str, nn.Module]) -> None:
    owners: dict[int, str] = {}
    for layer, module in modules.items():
        for tensor in _tensors([module]):
            owner = owners.setdefault(id(tensor), layer)
            if owner != layer:
                raise BadInputError(
                    f"layers {owner} and {layer} of {name} share weights: no cut can come between them",
                    "put them and the layers between them into one nn.Module of your own",
                )


def _modules(model: nn.Module, path: str = "") -> dict[str, nn.Module]:
    """Return the layers by name, in order: modules that are not plain sequences, with path and type."""
    modules: dict[str, nn.Module] = {}
    # Not named_children(), which leaves out a module that comes again.
    for name, child in model._modules.items():
        layer = {f"{path}{name}-{type(child).__name__}": child}
        modules |= _modules(child, f"{path}{name}.") if _is_plain(child) else layer
    return modules


def _is_plain(module: nn.Module | None) -> bool:
    """Return true if the module only calls those in it one after the other."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and not any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks))
    )


def _tensors(parts: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Return parameters and buffers of those parts that are modules."""
    for part in parts:
        if isinstance(part, nn.Module):
            yield from (*part.parameters(), *part.buffers())


def _numbers(parts: Parts, memory: PartialMemory) -> list[frozenset[int]]:
    """Return the numbers of the storages that each layer needs; the last ones are those of the loss."""
    owners = (*_modules(parts.model).values(), parts.loss)
    return [frozenset[int]().union(*map(memory.origins, _tensors([owner]))) for owner in owners]


def _part(parts: Parts, layers: range) -> Parts:
    """Return the parts with these layers alone, to which the optimizer is confined; release the others."""
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
