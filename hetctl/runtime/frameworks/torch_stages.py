"""Stages of a pipeline in PyTorch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from hetctl.model.errors import BadInputError
from hetctl.model.values import dataclass
from hetctl.runtime.frameworks.packed_state import other_variables, within
from hetctl.runtime.frameworks.stage_network import (
    LAYER,
    ComputeTime,
    PassedTensor,
    RecomputedPass,
    StageNetwork,
    Tensor,
)
from hetctl.runtime.frameworks.torch_batches import adapt_norms, array_of, tensor_of
from hetctl.runtime.frameworks.torch_measuring import ComputeClock
from hetctl.runtime.frameworks.torch_parts import (
    Parts,
    TorchRate,
    generators,
    pack,
    set_generators,
    unpack,
    without_functions,
)

OPTIMIZER = "optimizer/"
OF_PARAMETERS = {"params", "param_names"}
"""Keys of a group of an optimizer that name its parameters."""


class StageModule(nn.Module):  # type: ignore[misc]
    """Layers, followed by the loss in the last stage."""

    def __init__(self, layers: nn.Sequential, loss: Any) -> None:
        super().__init__()
        self.layers = layers
        self.loss = loss

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        """Return the activations, or with targets the mean loss."""
        outputs = self.layers(inputs)
        return outputs if targets is None else self.loss(outputs, targets)


class WeightVersion(dict[str, torch.Tensor]):
    """Trainable weights, by their names in the stage; a plain dict cannot be referred to weakly."""


@dataclass
class InputGradient:
    """Gradient of a minibatch's inputs; until the backward pass it has only their shape."""

    gradient: torch.Tensor


class Entering(torch.autograd.Function):  # type: ignore[misc]
    """Copy the inputs of a stage, and keep their gradient.

    As a leaf of the graph, the input itself would be held until the backward pass, beside its copy.
    """

    @staticmethod
    def forward(ctx: Any, _root: torch.Tensor, inputs: torch.Tensor, received: InputGradient) -> torch.Tensor:
        """Return a copy; gradients reach it because the root requires one."""
        ctx.received = received
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        """Keep the gradient."""
        ctx.received.gradient = gradient
        return None, None, None


@dataclass(frozen=True)
class ForwardPass:
    """A minibatch before its backward pass; the version is in use until then."""

    version: WeightVersion
    inputs: InputGradient
    weights: dict[str, torch.Tensor]
    outputs: torch.Tensor


