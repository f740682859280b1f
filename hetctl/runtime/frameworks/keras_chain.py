"""Chains in Keras: sequential and functional models, cut into stages that are built alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
from keras.src.models.functional import Functional

from hetctl.model.values import dataclass
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.frameworks.keras_model import compiled_model, deferred_values, give_values
from hetctl.runtime.frameworks.keras_stages import KerasStage
from hetctl.runtime.frameworks.stage_network import LAYER, Chain, Tensor


@dataclass(frozen=True)
class Segment:
    """Operations between two cuts, where a single tensor passes, and these two tensors."""

    operations: tuple[Any, ...]
    inputs: Any
    outputs: Any

    @property
    def name(self) -> str:
        """Name of its only operation, or names of the first and the last."""
        names = [operation.name for operation in self.operations]
        return " .. ".join(dict.fromkeys((names[0], names[-1])))


class KerasChain(Chain):
    """A sequential or functional model; models inside it are cut, too.

    ``model_fn`` is always called with the member's seed.
    """

    hint = "return a keras.Sequential, or a functional model with places where one tensor alone passes"

    def _names(self) -> Iterable[str]:
        with deferred_values():
            model = self._call()
            if problem := _problem(model):
                raise self._uncut(problem)
            if _is_unbuilt(model):
                return [layer.name for layer in _layers_of(model)]
            return [one.name for one in self._segments(model, model.inputs[0])]

    def build(self, layers: range, sample: Samples, *, recomputes: bool = False) -> KerasStage:
        """Call ``model_fn`` without values of weights, then compute the values of these layers alone."""
        with deferred_values() as deferred:
            model = self._call()
            like = sample[0] if _is_unbuilt(model) else model.inputs[0]
            segments = self._segments(model, like)
        if len(segments) != len(self.layers):
            raise self._uncut("layers that pass several tensors, and no keras.Input")
        own = segments[layers.start : layers.stop]
        stage = keras.Model(own[0].inputs, own[-1].outputs)
        give_values(stage.variables)
        of_layers = {id(one) for segment in segments for one in _variables(segment)}
        # Variables of the optimizer, of metrics, and of Keras' generator of seeds.
        give_values(variable for variable in deferred if id(variable) not in of_layers)
        of_own = [_variables(one) for one in own]
        return KerasStage(layers, self.layers, stage, of_own, model, self._member, recomputes=recomputes)

    def _call(self) -> Any:
        keras.utils.set_random_seed(self._member.seed)
        return compiled_model(self._functions.model_fn(dict(self._member.config)), self._member.name)

    def _segments(self, model: Any, like: Any) -> list[Segment]:
        """Return the layers of the chain.

        Parameters
        ----------
        like : KerasTensor or array
            Inputs: their shape without the first axis, and their type.
        """
        segments = _segments_of(model, like)
        self._refuse_shared((one.name, _variables(one)) for one in segments)
        return segments


def assign_layers(model: Any, arrays: Mapping[str, Tensor]) -> None:
    """Assign to the variables of a built model what a pipeline has saved layer by layer."""
    for layer, segment in enumerate(_segments_of(model, model.inputs[0])):
        for number, variable in enumerate(_variables(segment)):
            variable.assign(arrays[f"{LAYER.format(layer)}{number:04d}"])


def _segments_of(model: Any, like: Any) -> list[Segment]:
    inputs = keras.Input(like.shape[1:], dtype=keras.backend.standardize_dtype(like.dtype))
    return list(_cut(keras.Model(inputs, _unnested(model, inputs))))


def _problem(model: Any) -> str:
    """Return what of a model cannot be divided; empty if all can."""
    optimizer = model.optimizer
    if type(model) not in (keras.Sequential, Functional):
        return f"{type(model).__name__}, a model with methods of its own"
    if not _is_unbuilt(model) and (len(model.inputs), len(model.outputs)) != (1, 1):
        return f"a model with {len(model.inputs)} inputs and {len(model.outputs)} outputs"
    if optimizer.global_clipnorm is not None:
        return f"{type(optimizer).__name__} with global_clipnorm, a norm over the gradients of all layers"
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return f"{type(optimizer).__name__}, which scales the loss by the gradients of all layers"
    return ""


def _is_unbuilt(model: Any) -> bool:
    return isinstance(model, keras.Sequential) and not model.built


def _layers_of(model: Any) -> Iterator[Any]:
    for layer in model.layers:
        yield from _layers_of(layer) if type(layer) is keras.Sequential else (layer,)


def _unnested(model: Any, inputs: Any) -> Any:
    """Call the layers of a model, and of the models in it, one by one on a symbolic tensor."""
    if not isinstance(model, keras.Sequential):
        return keras.tree.flatten(model._run_through_graph(inputs, operation_fn=_unnested_call))[0]
    for layer in model.layers:
        inputs = _unnested_call(layer)(inputs)
    return inputs


def _unnested_call(operation: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        # Arguments such as training=False hold for all layers inside.
        is_set = any(value is not None for value in kwargs.values())
        return operation(*args, **kwargs) if is_set else _unnested(operation, args[0])

    kind = type(operation)
    is_nested = kind is keras.Sequential or (
        kind is Functional and (len(operation.inputs), len(operation.outputs)) == (1, 1)
    )
    return call if is_nested else operation


def _cut(flat: Any) -> Iterator[Segment]:
    """Yield the segments of a functional model, in order of computation."""
    depths = sorted(flat._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in flat._nodes_by_depth[depth] if not node.is_input]
    last_use = {id(tensor): i for i, node in enumerate(nodes) for tensor in node.input_tensors}
    last_use[id(flat.outputs[0])] = len(nodes)
    entered, pending, alive = flat.inputs[0], [], [flat.inputs[0]]
    for i, node in enumerate(nodes):
        pending.append(node.operation)
        alive = [tensor for tensor in (*alive, *node.outputs) if last_use.get(id(tensor), -1) > i]
        # A mask would go to later layers beside the tensor.
        if len(alive) == 1 and getattr(alive[0], "_keras_mask", None) is None:
            yield Segment(tuple(pending), entered, alive[0])
            entered, pending = alive[0], []


def _variables(segment: Segment) -> list[Any]:
    """Return the variables of the operations that are layers, each once, in order."""
    layers: Iterable[Any] = (one for one in segment.operations if isinstance(one, keras.Layer))
    return list({id(variable): variable for layer in layers for variable in layer.variables}.values())
