"""Members of one shape that a rank trains as one computation: slices of stacked parameters, through vmap.

A slice keeps its own module and optimizer. While it is stacked, their tensors are views of its row in shared
matrices, so saving, evaluating or scheduling it works as for a member alone. To train several small networks
as one is the idea of HFTA (Wang et al., MLSys 2021).
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves, tree_map

from hetctl.model.ensemble import Member
from hetctl.runtime.data.batches import Batches, TrainingData
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.data.sampler import parts_of
from hetctl.runtime.frameworks import FusedSteps
from hetctl.runtime.frameworks.pytorch import TorchNetwork
from hetctl.runtime.frameworks.torch_batches import is_compiled
from hetctl.runtime.frameworks.torch_parts import Parts, generators, parameters_of, set_generators
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

Values = Mapping[str, torch.Tensor]
DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d)
"""Layers that multiply their inputs by random numbers, whatever the inputs are."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference of a fused gradient from the member's own, relative to its norm; else 0.1."""
TRIES = 4
"""Steps that are timed with each width; the first one warms up."""
LEAST_GAIN = 1.05
"""Rate of the best width over that of members alone, below which they train alone."""
LEAST_FREE = 0.2
"""Share of a GPU's memory that must be free for another member."""


@dataclass(frozen=True)
class UpdateRule:
    """Rule of an optimizer for all slices at once.

    Parameters
    ----------
    moments : tuple of str
        Names of its tensors for each parameter.
    options : tuple of str
        Values that may differ between slices.
    fixed : mapping of str to Any
        Options of which only these values are supported.
    update : callable
        Function of values, gradients, moments, options, steps, and a function that widens an option to the
        columns; it changes values and moments in place.
    """

    moments: tuple[str, ...]
    options: tuple[str, ...]
    fixed: Mapping[str, Any]
    update: Callable[..., None]


def _sgd(values: Any, gradients: Any, moments: Values, options: Values, _steps: Any, wide: Any) -> None:
    """Step as `torch.optim.SGD`, in its order of operations."""
    gradients = gradients + wide(options["weight_decay"]) * values
    momentum, buffer = wide(options["momentum"]), moments["momentum_buffer"]
    buffer.mul_(momentum).add_(gradients)
    nesterov = wide(options["nesterov"])
    # A slice without Nesterov's rule moves by its buffer.
    values.addcmul_(
        torch.where(nesterov > 0, gradients + momentum * buffer, buffer), wide(options["lr"]), value=-1
    )


def _adam(
    values: Any, gradients: Any, moments: Values, options: Values, steps: Any, wide: Any, *, decoupled: bool
) -> None:
    """Step as `torch.optim.Adam` or, with decoupled weight decay, `AdamW`."""
    rate, decay = options["lr"], options["weight_decay"]
    if decoupled:
        values.mul_(wide(1 - rate * decay))
    else:
        gradients = gradients + wide(decay) * values
    first, second = options["beta1"], options["beta2"]
    mean, square = moments["exp_avg"], moments["exp_avg_sq"]
    mean.lerp_(gradients, wide(1 - first).expand_as(mean))
    square.mul_(wide(second)).addcmul_(gradients * wide(1 - second), gradients)
    root = wide((1 - second**steps).sqrt())
    values.addcmul_(
        mean / (square.sqrt() / root + wide(options["eps"])), wide(rate / (1 - first**steps)), value=-1
    )


