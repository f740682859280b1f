"""Members of one shape that a rank trains as one computation: slices of stacked parameters.

A slice keeps its own module and optimizer. While it is stacked, their tensors are views of its row in shared
matrices, so saving, evaluating or scheduling it works as for a member alone. To train several small networks
as one is the idea of HFTA (Wang et al., MLSys 2021).
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from hetctl.model.ensemble import Member
from hetctl.model.values import dataclass
from hetctl.perf.sharing import LEAST_GAIN
from hetctl.runtime.data.batches import Batches, TrainingData
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.data.sampler import parts_of
from hetctl.runtime.frameworks import FusedSteps
from hetctl.runtime.frameworks.pytorch import TorchNetwork
from hetctl.runtime.frameworks.torch_batches import is_compiled
from hetctl.runtime.frameworks.torch_parts import Parts, Score, generators, parameters_of, set_generators
from hetctl.runtime.frameworks.torch_stacked import DROPOUTS, StackedModule, dropouts_in, losses_of
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

Tensors = Sequence[torch.Tensor]
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference of a fused gradient from the member's own, relative to its norm; else 0.1."""
LEAST_NORM = 1e-3
"""Norm of a gradient, relative to the largest of the member's, that counts where it is smaller."""
LEAST_PAIRS, MOST_PAIRS = 2, 8
"""Pairs of steps that decide between a width and members alone: the least if all agree, the most if not.

One more warms up. Between two ways to stack the least decide, as forming stacks anew takes as long as a step.
"""
TRIAL_SAMPLES = 16
"""Samples of a batch by which gradients are compared: with all, it would take as long as two steps."""
STEADY_STEPS = 100, 1000
"""Numbers of steps of all members, after those that decide, by which their rate is measured."""
CLEAR_GAIN = 1.3
"""Gain in each of the least pairs that other work on the machine does not feign."""
MOST_ROWS = 1.25
"""Rows of the stacks for each slice, above which smaller ones are formed."""
NO_GAIN = "fused members are no faster"
LEAST_FREE = 0.2
"""Share of a GPU's memory that must be free for another member."""


@dataclass(frozen=True)
class UpdateRule:
    """Rule of an optimizer, in one pass over a slice's tensors.

    Parameters
    ----------
    moments : callable
        Function of a group's options that returns the names of its tensors for each parameter.
    fixed : mapping of str to Any
        Options of which only these values are supported.
    kernel : callable
        Function of lists of values, gradients, moments and numbers of steps, as `Update.tensors`, and of
        options by keyword; it changes values and moments in place.
    options : callable
        Function of a group's options that returns the kernel's, without the learning rate.
    counts : bool
        True if it keeps the number of steps.
    """

    moments: Callable[[Mapping[str, Any]], tuple[str, ...]]
    fixed: Mapping[str, Any]
    kernel: Callable[..., None]
    options: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    counts: bool


def _sgd(group: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: group[name] for name in ("weight_decay", "momentum", "dampening", "nesterov", "maximize")}


def _adam(group: Mapping[str, Any]) -> Mapping[str, Any]:
    first, second = group["betas"]
    own = {name: group[name] for name in ("weight_decay", "eps", "amsgrad", "maximize")}
    return {"beta1": float(first), "beta2": float(second), **own}


def _adam_rule(kernel: Callable[..., None], *, decoupled: bool) -> UpdateRule:
    plain = dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
    fixed = {**plain, "decoupled_weight_decay": decoupled}
    return UpdateRule(lambda _group: ("exp_avg", "exp_avg_sq"), fixed, kernel, _adam, counts=True)


# The kernels of `fused=True`: a stack's optimizers would take longer than its gradients otherwise.
RULES: Mapping[type, UpdateRule] = {
    torch.optim.SGD: UpdateRule(
        lambda group: ("momentum_buffer",) if group["momentum"] else (),
        {"dampening": 0, "maximize": False, "differentiable": False},
        partial(torch._fused_sgd_, is_first_step=False),
        _sgd,
        counts=False,
    ),
    torch.optim.Adam: _adam_rule(torch._fused_adam_, decoupled=False),
    torch.optim.AdamW: _adam_rule(torch._fused_adamw_, decoupled=True),
}
"""Rules by class of optimizer."""


@dataclass(frozen=True)
class Update:
    """Parts of a slice's rows that its optimizer changes in each step, of one group of parameters.

    Parameters
    ----------
    tensors : tuple of lists of torch.Tensor
        The kernel's arguments; each list has one tensor or none.
    """

    group: dict[str, Any]
    tensors: tuple[list[torch.Tensor], ...]


