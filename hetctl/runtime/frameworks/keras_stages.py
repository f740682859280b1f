"""Stages of a pipeline in Keras 3 on TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.model.values import dataclass
from hetctl.runtime.frameworks.keras_model import (
    KerasRate,
    array_of,
    assign_all,
    compiled_step,
    first_samples,
    ignore_padding,
    update_sequentially,
)
from hetctl.runtime.frameworks.stage_network import RecomputedPass, StageNetwork, Tensor

RATE_FACTOR = "optimizer/learning_rate_factor"


@dataclass(frozen=True)
class RecordedPass:
    """A minibatch before its backward pass, with the tape of the compiled forward pass."""

    tape: Any
    sources: list[Any]
    results: tuple[Any, Any]


class KerasStage(StageNetwork):
    """Consecutive layers of a model, with their optimizer.

    Parameters
    ----------
    names : sequence of str
        Names of all layers of the chain.
    model : keras.Model
        The layers.
    variables : sequence of list of keras.Variable
        Variables of each layer.
    whole : keras.Model
        Model that ``model_fn`` returned, with the optimizer and the arguments of its ``compile``.
    recomputes : bool
        As in `Chain.build`.
    """

    _rate: KerasRate

    def __init__(
        self,
        layers: range,
        names: Sequence[str],
        model: Any,
        variables: Sequence[list[Any]],
        whole: Any,
        member: Member,
        *,
        recomputes: bool = False,
    ) -> None:
        self.layers = layers
        self._recomputes = recomputes
        self._model = model
        self._variables = variables
        self._optimizer = whole.optimizer
        self._member = member
        self._rate = KerasRate(whole.optimizer)
        with tf.device("CPU:0"):
            self._rows = tf.Variable(member.batch_size, trainable=False, dtype=tf.int32)
        self._samples = member.batch_size
        ignore_padding(model, self._rows)
        self._slots = _build_optimizer(whole.optimizer, model.trainable_variables)
        update_sequentially(whole.optimizer)
        if layers.stop == len(names):
            chosen = ("loss", "loss_weights", "metrics", "weighted_metrics")
            options = {key: whole._compile_config.config[key] for key in chosen}
            model.compile(whole.optimizer, jit_compile=False, **options)
        self._forward = compiled_step(self._forward_step)
        self._forward_backward = compiled_step(self._forward_backward_step)
        self._infer = compiled_step(lambda x, count: model(x[:count], training=False))
        self._score = compiled_step(lambda x, y, count: model.test_step((x[:count], y[:count])))
        self._update = compiled_step(self._update_step)
        self._passes: dict[int, RecordedPass | RecomputedPass] = {}
        self._gradients: dict[int, list[Any]] = {}
        self._scored = 0
        places = {id(variable): place for place, variable in self._named().items()}
        self.weight_names = tuple(places[id(one)] for one in model.trainable_variables)
        self.statistic_names = tuple(places[id(one)] for one in self._statistics)
        self._sent = self.weights()

    def version(self) -> list[Any]:
        """Return the present weights; TensorFlow copies them if an update comes while they are in use."""
        return [tf.convert_to_tensor(variable) for variable in self._model.trainable_variables]

    def forward(self, minibatch: int, version: list[Any], inputs: Tensor) -> Tensor:
        """Return the activations after the last layer, without padding."""
        if self._recomputes:
            state = [tf.convert_to_tensor(variable) for variable in self._model.non_trainable_variables]
            self._passes[minibatch] = RecomputedPass(version, inputs.copy(), state)
            return array_of(self._forward(version, self._padded(inputs))[0])
        begun = self._recorded(version, inputs, self._forward)
        self._passes[minibatch] = begun
        return array_of(begun.results[0])

    def backward(self, minibatch: int, gradient: Tensor) -> Tensor | None:
        """Compute the gradients with the weights of the forward pass."""
        begun = self._passes.pop(minibatch)
        if isinstance(begun, RecomputedPass):
            begun = self._recorded(begun.version, begun.inputs, partial(self._forward, state=begun.state))
        outputs, losses = begun.results
        given = [tf.convert_to_tensor(gradient, outputs.dtype), tf.ones_like(losses)]
        gradients = begun.tape.gradient([outputs, losses], begun.sources, given)
        return self._end(minibatch, gradients, len(gradient))

    def forward_backward(
        self, minibatch: int, version: list[Any], inputs: Tensor, targets: Tensor
    ) -> tuple[float, Tensor | None]:
        """Return the loss and the gradient of the inputs."""
        loss, gradients = self._forward_backward(version, self._padded(inputs), self._padded(targets))
        return float(loss), self._end(minibatch, list(gradients), len(inputs))

    def update(self, minibatch: int) -> None:
        """Apply the optimizer to the present weights."""
        self._update(self._gradients.pop(minibatch))

    def slot_bytes(self) -> int:
        """Return the bytes of the optimizer's variables for single weights."""
        return sum(array_of(slot).nbytes for slots in self._slots.values() for slot in slots)

    def statistics(self) -> list[Tensor]:
        """Return copies of the floating-point variables that are not trained."""
        return [array_of(variable).copy() for variable in self._statistics]

    def set_statistics(self, statistics: Sequence[Tensor]) -> None:
        """Assign values to these variables."""
        for variable, values in zip(self._statistics, statistics, strict=True):
            variable.assign(values)

    def infer(self, inputs: Tensor) -> Tensor:
        """Return the activations in evaluation mode."""
        rows = self._member.rows_evaluated
        return array_of(self._infer(_repeated(inputs, rows), tf.constant(len(inputs))))

    def score(self, inputs: Tensor, targets: Tensor) -> None:
        """Update the metrics of ``model_fn``."""
        rows, count = self._member.rows_evaluated, len(inputs)
        self._scored += count
        self._score(_repeated(inputs, rows), _repeated(targets, rows), tf.constant(count))

    def scores(self) -> tuple[dict[str, float], int]:
        """Return the results of the metrics, and reset them."""
        count, self._scored = self._scored, 0
        found = {f"val_{name}": float(each) for name, each in self._model.get_metrics_result().items()}
        self._model.reset_metrics()
        return found, count

    def scale_learning_rate(self, factor: float) -> None:
        """Scale a constant rate or a schedule."""
        super().scale_learning_rate(factor)
        # A schedule is a part of the compiled step.
        self._update = compiled_step(self._update_step)

    def save(self) -> dict[str, Tensor]:
        """Return every variable by its position."""
        arrays = {name: array_of(variable).copy() for name, variable in self._named().items()}
        return {**arrays, RATE_FACTOR: np.array(self._rate.factor)}

    def restore(self, arrays: Mapping[str, Tensor]) -> None:
        """Assign every variable."""
        named = self._named()
        # Those of its layers, and of the optimizer as a whole.
        owners = {"optimizer", *(f"layer-{layer}" for layer in self.layers)}
        own = {name: arrays[name] for name in arrays if name in named or name.split("/")[0] in owners}
        own.pop(RATE_FACTOR)
        assign_all(named, own)
        self._rate.restore(float(arrays[RATE_FACTOR]))
        self._update = compiled_step(self._update_step)
        self._sent = self.weights()

    def _copies(self) -> Iterator[Tensor]:
        return (array_of(variable).copy() for variable in self._model.trainable_variables)

    def _set_weight(self, at: int, values: Tensor) -> None:
        self._model.trainable_variables[at].assign(values)

    def _named(self) -> dict[str, Any]:
        of_slots = {id(one) for slots in self._slots.values() for one in slots}
        common = [one for one in self._optimizer.variables if id(one) not in of_slots]
        named = {f"optimizer/{number:04d}": variable for number, variable in enumerate(common)}
        for layer, variables in zip(self.layers, self._variables, strict=True):
            for number, variable in enumerate(variables):
                place = f"layer-{layer}/{number:04d}"
                named[place] = variable
                for slot, value in enumerate(self._slots.get(id(variable), [])):
                    named[f"{place}/slot-{slot}"] = value
        return named

    @property
    def _statistics(self) -> list[Any]:
        return [one for one in self._model.non_trainable_variables if "float" in str(one.dtype)]

    def _padded(self, values: Tensor) -> Any:
        """Pad values to the rows of a full batch, and tell the compiled steps how many are samples."""
        if len(values) != self._samples:
            self._samples = len(values)
            self._rows.assign(self._samples)
        return _repeated(values, self._member.batch_size)

    def _recorded(
        self, version: list[Any], inputs: Tensor, forward: Callable[..., tuple[Any, Any]]
    ) -> RecordedPass:
        x = self._padded(inputs)
        sources = [*version, *([x] if self.layers.start > 0 else [])]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            results = forward(version, x)
        return RecordedPass(tape, sources, results)

    def _end(self, minibatch: int, gradients: list[Any], samples: int) -> Tensor | None:
        """Keep the gradients of the weights; return the gradient of the inputs, without padding."""
        weights = len(self._model.trainable_variables)
        self._gradients[minibatch] = gradients[:weights]
        return array_of(gradients[weights])[:samples] if gradients[weights:] else None

    def _called(self, version: list[Any], x: Any, loss_of: Any, state: Sequence[Any] = ()) -> Any:
        """Return ``loss_of(outputs)``, computed with the weights of a version.

        Without a given `state`, the pass uses and changes the model's statistics; with that of a first pass,
        it is repeated, and changes none.
        Losses of layers depend on weights, so `loss_of` runs inside the scope; the model's own
        ``stateless_call`` would leave it too early.
        """
        model = self._model
        mapping = [
            *zip(model.trainable_variables, version, strict=True),
            *zip(model.non_trainable_variables if state else (), state, strict=True),
        ]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            value = loss_of(first_samples(model(x, training=True), self._rows))
        if state:
            return value
        for variable in model.non_trainable_variables:
            changed = scope.get_current_value(variable)
            if changed is not None:
                variable.assign(changed)
        return value

    def _forward_step(self, version: list[Any], x: Any, state: Sequence[Any] = ()) -> Any:
        """Return the activations, and the sum of the losses that layers add, such as regularizers."""

        def with_losses(outputs: Any) -> tuple[Any, Any]:
            losses = [tf.cast(tf.reduce_sum(loss), outputs.dtype) for loss in self._model.losses]
            return outputs, tf.add_n(losses) if losses else tf.zeros((), outputs.dtype)

        return self._called(version, x, with_losses, state)

    def _forward_backward_step(self, version: list[Any], x: Any, y: Any) -> tuple[Any, list[Any]]:
        def loss_of(outputs: Any) -> Any:
            return self._model.compute_loss(x=x[: self._rows], y=y[: self._rows], y_pred=outputs)

        sources = [*version, *([x] if self.layers.start > 0 else [])]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            loss = self._called(version, x, loss_of)
        return loss, tape.gradient(loss, sources)

    def _update_step(self, gradients: list[Any]) -> None:
        variables = self._model.trainable_variables
        if variables:
            self._optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            self._optimizer.iterations.assign_add(1)


def _repeated(values: Tensor, rows: int) -> Any:
    """Repeat values to at least `rows` rows, in a tensor with its own memory."""
    return tf.convert_to_tensor(values[np.arange(max(rows, len(values))) % len(values)])


def _build_optimizer(optimizer: Any, variables: Sequence[Any]) -> dict[int, list[Any]]:
    """Build an optimizer; return the slots of each variable by its identity."""
    slots: dict[int, list[Any]] = {}
    add = optimizer.add_variable_from_reference

    def noted(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        slot = add(reference_variable, *args, **kwargs)
        slots.setdefault(id(reference_variable), []).append(slot)
        return slot

    optimizer.add_variable_from_reference = noted
    optimizer.build(variables)
    del optimizer.add_variable_from_reference
    of_slots = {id(one) for of_variable in slots.values() for one in of_variable}
    if any(id(one) not in of_slots and len(one.shape) for one in optimizer.variables):
        raise BadInputError(
            f"the optimizer {type(optimizer).__name__} has state that belongs to no one weight",
            "choose another optimizer for a network that is cut into stages",
        )
    return slots