class TorchStage(StageNetwork):
    """Consecutive layers of a sequential module, with their optimizer.

    Parameters
    ----------
    names : sequence of str
        Names of all layers of the chain.
    parts : Parts
        The layers as a sequential module, the optimizer of their parameters alone, and the loss.
    recomputes : bool
        As in `Chain.build`.
    """

    _rate: TorchRate

    def __init__(
        self,
        layers: range,
        names: Sequence[str],
        parts: Parts,
        device: torch.device,
        *,
        recomputes: bool = False,
    ) -> None:
        self.layers = layers
        self._names = names
        self._parts = parts
        self._device = device
        self._recomputes = recomputes
        self._module = StageModule(parts.model, parts.loss if layers.stop == len(names) else None)
        adapt_norms(parts.model)
        self._rate = TorchRate(parts)
        named = self._module.named_parameters()
        self._trainable = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._present: weakref.ref[WeightVersion] | None = None
        self._passes: dict[int, ForwardPass | RecomputedPass] = {}
        self._gradients: dict[int, dict[str, torch.Tensor | None]] = {}
        self.weight_names = tuple(self._saved_name(*name.split(".", 1)) for name in self._trainable)
        self.statistic_names = tuple(self._saved_name("layers", path) for path in self._buffers())
        self._sent = self.weights()
        self._scores = {**parts.metrics, "loss": parts.loss}
        # The last sum is the number of samples.
        self._sums = torch.zeros(len(self._scores) + 1, dtype=torch.float64)
        self._clock: ComputeClock | None = None

    def version(self) -> WeightVersion:
        """Return the present weights, copied only if an update comes while they are in use."""
        present = self._present() if self._present else None
        if present is None:
            # detach() would share the count of changes that autograd checks.
            present = WeightVersion((name, parameter.data) for name, parameter in self._trainable.items())
            self._present = weakref.ref(present)
        return present

    def forward(self, minibatch: int, version: WeightVersion, inputs: PassedTensor) -> PassedTensor:
        """Return the activations after the last layer.

        Raises
        ------
        BadInputError
            If the last layer returns anything but one tensor.
        """
        if self._recomputes:
            # Inputs that came through the node's memory wait there, not on the GPU.
            kept = inputs.copy() if isinstance(inputs, np.ndarray) else inputs.clone()
            buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
            self._passes[minibatch] = RecomputedPass(version, kept, (buffers, generators()))
            with torch.no_grad():
                outputs = self._run(version, kept).outputs
        else:
            self._passes[minibatch] = begun = self._run(version, inputs)
            outputs = begun.outputs
        if not isinstance(outputs, torch.Tensor):
            raise BadInputError(
                f"layer {self._names[self.layers[-1]]} returns {type(outputs).__name__}: "
                "only one tensor can pass from a stage to the next",
                "put it and the next layer into one nn.Module of your own",
            )
        return self._passing(outputs)

    def backward(self, minibatch: int, gradient: PassedTensor) -> PassedTensor | None:
        """Compute the gradients with the weights of the forward pass."""
        begun = self._passes.pop(minibatch)
        if isinstance(begun, RecomputedPass):
            begun = self._computed_again(begun)
        # First layers without weights have nothing to compute.
        if begun.outputs.requires_grad:
            passed = _own(gradient, self._passed(gradient))
            with self._computing():
                begun.outputs.backward(passed.to(begun.outputs.dtype))
        return self._end(minibatch, begun)

    def forward_backward(
        self, minibatch: int, version: WeightVersion, inputs: PassedTensor, targets: Tensor
    ) -> tuple[float, PassedTensor | None]:
        """Return the loss and the gradient of the inputs."""
        begun = self._run(version, inputs, self._tensor(targets))
        with self._computing():
            begun.outputs.backward()
        return begun.outputs.item(), self._end(minibatch, begun)

    def update(self, minibatch: int) -> None:
        """Take one step of the optimizer from the present weights."""
        gradients = self._gradients.pop(minibatch)
        self._part_from_version()
        for name, parameter in self._trainable.items():
            parameter.grad = gradients[name]
        with self._computing():
            self._parts.optimizer.step()
        self._parts.optimizer.zero_grad()

    def slot_bytes(self) -> int:
        """Return the bytes of all tensors in the optimizer's state."""
        states = self._parts.optimizer.state.values()
        slots = (slot for state in states for slot in state.values() if isinstance(slot, torch.Tensor))
        return sum(slot.numel() * slot.element_size() for slot in slots)

    def statistics(self) -> list[Tensor]:
        """Return copies of the floating-point buffers."""
        return [array_of(buffer.to("cpu", copy=True)) for buffer in self._buffers().values()]

    def set_statistics(self, statistics: Sequence[Tensor]) -> None:
        """Replace the floating-point buffers."""
        for (path, buffer), values in zip(self._buffers().items(), statistics, strict=True):
            place, _, name = path.rpartition(".")
            # Another tensor: graphs of minibatches between their passes may hold the old one.
            self._parts.model.get_submodule(place)._buffers[name] = torch.tensor(values).to(buffer)

    def infer(self, inputs: PassedTensor) -> PassedTensor:
        """Return the activations in evaluation mode."""
        return self._passing(self._evaluated(inputs))

    def score(self, inputs: PassedTensor, targets: Tensor) -> None:
        """Add the scores of a batch, which are means over it."""
        outputs, y = self._evaluated(inputs), self._tensor(targets)
        with torch.no_grad():
            means = [*(float(score(outputs, y)) for score in self._scores.values()), 1.0]
        self._sums += len(y) * torch.tensor(means, dtype=torch.float64)

    def scores(self) -> tuple[dict[str, float], int]:
        """Return the means over all samples."""
        *totals, count = self._sums.tolist()
        self._sums.zero_()
        names = (f"val_{name}" for name in self._scores)
        return {name: total / max(count, 1) for name, total in zip(names, totals, strict=True)}, int(count)

    def computed(self) -> ComputeTime | None:
        """Return the compute time by events in the GPU's queue; None for a slot."""
        if self._device.type != "cuda":
            return None
        self._clock = self._clock or ComputeClock()
        return self._clock.taken()

    def end_epoch(self) -> None:
        """Advance the scheduler."""
        if self._parts.scheduler is not None:
            self._parts.scheduler.step()

    def save(self) -> dict[str, Tensor]:
        """Return all state; the states of the generators belong to the first layer."""
        saved = {OPTIMIZER + name: array for name, array in pack(self._common_state()).items()}
        for layer in self.layers:
            state = self._layer_state(layer)
            if layer == self.layers.start:
                state["generators"] = generators()
            saved |= {f"{LAYER.format(layer)}{name}": array for name, array in pack(state).items()}
        return saved

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Restore the state of its layers; the generators only if a saved stage began with the same layer."""
        try:
            states = {layer: unpack(within(arrays, LAYER.format(layer))) for layer in self.layers}
            self._part_from_version()
            for layer, state in states.items():
                for name, holder in self._holders(layer).items():
                    holder.load_state_dict(state[name])
            self._restore_optimizer(unpack(within(arrays, OPTIMIZER)), states)
        except (KeyError, RuntimeError, ValueError) as error:
            raise other_variables(error) from error
        if random_states := states[self.layers.start].get("generators"):
            set_generators(random_states)
        self._sent = self.weights()

    def _computed_again(self, kept: RecomputedPass) -> ForwardPass:
        buffers, random_states = kept.state
        present = generators()
        set_generators(random_states)
        # This pass must not change buffers again, and needs those of the first pass.
        begun = self._run(kept.version, kept.inputs, buffers=buffers)
        set_generators(present)
        return begun

    def _run(
        self,
        version: WeightVersion,
        inputs: PassedTensor,
        *targets: torch.Tensor,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> ForwardPass:
        self._parts.model.train()
        given = self._inputs(inputs)
        with self._computing():
            # One zero, repeated without memory, until there is a gradient.
            received = InputGradient(given.new_zeros(()).expand(given.shape))
            weights = {name: tensor.detach().requires_grad_() for name, tensor in version.items()}
            # A copy: a first layer that works in place must not change a tensor that gets a gradient, and the
            # memory of the inputs may be overwritten before the backward pass.
            if self.layers.start > 0 and given.is_floating_point():
                root = torch.zeros((), device=self._device, requires_grad=True)
                entering = Entering.apply(root, given, received)
            else:
                entering = given.clone()
            outputs = functional_call(self._module, {**weights, **(buffers or {})}, (entering, *targets))
        return ForwardPass(version, received, weights, outputs)

    def _end(self, minibatch: int, begun: ForwardPass) -> PassedTensor | None:
        """Keep the gradients of the weights; return the gradient of the inputs."""
        self._gradients[minibatch] = {name: weight.grad for name, weight in begun.weights.items()}
        if self.layers.start == 0:
            return None
        return self._passing(begun.inputs.gradient)

    def _part_from_version(self) -> None:
        """Leave the memory of the present weights to a version in use, if there is one."""
        if self._present and self._present():
            for parameter in self._trainable.values():
                parameter.data = parameter.data.clone()
        self._present = None

    def _copies(self) -> Iterator[Tensor]:
        return (array_of(each.detach().to("cpu", copy=True)) for each in self._trainable.values())

    def _set_weight(self, at: int, values: Tensor) -> None:
        parameter = list(self._trainable.values())[at]
        # New memory, since versions may use the old weights.
        parameter.data = torch.empty_like(parameter).copy_(torch.as_tensor(values))
        self._present = None

    def _inputs(self, values: PassedTensor) -> torch.Tensor:
        if self.layers.start > 0:
            return self._passed(values)
        return self._tensor(values)

    def _passed(self, values: PassedTensor) -> torch.Tensor:
        """Return activations or gradients of another stage, with their type."""
        if isinstance(values, np.ndarray):
            return torch.as_tensor(np.require(values, requirements="W")).to(self._device)
        return values

    def _passing(self, tensor: torch.Tensor) -> PassedTensor:
        """Return a tensor for another stage: on a GPU the tensor itself, once it is computed."""
        if self._device.type != "cuda":
            return array_of(tensor)
        torch.cuda.current_stream(self._device).synchronize()
        computed: PassedTensor = tensor.detach()
        return computed

    def _tensor(self, values: Tensor) -> torch.Tensor:
        # PyTorch warns of read-only memory, such as a message's.
        return tensor_of(np.require(values, requirements="W"), self._device)

    def _evaluated(self, inputs: PassedTensor) -> torch.Tensor:
        self._parts.model.eval()
        given = _own(inputs, self._inputs(inputs))
        with torch.no_grad(), self._computing():
            outputs: torch.Tensor = self._parts.model(given)
        return outputs

    def _computing(self) -> AbstractContextManager[None]:
        """Time the computation, if somebody asked for it."""
        return self._clock.running() if self._clock else nullcontext()

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the floating-point buffers of the layers by path."""
        buffers = self._parts.model.named_buffers()
        return {path: buffer for path, buffer in buffers if buffer.is_floating_point()}

    def _saved_name(self, holder: str, path: str) -> str:
        """Return the name in `save` of a tensor in the stage's module."""
        if holder == "loss":
            return f"layer-{self.layers[-1]}/loss/{path}"
        number, _, name = path.partition(".")
        return f"layer-{self.layers.start + int(number)}/model/{name}"

    def _holders(self, layer: int) -> dict[str, nn.Module]:
        """Return the modules of a layer by name: the loss belongs to the last one."""
        holders = {"model": self._parts.model[layer - self.layers.start]}
        has_loss = layer == len(self._names) - 1 and isinstance(self._parts.loss, nn.Module)
        return {**holders, "loss": self._parts.loss} if has_loss else holders

    def _parameters(self, layer: int) -> dict[str, nn.Parameter]:
        return {
            f"{holder}.{name}": parameter
            for holder, module in self._holders(layer).items()
            for name, parameter in module.named_parameters()
        }

    def _layer_state(self, layer: int) -> dict[str, Any]:
        states = {name: holder.state_dict() for name, holder in self._holders(layer).items()}
        slots = self._parts.optimizer.state
        named = self._parameters(layer).items()
        return {**states, "slots": {name: dict(slots[one]) for name, one in named if one in slots}}

    def _common_state(self) -> dict[str, Any]:
        """Return the state that is equal in all stages."""
        scheduler = self._parts.scheduler
        groups = self._parts.optimizer.param_groups
        return {
            "groups": [{key: group[key] for key in group if key not in OF_PARAMETERS} for group in groups],
            "scheduler": without_functions(scheduler.state_dict()) if scheduler else None,
            "learning_rate_factor": self._rate.factor,
        }

    def _restore_optimizer(self, common: dict[str, Any], states: Mapping[int, dict[str, Any]]) -> None:
        state = self._parts.optimizer.state_dict()
        numbers = {
            id(parameter): number
            for group, numbered in zip(self._parts.optimizer.param_groups, state["param_groups"], strict=True)
            for parameter, number in zip(group["params"], numbered["params"], strict=True)
        }
        slots = {
            numbers[id(self._parameters(layer)[name])]: values
            for layer in self.layers
            for name, values in states[layer]["slots"].items()
        }
        groups = zip(state["param_groups"], common["groups"], strict=True)
        self._parts.optimizer.load_state_dict(
            {"state": slots, "param_groups": [{**present, **saved} for present, saved in groups]}
        )
        if self._parts.scheduler is not None:
            self._parts.scheduler.load_state_dict(common["scheduler"])
        self._rate.factor = common["learning_rate_factor"]


def _own(received: PassedTensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a received tensor in this rank's memory: layers may read it often, or change it."""
    return tensor if isinstance(received, np.ndarray) else tensor.clone()