@dataclass(eq=False)
class Slice:
    """A member's network, as `Parts`, with the states of its own random generators.

    Attributes
    ----------
    stack : Stack or None
        Stack of which its tensors are views; None: it is alone.
    """

    parts: Parts
    factor: Callable[[], float] = lambda: 1.0
    random: dict[str, torch.Tensor] = field(default_factory=generators)
    stack: Stack | None = None

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """Parameters that training changes, by name, in the order of the optimizer's groups."""
        names = {id(one): name for name, one in self.parts.model.named_parameters()}
        return {names[id(one)]: one for one in parameters_of(self.parts.optimizer)}

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """All other tensors of the module, by name."""
        model = self.parts.model
        frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}
        return {**frozen, **dict(model.named_buffers())}

    @contextmanager
    def own_random(self) -> Iterator[None]:
        """Use the slice's own generators."""
        set_generators(self.random)
        yield
        self.random = generators()

    def step(self, x: Any, y: torch.Tensor) -> torch.Tensor:
        """Train alone, as the default ``train_fn`` does; return the loss."""
        with self.own_random():
            self.parts.optimizer.zero_grad()
            # A user's method may return nothing.
            self.parts.model.train()
            loss = self.parts.loss(self.parts.model(x), y)
            loss.backward()
            if self.stack:
                self.stack.publish(self)
            self.parts.optimizer.step()
            if self.stack:
                self.stack.count(self)
        return torch.as_tensor(loss.detach())

    def leave(self) -> None:
        """Leave its stack, if it is in one."""
        if self.stack:
            self.stack.release(self)

    def unfit(self) -> str | None:
        """Return why it cannot be stacked with any other, or None."""
        parts, optimizer, trained = self.parts, self.parts.optimizer, parameters_of(self.parts.optimizer)
        rule = RULES.get(type(optimizer))
        if rule is None:
            return f"its optimizer is {type(optimizer).__name__}"
        options = [
            group.get(name, value) != value
            for group in optimizer.param_groups
            for name, value in rule.fixed.items()
        ]
        reasons = {
            "its optimizer has options beside rates, momenta and weight decay": any(options),
            "its optimizer has other parameters than its module": set(map(id, trained))
            != {id(one) for one in parts.model.parameters() if one.requires_grad},
            "its parameters are of several types": len({(one.dtype, one.device) for one in trained}) != 1,
            "its gradients have hooks": any(
                one._backward_hooks or one._post_accumulate_grad_hooks for one in trained
            ),
            "its optimizer's step has hooks": _is_changed(optimizer),
            # Of stacked embeddings, `vmap` trains the padding, too.
            "its embeddings have a padding_idx": any(
                getattr(one, "padding_idx", None) is not None for one in parts.model.modules()
            ),
            "it scales its loss": parts.loss_scale is not None,
            "its module is compiled": is_compiled(parts.model),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    @property
    def program(self) -> dict[str, Any]:
        """Properties that are equal in all slices of a stack."""
        model, optimizer = self.parts.model, self.parts.optimizer
        names = {id(one): name for name, one in model.named_parameters()}
        return {
            "modules": [(name, type(module), _settings(module)) for name, module in model.named_modules()],
            "parameters": [(name, one.shape, one.dtype) for name, one in self.trained.items()],
            "other tensors": [(name, one.shape, one.dtype) for name, one in self.constants.items()],
            "optimizers": type(optimizer),
            "groups of parameters": [
                [names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups
            ],
        }


def _is_changed(optimizer: torch.optim.Optimizer) -> bool:
    """Return true if a step does more than the optimizer's rule; the hooks of `TorchRate` are among it."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    # Schedulers wrap the method only to see its calls.
    step = vars(optimizer).get("step")
    return max(map(len, hooks)) > 1 or not (step is None or hasattr(step, "_wrapped_by_lr_sched"))


def _settings(module: torch.nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module, such as the stride of a convolution."""
    varying = {"training"} | ({"p"} if type(module) in DROPOUTS else set())
    plain = (bool, int, float, str, tuple)
    return {
        name: value
        for name, value in vars(module).items()
        if name not in varying and isinstance(value, plain)
    }


class Stack:
    """Slices in the rows of shared tensors; it changes no slice's results but by rounding.

    Rows of slices that have left are free for others.

    Parameters
    ----------
    as_trial : bool
        Use copies of their tensors, for gradients that are only compared.
    """

    def __init__(self, slices: Sequence[Slice], *, as_trial: bool = False) -> None:
        self.slices: list[Slice | None] = [*slices]
        first = slices[0]
        self._model, self._has_one_loss = first.parts.model, _is_one_function(self._losses)
        # At first it says that it trains, but a method of its own may keep parts from it.
        self._model.train()
        self._rule = RULES[type(first.parts.optimizer)]
        trained = [[*one.trained.values()] for one in slices]
        self._shapes = [one.shape for one in trained[0]]
        self._rows = torch.stack([torch.cat([one.detach().flatten() for one in row]) for row in trained])
        self._gradients = torch.empty_like(self._rows)
        self._values = [one.requires_grad_() for one in self._shaped(self._rows)]
        self._constants = [
            torch.stack([one.detach() for one in rows])
            for rows in zip(*(one.constants.values() for one in slices), strict=True)
        ]
        self._called = StackedModule(self._model, [*trained[0], *first.constants.values()])
        self._dropouts = [dropouts_in(one.parts.model) for one in slices]
        self._calls: dict[Any, list[list[tuple[int, torch.Tensor]]]] = {}
        self._updates: dict[int, list[Update]] = {}
        # The kernels want it in this type, and on the device.
        self._steps = self._rows.new_zeros(len(slices), dtype=torch.float32)
        for row, one in enumerate(() if as_trial else slices):
            self._hold(row, one)

    def put(self, member: Slice) -> None:
        """Put a slice into a free row."""
        row = self.slices.index(None)
        self.slices[row], self._dropouts[row] = member, dropouts_in(member.parts.model)
        self._has_one_loss = _is_one_function(self._losses)
        for tensor, part in self._own(row, member):
            part.copy_(tensor.detach())
        self._hold(row, member)

    def release(self, member: Slice) -> None:
        """Give a slice tensors of its own again."""
        self.publish(member)
        row = self.slices.index(member)
        self.slices[row] = member.stack = None
        for tensor, _ in self._own(row, member):
            tensor.data = tensor.data.clone()

    def _hold(self, row: int, member: Slice) -> None:
        """Make a slice's tensors views of its row."""
        taken = [float(state.get("step", 0.0)) for state in member.parts.optimizer.state.values()]
        self._steps[row] = max(taken, default=0.0)
        # Now, and not in the first step, whose time may count. Only this needs memory: it may fail.
        self._updates[row] = self._updates_of(row, member.parts.optimizer)
        member.stack = self
        for tensor, part in self._own(row, member):
            tensor.data, tensor.grad = part, None

    def _own(self, row: int, member: Slice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a slice's tensors, each with its part of a row."""
        own = (*member.trained.values(), *member.constants.values())
        return zip(own, (each.detach()[row] for each in (*self._values, *self._constants)), strict=True)

    def publish(self, member: Slice) -> None:
        """Write a slice's number of steps into the state of its own optimizer."""
        row = self.slices.index(member)
        kind = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        for state in member.parts.optimizer.state.values():
            if "step" in state:
                state["step"] = self._steps[row].to("cpu", kind, copy=True)

    def count(self, member: Slice) -> None:
        """Count a step that a slice has taken alone, by its own optimizer."""
        self._steps[self.slices.index(member)] += 1
        member.parts.optimizer.zero_grad()

    def outputs(
        self, rows: Sequence[int], x: Any, y: torch.Tensor, scores: Sequence[Mapping[str, Score]]
    ) -> list[tuple[Any, list[Any]]]:
        """Return the outputs of these slices in an evaluation, and their scores; x and y are stacked."""
        if self._model.training:
            self._model.eval()
        with torch.no_grad():
            tensors = [self._taken(each, rows) for each in (*self._values, *self._constants)]
            found = self._called(tensors, x)
            outputs = [tree_map(lambda leaf, n=n: leaf[n], found) for n in range(len(rows))]
            return list(zip(outputs, self._scores(outputs, found, y, scores), strict=True))

    def _scores(
        self, outputs: Sequence[Any], stacked: Any, y: torch.Tensor, scores: Sequence[Mapping[str, Score]]
    ) -> list[list[Any]]:
        """Return the scores of each slice, computed together where ``vmap`` can."""
        found: list[list[Any]] = [[] for _ in outputs]
        for name, first in scores[0].items():
            if self._has_one_loss if name == "loss" else _is_one_function([one[name] for one in scores]):
                with suppress(Exception):
                    values = losses_of(first, stacked, y)
                    for of_one, value in zip(found, values.unbind(), strict=True):
                        of_one.append(value)
                    continue
            for n, of_one in enumerate(found):
                of_one.append(scores[n][name](outputs[n], y[n]))
        return found

    def train(self, rows: Sequence[int], x: Any, y: Any) -> list[torch.Tensor]:
        """Take a step with these slices; return their losses. Inputs and targets are stacked."""
        values, constants = self._values, [self._taken(each, rows) for each in self._constants]
        if len(rows) < len(self.slices):
            values = [one.requires_grad_() for one in self._shaped(self._rows[list(rows)])]
        losses, gradients = self.gradients(rows, values, constants, x, y)
        with torch.no_grad():
            # The kernels take all tensors for contiguous ones.
            flat = [one.reshape(len(rows), -1) for one in gradients]
            if len(rows) == len(self.slices):
                torch.cat(flat, 1, out=self._gradients)
                self._steps += 1
            else:
                self._gradients[list(rows)] = torch.cat(flat, 1)
                self._steps[list(rows)] += 1
            for row in rows:
                self._update(row)
            for own, each in zip(self._constants, constants, strict=True):
                if each is not own:
                    own[list(rows)] = each
        return list(losses.unbind())

    def gradients(
        self, rows: Sequence[int], values: Tensors, constants: Tensors, x: Any, y: Any
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return losses and gradients, each of shape (slices, ...); buffers change in place."""
        if not self._model.training:
            self._model.train()
        outputs = self._called([*values, *constants], x, self._drawn(rows, x))
        own = [self._in(row).parts.loss for row in rows]
        losses = losses_of(own[0], outputs, y) if self._has_one_loss else _each_loss(own, outputs, y)
        return losses.detach(), torch.autograd.grad(losses.sum(), values)

    @property
    def _losses(self) -> list[Score]:
        return [one.parts.loss for one in self.slices if one]

    def _in(self, row: int) -> Slice:
        member = self.slices[row]
        assert member is not None
        return member

    def all_rows(self) -> tuple[Tensors, Tensors]:
        """Return values and constants of all slices."""
        return self._values, self._constants

    def _shaped(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return rows of a matrix as stacked parameters; they share its memory."""
        parts = rows.split([shape.numel() for shape in self._shapes], 1)
        return [part.view(len(rows), *shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _taken(self, stacked: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return rows: the tensor itself for all, else a copy of some."""
        return stacked if len(rows) == len(self.slices) else stacked[list(rows)]

    def _update(self, row: int) -> None:
        """Take an optimizer's step."""
        factor = self._in(row).factor()
        for part in self._updates[row]:
            rate = float(part.group["lr"]) * factor
            self._rule.kernel(*part.tensors, lr=rate, **self._rule.options(part.group))

    def _updates_of(self, row: int, optimizer: torch.optim.Optimizer) -> list[Update]:
        """Return what an optimizer changes; states that it lacks begin with zeros, as all rules do."""
        found, first = [], 0
        for group in optimizer.param_groups:
            sizes = [one.numel() for one in group["params"]]
            columns = slice(first, first + sum(sizes))
            values, gradients, first = self._rows[row, columns], self._gradients[row, columns], columns.stop
            moments = {name: torch.zeros_like(values) for name in self._rule.moments(group)}
            for name, moment in moments.items():
                for one, part in zip(group["params"], moment.split(sizes), strict=True):
                    # Only here: without moments, SGD keeps no state.
                    state, own = optimizer.state[one], part.view(one.shape)
                    if self._rule.counts:
                        state.setdefault("step", torch.zeros(()))
                    if name in state:
                        own.copy_(state[name])
                    state[name] = own
            kept = [[one] for one in moments.values()] or [[]]
            counted = ([], [self._steps[row]]) if self._rule.counts else ()
            found.append(Update(group, ([values], [gradients], *kept, *counted)))
        return found

    def _drawn(self, rows: Sequence[int], x: Any) -> list[list[torch.Tensor]]:
        """Return the factors of all dropouts in a step, which each slice draws as it would alone."""
        if not self._dropouts[0]:
            return []
        form = tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(x))
        if form not in self._calls:
            self._calls[form] = self._called.dropout_calls(tree_map(lambda leaf: leaf[0], x))
        drawn = []
        for row in rows:
            with self._in(row).own_random():
                layers = [each.train() for each in self._dropouts[row]]
                drawn.append(
                    [
                        [layers[number](torch.ones_like(like)) for number, like in of_part]
                        for of_part in self._calls[form]
                    ]
                )
        return [
            [torch.stack(of_call) for of_call in zip(*of_part, strict=True)]
            for of_part in zip(*drawn, strict=True)
        ]


def _is_one_function(functions: Sequence[Any]) -> bool:
    """Return true for one function, functions of one text without values of their own, or equal losses."""
    first, *others = functions
    text = _text_of(first)
    return all(one is first or text == _text_of(one) is not None for one in others)


def _text_of(function: Any) -> Any:
    """Return all on which a function's results depend beside its arguments; None if that is not known."""
    if type(function).__module__ == torch.nn.MSELoss.__module__:
        return type(function), _settings(function), [one.tolist() for one in function.buffers()]
    values = ("__closure__", "__defaults__", "__kwdefaults__", "__self__")
    has_none = all(getattr(function, name, None) is None for name in values)
    return getattr(function, "__code__", None) if has_none else None


def _each_loss(losses: Sequence[Score], outputs: Any, y: torch.Tensor) -> torch.Tensor:
    """Return the losses of slices that have a function each."""
    own = (tree_map(lambda leaf, n=n: leaf[n], outputs) for n in range(len(losses)))
    return torch.stack([loss(*given) for loss, given in zip(losses, zip(own, y, strict=True), strict=True)])


@dataclass(eq=False)
class Work:
    """Batch that a network trains, or evaluates, together with others.

    Parameters
    ----------
    x, y : array
        Inputs and targets.
    scores : mapping of str to callable, or None
        Scores of an evaluation; None: the network is trained.

    Attributes
    ----------
    form : tuple
        Kind and shapes: works of one form make one computation.
    """

    network: FusedNetwork
    x: Any
    y: Any
    scores: Mapping[str, Score] | None = None

    def __post_init__(self) -> None:
        names = None if self.scores is None else tuple(self.scores)
        self.form = names, self.x.shape, self.x.dtype, self.y.shape, self.y.dtype


class FusedNetwork(TorchNetwork):
    """Network of a member that trains together with others."""

    def __init__(
        self, parts: Parts, member: Member, functions: UserFunctions, group: Group, device: torch.device
    ) -> None:
        super().__init__(parts, member, functions, group, device)
        self.slice = Slice(parts, lambda: self._rate.factor)

    def training(self, batches: Batches) -> Generator[Work, Any, float]:
        """Train as the default ``train_fn`` does; yield each batch, and get its loss."""
        if self._compiled:
            with self.slice.own_random():
                return self.train(batches)
        data, losses, counts = self._data(batches), [], []
        for x, y in data:
            data.loss = yield Work(self, x, y)
            losses.append(data.loss)
            counts.append(data.counted)
        # Otherwise a scheduler warns that its optimizer has taken no step.
        self._optimizer._opt_called = True
        mean = np.average(torch.stack(losses).tolist(), weights=counts) if losses else 0.0
        return self._synchronized(float(mean), batches)

    def _scored(
        self, samples: Samples, count: int, scores: Mapping[str, Score]
    ) -> Generator[Work, Any, tuple[Any, list[Any]]]:
        if self._compiled:
            return (yield from super()._scored(samples, count, scores))
        found: tuple[Any, list[Any]] = yield Work(self, *samples, scores)
        return found

    def _data(self, batches: Batches) -> TrainingData:
        """Return the batches as arrays: those of several members go to the device together."""
        rows = self._member.largest_train_batch(self._group.size)
        return TrainingData(batches, rows, on_batch=partial(self._on_batch, batches))

    def _state(self) -> dict[str, Any]:
        if self.slice.stack:
            self.slice.stack.publish(self.slice)
        return super()._state()

    def _random_states(self) -> dict[str, torch.Tensor]:
        return self.slice.random

    def _set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        self.slice.random = dict(states)


class Widths:
    """Choice of the number of slices in a stack, by the time of real steps of members of one program.

    The present width and the next one take steps in turn, as a load on the machine changes from second to
    second: only steps side by side are compared. What is not surely faster than alone counts as no faster.

    Attributes
    ----------
    known : dict of int to float
        Steps per second of all members together by width, also from earlier processes.
    """

    def __init__(self) -> None:
        self.known: dict[int, float] = {}
        self._seconds: dict[tuple[int, int], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))

    def next(self, members: int) -> int:
        """Return the width to be tried in the next step of so many members."""
        pair = self._pair(members)
        first, second = self._seconds[pair]
        return pair[len(first) > len(second)]

    def best(self, members: int) -> int | None:
        """Return the width with the highest rate, 1 if members alone have it; None before all are tried."""
        first, second = self._pair(members)
        return first if first == second else None

    def note(self, width: int, members: int, seconds: float) -> None:
        """Record the time of a step of all members."""
        pair = self._pair(members)
        times = self._seconds[pair]
        times[pair.index(width)].append(seconds / members)
        if gain := _gain(*times, over_alone=pair[0] == 1):
            first = self.known.setdefault(pair[0], 1 / statistics.median(times[0][1:]))
            self.known[pair[1]] = first * gain

    def scale(self, width: int, rate: float) -> None:
        """Take another rate of a width for the right one; that of the others follows by the gains."""
        factor = rate / self.known[width]
        self.known = {other: factor * known for other, known in self.known.items()}

    def _pair(self, members: int) -> tuple[int, int]:
        """Return the best width so far and the one to compare it with; the best one twice at the end."""
        best, width = 1, (most := 2 ** (members - 1).bit_length())
        if most not in self.known:
            # Fewer members may have tried some.
            tried = max((one for one in self.known if one < most), key=self.known.__getitem__, default=1)
            return (tried if self._gains(tried, over=1) else 1), most
        while width > 1:
            if not self.known.keys() >= {best, width}:
                return best, width
            if self._gains(width, over=best):
                best = width
            elif width < most:
                break
            width //= 2
        return best, best

    def _gains(self, width: int, *, over: int) -> bool:
        return self.known.get(width, 0.0) > (LEAST_GAIN if over == 1 else 1) * self.known.get(over, 0.0)


def _gain(first: Sequence[float], second: Sequence[float], *, over_alone: bool) -> float | None:
    """Return how much faster the second of two widths is, at most 1 if it only may be; None: go on."""
    # The first steps also allocate.
    gains = [one / other for one, other in zip(first[1:], second[1:], strict=False)]
    if len(first) != len(second) or len(gains) < LEAST_PAIRS:
        return None
    median = statistics.median(gains)
    if not over_alone:
        return median
    if len(gains) < MOST_PAIRS and max(gains) > LEAST_GAIN and min(gains) < CLEAR_GAIN:
        return None
    return median if np.quantile(gains, 0.25) > LEAST_GAIN else min(median, 1.0)


@lru_cache(maxsize=64)
def widths_of(_program: str, _form: tuple[Any, ...]) -> Widths:
    """Return what this process has measured of members of one program, with batches of one form."""
    return Widths()


class TorchFusedSteps(FusedSteps):
    """Computation of members that train together on this rank; see `FusedSteps`."""

    def __init__(self, known: Mapping[int, float] | None = None) -> None:
        super().__init__(known)
        self._widths: Widths | None = None
        self._trial: tuple[int, int, float] | None = None
        self._stepped: tuple[int, float] | None = None
        self._times: tuple[int, list[float]] = 0, []
        self._stacks: list[Stack] = []
        self._arranged: tuple[int, list[Slice]] = 0, []
        self._tried: dict[str, Slice] = {}

    def join(self, name: str, network: FusedNetwork) -> None:
        """Refuse a member by its parts; only its first step tells the rest."""
        if reason := network.slice.unfit() or _no_memory():
            self.refused[name] = reason

    def run(self, works: Mapping[str, Work]) -> dict[str, Any]:
        """Do the works of all members, each one's next batch; return their results, or errors.

        The result of a training step is a loss; that of an evaluation outputs and a list of scores.
        """
        if new := {name: work for name, work in works.items() if name not in self._tried and not work.scores}:
            self._admit(new)
        fused = {
            name: work for name, work in works.items() if name in self._tried and name not in self.refused
        }
        members = len(fused)
        is_step = members > 1 and all(work.scores is None for work in works.values())
        is_step = is_step and len({work.form for work in works.values()}) == 1
        trial, self._trial = self._trial, None
        if not is_step:
            self._stepped = None
            self._arrange(fused, max([1, *(len(stack.slices) for stack in self._stacks)]))
            return self._results(works, fused)
        work = next(iter(fused.values()))
        widths = self._widths_of(work)
        if trial and trial[1] == members:
            # From step to step: what members do between them takes as long at any width.
            widths.note(trial[0], members, _time() - trial[2])
        best = widths.best(members)
        if best and (self._has_steady_rate(widths, best, members) or trial):
            rates = sorted(widths.known.items())
            self.measured = {width: rate * len(work.x) for width, rate in rates}
            listed = ", ".join(f"{width}: {rate:.0f}" for width, rate in rates)
            print(f"steps/s of all members by the number of fused ones: {listed}", flush=True)
        width = best or widths.next(members)
        # To try them alone, they may stay where they are.
        stacked = {} if best is None and width == 1 else fused
        if stacked:
            self._arrange(fused, width)
        if best is None:
            self._trial = width, members, _time()
        results = self._results(works, stacked)
        if best == 1:
            self.refused.update(dict.fromkeys(list(fused)[1:], NO_GAIN))
        return results

    def _has_steady_rate(self, widths: Widths, width: int, members: int) -> bool:
        """Time a step of the most members so far; after some, once, note how fast they are, and return true.

        The first steps of a process, which decide, are slower than all later ones.
        """
        most, times = self._times
        if members > most:
            self._times = members, (times := [])
        if members < most or len(times) == STEADY_STEPS[-1]:
            return False
        before, self._stepped = self._stepped, (members, _time())
        if before is None or before[0] != members:
            return False
        times.append(self._stepped[1] - before[1])
        if len(times) not in STEADY_STEPS:
            return False
        widths.scale(width, members / statistics.mean(times))
        return True

    def _results(self, works: Mapping[str, Work], fused: Mapping[str, Work]) -> dict[str, Any]:
        """Return the results of all works, of those that may be together, as they are now stacked."""
        results = self._computed(fused)
        return results | {name: _alone(work) for name, work in works.items() if name not in results}

    def _widths_of(self, work: Work) -> Widths:
        """Return what is known about the members' program; the process keeps it for later ones."""
        if self._widths is None:
            self._widths = widths_of(str(work.network.slice.program), work.form)
            if self._known and not self._widths.known:
                self._widths.known = {width: rate / len(work.x) for width, rate in self._known.items()}
        return self._widths

    def leave(self, name: str, network: FusedNetwork) -> None:
        """Let a member go: its tensors become its own again."""
        network.slice.leave()
        self._tried.pop(name, None)
        self.refused.pop(name, None)

    def _admit(self, new: Mapping[str, Work]) -> None:
        """Try the first steps of members, beside another's if there is one."""
        others = [one for other, one in self._tried.items() if other not in self.refused]
        like = others[0] if others else None
        works = {name: work for name, work in new.items() if name not in self.refused}
        members = len(others) + len(works)
        if works and members > 1 and self._widths_of(next(iter(works.values()))).best(members) == 1:
            # Trial steps would only cost.
            self.refused.update(dict.fromkeys(list(works)[0 if others else 1 :], NO_GAIN))
        elif works:
            like = like or next(iter(works.values())).network.slice
            self.refused.update(different(like, works))
        self._tried |= {name: work.network.slice for name, work in new.items()}

    def _arrange(self, fused: Mapping[str, Work], width: int) -> None:
        """Form stacks of up to `width` slices, as equal as possible; a slice alone is in none."""
        slices = [work.network.slice for work in fused.values()]
        if (width, slices) == self._arranged:
            return
        parts = parts_of(len(slices), (1,) * -(-len(slices) // width)) if slices else ()
        left = iter(slices)
        groups = [[next(left) for _ in range(part)] for part in parts]
        try:
            if not self._are_in_place(slices, parts, width):
                self._dissolve()
                self._stacks = [Stack(group) for group in groups if len(group) > 1]
        except Exception as error:
            # There is no memory for it.
            self.refused.update(dict.fromkeys(fused, _in_short(error)))
            self._dissolve()
        else:
            self._arranged = width, slices

    def _are_in_place(self, slices: Sequence[Slice], parts: Sequence[int], width: int) -> bool:
        """Put new slices into rows that others have left; return false if other stacks have to be formed."""
        rows = [stack.slices for stack in self._stacks]
        held = sum(one is not None for row in rows for one in row)
        new = [one for one in slices if one.stack is None]
        # Those that train alone would not fit in; a step with free rows copies the others.
        if not parts or min(parts) == 1 or len(rows) != len(parts) or held + len(new) != len(slices):
            return False
        if max(map(len, rows)) > width or not len(slices) <= sum(map(len, rows)) <= MOST_ROWS * len(slices):
            return False
        for one in new:
            next(stack for stack in self._stacks if None in stack.slices).put(one)
        return True

    def _dissolve(self) -> None:
        for one in self._tried.values():
            one.leave()
        self._stacks, self._arranged = [], (0, [])

    def _computed(self, fused: Mapping[str, Work]) -> dict[str, Any]:
        """Return the results of works of stacked slices, as far as they can be computed together."""
        found: dict[str, Any] = {}
        by_form: dict[Any, dict[str, Work]] = defaultdict(dict)
        for name, work in fused.items():
            if stack := work.network.slice.stack:
                by_form[stack, work.form][name] = work
        for (stack, _), group in by_form.items():
            # All rows are taken without a copy, in their order.
            names = sorted(group, key=lambda name: stack.slices.index(group[name].network.slice))
            works = [group[name] for name in names]
            rows = [stack.slices.index(work.network.slice) for work in works]
            try:
                given = _stacked(works)
                scores = [work.scores for work in works]
                results = stack.outputs(rows, *given, scores) if scores[0] else stack.train(rows, *given)
            except Exception as error:
                # No weight has changed yet: each goes on alone, where the error is its own if it comes again.
                self.refused.update(dict.fromkeys(group, _in_short(error)))
            else:
                found |= zip(names, results, strict=True)
        if self.refused.keys() & fused.keys():
            self._dissolve()
        return found


def _stacked(works: Sequence[Work]) -> tuple[Any, ...]:
    """Return inputs and targets of works of one form on the device, stacked."""
    return works[0].network.tensors(
        [np.stack([work.x for work in works]), np.stack([work.y for work in works])]
    )


def different(like: Slice, works: Mapping[str, Work]) -> dict[str, str]:
    """Return which networks cannot be stacked with another, and why, by one step of all that changes none."""
    found: dict[str, str] = {}
    by_form: dict[Any, dict[str, Work]] = defaultdict(dict)
    expected = like.program
    for name, work in works.items():
        own = work.network.slice
        others = (what for what, program in own.program.items() if program != expected[what])
        if reason := own.unfit() or next(
            (f"its {what} differ from those of the others" for what in others), None
        ):
            found[name] = reason
        else:
            by_form[work.form][name] = work
    for group in by_form.values():
        found |= _different_results(like, group)
    return found


def _different_results(like: Slice, works: Mapping[str, Work]) -> dict[str, str]:
    """Return which networks get other gradients in a stack than alone; all works have one form."""
    given = list(works.values())
    own = [work.network.slice for work in given]
    # The other one gets some batch. Twice in a stack, a slice would draw other random numbers.
    others = [] if like in own else [like]
    slices = [*others, *own]
    try:
        stack = Stack(slices, as_trial=True)
        x, y = _stacked([*given[: len(others)], *given])
        x, y = tree_map(lambda leaf: leaf[:, :TRIAL_SAMPLES], (x, y))
        with _without_effect(slices):
            losses, gradients = stack.gradients(range(len(slices)), *stack.all_rows(), x, y)
    except Exception as error:
        # Whatever vmap or a copy cannot do: alone, the member may well train. Which one is it?
        if len(works) == 1:
            return dict.fromkeys(works, _in_short(error))
        alone = ({name: work} for name, work in works.items())
        return {name: why for one in alone for name, why in _different_results(like, one).items()}
    reasons = {}
    for row, (name, work) in enumerate(works.items(), start=len(others)):
        stacked = [losses[row], *(each[row] for each in gradients)]
        constants = [each[row] for each in stack.all_rows()[1]]
        if reason := _different_alone(
            work, tree_map(lambda leaf, n=row: leaf[n], (x, y)), stacked, constants
        ):
            reasons[name] = reason
    return reasons


def _different_alone(
    work: Work, batch: tuple[Any, torch.Tensor], stacked: list[torch.Tensor], constants: list[torch.Tensor]
) -> str | None:
    """Compare loss, gradients and buffers of a stack with those of a member alone."""
    own, (x, y) = work.network.slice, batch
    held = {name: one.detach().clone() for name, one in own.constants.items()}
    try:
        with _without_effect([own]), own.own_random():
            before = _beside_tensors(own)
            own.parts.model.train()
            outputs = functional_call(own.parts.model, held, (x,))
            has_own = own.parts.loss(tree_map(torch.detach, outputs), y).requires_grad
            loss = own.parts.loss(outputs, y)
            after = _beside_tensors(own)
            expected = [loss.detach(), *torch.autograd.grad(loss, [*own.trained.values()])]
        most = TOLERANCES.get(expected[0].dtype, 0.1)
        pairs = zip([*stacked, *constants], [*expected, *held.values()], strict=True)
        # Of a bias before a batch norm, the gradient is nothing but rounding.
        least = LEAST_NORM * max(each.norm() for each in expected)
        # NaN is no difference: a member that diverges does so alone, too.
        differ = any(
            (one - other).norm() > most * (other.norm() + least)
            for one, other in pairs
            if other.is_floating_point()
        )
    except Exception as error:
        return _in_short(error)
    reasons = {
        "its loss has parameters, or uses those of its module": has_own,
        "its module changes its attributes, or draws random numbers of Python or NumPy": before != after,
        "its results would differ from those alone": differ,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _beside_tensors(member: Slice) -> Any:
    """Return what a step may change beside tensors: attributes of the module, and global generators."""
    of_numpy = [np.asarray(part).tolist() for part in np.random.get_state()]
    return member.program["modules"], random.getstate(), of_numpy


@contextmanager
def _without_effect(slices: Sequence[Slice]) -> Iterator[None]:
    """Undo what steps of slices change beside tensors."""
    states, of_python, of_numpy = [one.random for one in slices], random.getstate(), np.random.get_state()
    modules = [module for one in slices for module in one.parts.model.modules()]
    kept = [(vars(module), dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for one, state in zip(slices, states, strict=True):
            one.random = state
        for now, before in kept:
            now.clear()
            now.update(before)


def _no_memory() -> str | None:
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return "the GPU's memory is used" if free < LEAST_FREE * total else None


def _alone(work: Work) -> Any:
    """Return the result, or the error, of a member's work for itself."""
    own = work.network.slice
    try:
        x, y = work.network.tensors([work.x, work.y])
        if work.scores is None:
            return own.step(x, y)
        with torch.no_grad(), own.own_random():
            own.parts.model.eval()
            outputs = own.parts.model(x)
            return outputs, [score(outputs, y) for score in work.scores.values()]
    except Exception as error:
        return error


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _time() -> float:
    """Return the time that a step takes as far as other work on the machine does not change it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    # Of this thread, which takes part in all that others compute; these count while they wait, too.
    return time.thread_time()