_ADAM = partial(
    UpdateRule,
    ("exp_avg", "exp_avg_sq"),
    ("lr", "beta1", "beta2", "eps", "weight_decay"),
    {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False},
)
RULES: Mapping[type, UpdateRule] = {
    torch.optim.SGD: UpdateRule(
        ("momentum_buffer",),
        ("lr", "momentum", "nesterov", "weight_decay"),
        {"dampening": 0, "maximize": False, "differentiable": False},
        _sgd,
    ),
    torch.optim.Adam: _ADAM(partial(_adam, decoupled=False)),
    torch.optim.AdamW: _ADAM(partial(_adam, decoupled=True)),
}
"""Rules by class of optimizer."""


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
        """Parameters that training changes, by name."""
        return {name: one for name, one in self.parts.model.named_parameters() if one.requires_grad}

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """All other tensors of the module, by name."""
        model = self.parts.model
        frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}
        return {**frozen, **dict(model.named_buffers())}

    @property
    def dropouts(self) -> list[torch.nn.Module]:
        """Layers of `DROPOUTS` in the module, in its order."""
        return [module for module in self.parts.model.modules() if type(module) in DROPOUTS]

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
            loss = self.parts.loss(self.parts.model.train()(x), y)
            loss.backward()
            self.parts.optimizer.step()
        return torch.as_tensor(loss.detach())

    def twin(self) -> Slice:
        """Return a copy that shares nothing."""
        parts = copy.deepcopy((self.parts.model, self.parts.optimizer, self.parts.loss))
        return Slice(Parts(*parts), self.factor, dict(self.random))

    def unfit(self) -> str | None:
        """Return why it cannot be stacked with any other, or None."""
        parts, optimizer, trained = self.parts, self.parts.optimizer, self.trained
        rule = RULES.get(type(optimizer))
        if rule is None:
            return f"its optimizer is {type(optimizer).__name__}"
        options = [
            group.get(name) != value for group in optimizer.param_groups for name, value in rule.fixed.items()
        ]
        reasons = {
            "its optimizer has options beside rates, momenta and weight decay": any(options),
            "its optimizer has other parameters than its module": set(map(id, trained.values()))
            != set(map(id, parameters_of(optimizer))),
            "its parameters are of several types": len({(one.dtype, one.device) for one in trained.values()})
            != 1,
            "its gradients have hooks": any(
                one._backward_hooks or one._post_accumulate_grad_hooks for one in trained.values()
            ),
            "its loss has parameters": isinstance(parts.loss, torch.nn.Module)
            and any(parts.loss.parameters()),
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
    """Slices in the rows of shared matrices; it changes no slice's results but by rounding."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.slices = tuple(slices)
        first = slices[0]
        self._model, self._loss = first.parts.model, first.parts.loss
        trained = [list(one.trained.values()) for one in slices]
        self._names, self._shapes = list(first.trained), [one.shape for one in trained[0]]
        self._sizes = [one.numel() for one in trained[0]]
        self._rule = RULES[type(first.parts.optimizer)]
        self._values = _matrix(trained)
        self._leaves = self._split(self._values)
        self._moments = {
            name: _matrix(
                [[_moment(one, each, name) for each in row] for one, row in zip(slices, trained, strict=True)]
            )
            for name in self._rule.moments
        }
        self._constants = {
            name: torch.stack([one.constants[name].detach() for one in slices]) for name in first.constants
        }
        steps = [
            max([0.0, *(float(s.get("step", 0.0)) for s in one.parts.optimizer.state.values())])
            for one in slices
        ]
        self._steps = torch.tensor(steps, dtype=torch.float64, device=self._values.device)[:, None]
        self._columns = self._groups_of_columns()
        self._dropouts = [one.dropouts for one in slices]
        self._calls: dict[Any, list[tuple[int, torch.Tensor]]] = {}
        self._options: Values | None = None
        for row, one in enumerate(slices):
            one.stack = self
            self._point(one, row)

    def refresh(self) -> None:
        """Read the options of the optimizers again: a scheduler may have changed them."""
        self._options = None

    def publish(self, member: Slice) -> None:
        """Show a slice's part of the optimizer's state, as views, in its own optimizer."""
        row, optimizer = self.slices.index(member), member.parts.optimizer
        taken = float(self._steps[row])
        if not taken:
            return
        kind = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        moments = {name: self._row(matrix, row) for name, matrix in self._moments.items()}
        numbers = {id(one): number for number, one in enumerate(member.trained.values())}
        # SGD keeps no state without momentum.
        groups = (group for group in optimizer.param_groups if group.get("momentum", 1.0) != 0)
        for one in (each for group in groups for each in group["params"]):
            state = {name: views[numbers[id(one)]] for name, views in moments.items()}
            step = {"step": torch.tensor(taken, dtype=kind)} if len(state) > 1 else {}
            optimizer.state[one] = {**step, **state}

    def dissolve(self) -> None:
        """Give all slices tensors of their own again."""
        for one in self.slices:
            self.publish(one)
            one.stack = None
            for tensor in (*one.trained.values(), *one.constants.values()):
                tensor.data = tensor.data.clone()
            for state in one.parts.optimizer.state.values():
                state.update({name: value.clone() for name, value in state.items() if torch.is_tensor(value)})

    def outputs(self, rows: Sequence[int], x: Any) -> list[Any]:
        """Return the outputs of these slices in an evaluation; x is stacked."""
        self._model.eval()
        taken = self._taker(rows)
        named = self._named(taken(self._values))
        with torch.no_grad():
            found = vmap(partial(functional_call, self._model))(
                {**named, **self._taken_constants(taken)}, (x,)
            )
        return [tree_map(lambda tensor, n=number: tensor[n], found) for number in range(len(rows))]

    def train(self, rows: Sequence[int], x: Any, y: Any) -> list[torch.Tensor]:
        """Take a step with these slices; return their losses. Inputs and targets are stacked."""
        taken = self._taker(rows)
        values, constants = taken(self._values), self._taken_constants(taken)
        moments = {name: taken(matrix) for name, matrix in self._moments.items()}
        steps = taken(self._steps)
        losses, gradients = self.gradients(rows, values, constants, x, y)
        options = {name: taken(each) for name, each in self._read_options().items()}
        with torch.no_grad():
            steps += 1
            self._rule.update(values, gradients, moments, options, steps, self._widened)
            if len(rows) < len(self.slices):
                changed = [(self._values, values), (self._steps, steps)]
                changed += [(self._moments[name], moments[name]) for name in moments]
                changed += [(self._constants[name], constants[name]) for name in constants]
                for whole, part in changed:
                    whole[list(rows)] = part
        return list(losses)

    def gradients(
        self, rows: Sequence[int], values: torch.Tensor, constants: Values, x: Any, y: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return losses and gradients, shapes (slices,) and (slices, columns); buffers change in place."""
        if not self._model.training:
            self._model.train()
        named = self._named(values)
        losses = vmap(self._loss_of)(named, dict(constants), x, y, self._drawn(rows, x))
        found = torch.autograd.grad(losses.sum(), list(named.values()))
        return losses.detach(), torch.cat([each.reshape(len(rows), -1) for each in found], 1)

    def all_rows(self) -> tuple[torch.Tensor, Values]:
        """Return values and constants of all slices."""
        return self._values, self._constants

    def _loss_of(self, trained: Values, constants: Values, x: Any, y: Any, masks: list[torch.Tensor]) -> Any:
        drawn = iter(masks)
        with self._dropping(lambda _number, values: values * next(drawn)):
            outputs = functional_call(self._model, {**trained, **constants}, (x,))
        return self._loss(outputs, y)

    def _named(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return leaves of the parameters, by name."""
        leaves = self._leaves if values is self._values else self._split(values)
        return dict(zip(self._names, leaves, strict=True))

    @contextmanager
    def _dropping(self, call: Callable[[int, torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Let a function of its number and inputs stand for each dropout."""
        for number, module in enumerate(self._dropouts[0]):
            module.forward = partial(call, number)
        yield
        for module in self._dropouts[0]:
            del module.forward

    def _drawn(self, rows: Sequence[int], x: Any) -> list[torch.Tensor]:
        """Return the factors of all dropouts in a step, which each slice draws as it would alone."""
        if not self._dropouts[0]:
            return []
        form = tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(x))
        if form not in self._calls:
            self._calls[form] = self._called_dropouts(tree_map(lambda leaf: leaf[0], x))
        drawn = []
        for row in rows:
            with self.slices[row].own_random():
                layers = [(self._dropouts[row][number].train(), like) for number, like in self._calls[form]]
                drawn.append([layer(torch.ones_like(like)) for layer, like in layers])
        return [torch.stack(of_call) for of_call in zip(*drawn, strict=True)]

    def _called_dropouts(self, x: Any) -> list[tuple[int, torch.Tensor]]:
        """Return the numbers of the dropouts that a forward pass calls, in order, and their inputs."""
        called = []

        def note(number: int, values: torch.Tensor) -> torch.Tensor:
            called.append((number, values))
            return values

        tensors = {
            name: one.clone() for name, one in (self.slices[0].trained | self.slices[0].constants).items()
        }
        with torch.no_grad(), self._dropping(note):
            functional_call(self._model, tensors, (x,))
        return called

    def _read_options(self) -> Values:
        """Return the options of all slices, each of shape (slices, groups of parameters)."""
        if self._options is None:
            rows = [
                [_options(group, one.factor()) for group in one.parts.optimizer.param_groups]
                for one in self.slices
            ]
            self._options = {
                name: torch.tensor(
                    [[group[name] for group in row] for row in rows],
                    dtype=torch.float64,
                    device=self._values.device,
                )
                for name in self._rule.options
            }
        return self._options

    def _widened(self, option: torch.Tensor) -> torch.Tensor:
        """Return values by group as values by column, in the parameters' type."""
        option = option.to(self._values.dtype)
        return option if self._columns is None else option[:, self._columns]

    def _groups_of_columns(self) -> torch.Tensor | None:
        """Return the group of parameters of each column; None if there is only one."""
        groups = self.slices[0].parts.optimizer.param_groups
        if len(groups) == 1:
            return None
        group_of = {id(one): number for number, group in enumerate(groups) for one in group["params"]}
        numbers = [group_of[id(one)] for one in self.slices[0].trained.values()]
        device = self._values.device
        return torch.repeat_interleave(
            torch.tensor(numbers, device=device), torch.tensor(self._sizes, device=device)
        )

    def _split(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        """Return the columns of each parameter as a leaf of shape (slices, ...)."""
        parts = matrix.detach().split(self._sizes, 1)
        return [
            part.unflatten(1, shape or (1,)).reshape(len(matrix), *shape).requires_grad_()
            for part, shape in zip(parts, self._shapes, strict=True)
        ]

    def _row(self, matrix: torch.Tensor, row: int) -> list[torch.Tensor]:
        return [
            part.view(shape) for part, shape in zip(matrix[row].split(self._sizes), self._shapes, strict=True)
        ]

    def _point(self, member: Slice, row: int) -> None:
        """Make a slice's tensors views of its row."""
        for one, view in zip(member.trained.values(), self._row(self._values, row), strict=True):
            one.data, one.grad = view, None
        for name, one in member.constants.items():
            one.data = self._constants[name][row]

    def _taker(self, rows: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that takes rows of a matrix: itself for all, else a copy of some."""
        return (
            (lambda matrix: matrix) if len(rows) == len(self.slices) else (lambda matrix: matrix[list(rows)])
        )

    def _taken_constants(self, taken: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: taken(each) for name, each in self._constants.items()}


def _matrix(rows: Iterable[Iterable[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat([one.detach().reshape(-1) for one in row]) for row in rows])


def _moment(member: Slice, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor of an optimizer's state; zeros before its first step, to which all rules are equal."""
    found = member.parts.optimizer.state.get(parameter, {}).get(name)
    return torch.zeros_like(parameter) if found is None else found


def _options(group: Mapping[str, Any], factor: float) -> dict[str, float]:
    first, second = group.get("betas", (0.0, 0.0))
    values = {**group, "beta1": first, "beta2": second, "lr": group["lr"] * factor}
    return {
        name: float(value) for name, value in values.items() if isinstance(value, int | float | torch.Tensor)
    }


@dataclass(frozen=True, eq=False)
class Work:
    """Batch that a network trains, or without targets evaluates, together with others.

    Parameters
    ----------
    x, y : array
        Inputs and targets; y is None in an evaluation.
    """

    network: FusedNetwork
    x: Any
    y: Any = None

    @property
    def form(self) -> tuple[Any, ...]:
        """Kind and shapes: works of one form make one computation."""
        return tuple((part.shape, part.dtype) for part in (self.x, self.y) if part is not None)


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
        if self.slice.stack:
            self.slice.stack.refresh()
        data, losses, counts = self._data(batches), [], []
        for x, y in data:
            data.loss = yield Work(self, x, y)
            losses.append(data.loss)
            counts.append(data.counted)
        # Otherwise a scheduler warns that its optimizer has taken no step.
        self._optimizer._opt_called = True
        mean = np.average(torch.stack(losses).tolist(), weights=counts) if losses else 0.0
        return self._synchronized(float(mean), batches)

    def evaluating(self, batches: Iterable[tuple[Samples, int]]) -> Generator[Work, Any, dict[str, float]]:
        """Evaluate as `evaluate` does; yield each batch, and get its outputs."""
        return (yield from self._evaluating(batches))

    def _outputs(self, samples: Samples, count: int) -> Generator[Work, Any, tuple[Any, torch.Tensor]]:
        if self._compiled:
            return (yield from super()._outputs(samples, count))
        outputs = yield Work(self, samples[0])
        return outputs, self._tensors(samples[1:])[0]

    def _data(self, batches: Batches) -> TrainingData:
        """Return the batches as arrays: those of several members go to the device together."""
        rows = self._member.largest_train_batch(self._group.size)
        return TrainingData(batches, rows, on_batch=self._batch_callback(batches))

    def tensors(self, works: Sequence[Work]) -> tuple[Any, ...]:
        """Return inputs and, of training, targets of works of one form, stacked on the device."""
        parts = [[work.x for work in works], [work.y for work in works if work.y is not None]]
        return self._tensors([np.stack(part) for part in parts if part])

    def _state(self) -> dict[str, Any]:
        if self.slice.stack:
            self.slice.stack.publish(self.slice)
        return super()._state()

    def _random_states(self) -> dict[str, torch.Tensor]:
        return self.slice.random

    def _set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        self.slice.random = dict(states)


class Widths:
    """Choice of the number of slices in a stack, by the time of real steps."""

    def __init__(self) -> None:
        self._seconds: dict[int, list[float]] = defaultdict(list)

    def next(self, members: int) -> int:
        """Return the width for the next step of so many members: one to be tried, or the best."""
        # In turns, so that a load on the machine slows all alike.
        least = min(self._widths(members), key=lambda width: len(self._seconds[width]))
        return least if len(self._seconds[least]) < TRIES else self.best(members)

    def is_known(self, members: int) -> bool:
        """Return true if all widths for so many members have been tried."""
        return all(len(self._seconds[width]) >= TRIES for width in self._widths(members))

    def best(self, members: int) -> int:
        """Return the width with the highest rate; 1 if none is better than members alone."""
        least = {w: min(found[1:]) for w in self._widths(members) if len(found := self._seconds[w]) > 1}
        if not least or 1 not in least:
            return 1
        best = min(least, key=least.__getitem__)
        return best if least[best] * LEAST_GAIN < least[1] else 1

    def rates(self) -> dict[int, float]:
        """Return the steps per second of all members together by width, as measured."""
        return {width: 1 / min(found[1:]) for width, found in self._seconds.items() if len(found) > 1}

    def note(self, width: int, members: int, seconds: float) -> None:
        """Record the time of a step of all members."""
        self._seconds[width].append(seconds / members)

    @staticmethod
    def _widths(members: int) -> list[int]:
        """Return the powers of two up to the first that is no less than the members."""
        return [2**power for power in range((members - 1).bit_length() + 1)]


class TorchFusedSteps(FusedSteps):
    """Computation of members that train together on this rank; see `FusedSteps`."""

    def __init__(self) -> None:
        super().__init__()
        self._widths = Widths()
        self._stacks: list[Stack] = []
        self._tried: dict[str, Slice] = {}

    def join(self, name: str, network: FusedNetwork) -> None:
        """Refuse a member by its parts; only its first step tells the rest."""
        if reason := network.slice.unfit() or _no_memory():
            self.refused[name] = reason

    def run(self, works: Mapping[str, Work]) -> dict[str, Any]:
        """Do the works of all members, each one's next batch; return losses and outputs, or errors."""
        for name, work in works.items():
            if work.y is not None and name not in self._tried:
                self._admit(name, work)
        fused = {
            name: work for name, work in works.items() if name in self._tried and name not in self.refused
        }
        members = len(fused)
        is_step = len({work.form for work in works.values()}) == 1 and members > 1 and self._trains(works)
        is_timed = is_step and not self._widths.is_known(members)
        if is_step or not self._stacks:
            self._arrange(fused, self._widths.next(members) if is_step else 1)
        else:
            self._arrange(fused, max(len(stack.slices) for stack in self._stacks))
        began = _time(is_timed)
        results = self._computed(fused)
        alone = {name: work for name, work in works.items() if name not in results}
        results |= {name: _alone(work) for name, work in alone.items()}
        if is_timed:
            self._note(fused, _time(is_timed) - began)
        return results

    def leave(self, name: str, network: FusedNetwork) -> None:
        """Let a member go: its tensors become its own again."""
        if network.slice.stack:
            self._dissolve()
        self._tried.pop(name, None)
        self.refused.pop(name, None)

    @staticmethod
    def _trains(works: Mapping[str, Work]) -> bool:
        return all(work.y is not None for work in works.values())

    def _admit(self, name: str, work: Work) -> None:
        """Try a member's first step beside another's."""
        own = work.network.slice
        like = next((one for other, one in self._tried.items() if other not in self.refused), own)
        if name not in self.refused and (reason := different(like, work)):
            self.refused[name] = reason
        self._tried[name] = own

    def _note(self, fused: Mapping[str, Work], seconds: float) -> None:
        """Record the time of a step; once all widths are known, let members alone if that is as fast."""
        members = len(fused)
        self._widths.note(self._widths.next(members), members, seconds)
        if not self._widths.is_known(members):
            return
        rates = ", ".join(f"{width}: {rate:.0f}" for width, rate in self._widths.rates().items())
        print(f"steps/s of all members by the number of fused ones: {rates}", flush=True)
        if self._widths.best(members) == 1:
            self.refused.update(dict.fromkeys(list(fused)[1:], "fused members are no faster"))

    def _arrange(self, fused: Mapping[str, Work], width: int) -> None:
        """Form stacks of up to `width` slices, as equal as possible; a slice alone is in none."""
        slices = [work.network.slice for work in fused.values()]
        parts = parts_of(len(slices), (1,) * -(-len(slices) // width)) if slices else ()
        left = iter(slices)
        groups = [tuple(next(left) for _ in range(part)) for part in parts if part > 1]
        if groups != [stack.slices for stack in self._stacks]:
            self._dissolve()
            self._stacks = [Stack(group) for group in groups]

    def _dissolve(self) -> None:
        for stack in self._stacks:
            stack.dissolve()
        self._stacks = []

    def _computed(self, fused: Mapping[str, Work]) -> dict[str, Any]:
        """Return the results of works of stacked slices, as far as they can be computed together."""
        found: dict[str, Any] = {}
        by_form: dict[Any, dict[str, Work]] = defaultdict(dict)
        for name, work in fused.items():
            if stack := work.network.slice.stack:
                by_form[stack, work.form][name] = work
        for (stack, _), group in by_form.items():
            rows = [stack.slices.index(work.network.slice) for work in group.values()]
            works = list(group.values())
            try:
                given = works[0].network.tensors(works)
                results = stack.train(rows, *given) if len(given) > 1 else stack.outputs(rows, *given)
            except Exception as error:
                # No weight has changed yet: each goes on alone, where the error is its own if it comes again.
                self.refused.update(dict.fromkeys(group, _in_short(error)))
            else:
                found |= zip(group, results, strict=True)
        if self.refused.keys() & fused.keys():
            self._dissolve()
        return found


def different(like: Slice, work: Work) -> str | None:
    """Return why a network cannot be stacked with another, by one step of copies of both; None if it can."""
    own = work.network.slice
    if reason := own.unfit():
        return reason
    for what, program in own.program.items():
        if program != like.program[what]:
            return f"its {what} differ from those of the others"
    try:
        alone, stack = own.twin(), Stack([like.twin(), own.twin()])
        x, y = work.network.tensors([work, work])
        losses, gradients = stack.gradients((0, 1), *stack.all_rows(), x, y)
        x, y = (tree_map(lambda leaf: leaf[0], given) for given in (x, y))
        with alone.own_random():
            loss = alone.parts.loss(alone.parts.model.train()(x), y)
            expected = torch.cat(
                [g.reshape(-1) for g in torch.autograd.grad(loss, list(alone.trained.values()))]
            )
    except Exception as error:
        # Whatever vmap or a copy cannot do: alone, the member may well train.
        return _in_short(error)
    most = TOLERANCES.get(expected.dtype, 0.1)
    pairs = [(losses[1], loss.detach()), (gradients[1], expected)]
    pairs += [(stack.slices[1].constants[name], one) for name, one in alone.constants.items()]
    # NaN is no difference: a member that diverges does so alone, too.
    if any(
        (one - other).norm() > most * (other.norm() + most)
        for one, other in pairs
        if other.is_floating_point()
    ):
        return "its results would differ from those alone"
    return None


def _no_memory() -> str | None:
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return "the GPU's memory is used" if free < LEAST_FREE * total else None


def _alone(work: Work) -> Any:
    """Return the result, or the error, of a member's work for itself."""
    own = work.network.slice
    try:
        x, *y = (tree_map(lambda leaf: leaf[0], given) for given in work.network.tensors([work]))
        if y:
            return own.step(x, *y)
        with torch.no_grad(), own.own_random():
            return own.parts.model.eval()(x)
    except Exception as error:
        return error


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _time(timed: bool) -> float:
    """Return the time once the GPU has done its work, if it counts."""
    if timed and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
