"""A compiled Keras model on one rank; several ranks average gradients through Horovod."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hetctl.model.ensemble import Member
from hetctl.runtime.data.batches import Batches, pad
from hetctl.runtime.data.loaders import Samples
from hetctl.runtime.data.named_arrays import fields_of
from hetctl.runtime.frameworks import TrainableNetwork, packed_state
from hetctl.runtime.frameworks.keras_model import (
    KerasAccumulation,
    KerasRate,
    array_of,
    assign_all,
    compiled_step,
    first_samples,
    ignore_padding,
    with_gradients,
)
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import UserFunctions

CONTEXT = "context/"
"""Prefix of names in the state of a ``train_fn``."""
RATE_FACTOR = "learning_rate_factor"
SEED = "seed_generator_state"
"""Name of the variables of Keras' ``SeedGenerator``."""


def horovod() -> Any:
    """Import Horovod, which takes a second: only groups of several ranks need it."""
    import horovod.tensorflow as hvd

    return hvd


def _raw(variable: Any) -> Any:
    """Return the TensorFlow variable inside a Keras 3 variable; Horovod accepts no other."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank: mappings, lists and tuples of arrays and plain values."""
    # Horovod's own function pickles values: another process could make it run code.
    own = np.frombuffer(packed_state.to_bytes(value), np.uint8)
    lengths = horovod().allgather(tf.constant([len(own)], tf.int64), name="lengths").numpy()
    whole = horovod().allgather(tf.constant(own), name="values").numpy()
    return [packed_state.from_bytes(part.tobytes()) for part in np.split(whole, np.cumsum(lengths)[:-1])]


class KerasNetwork(TrainableNetwork):
    """A compiled Keras model on this rank."""

    timer: GraphStepTimer | None
    gather = staticmethod(gather)
    _rate: KerasRate

    def __init__(
        self, model: Any, member: Member, functions: UserFunctions, group: Group, metrics: Collection[str]
    ) -> None:
        self._names = metrics
        self._rate = KerasRate(model.optimizer)
        self._assigned: dict[int, float] = {}
        with tf.device("CPU:0"):
            self._rows = tf.Variable(member.batch_size, trainable=False, dtype=tf.int32)
        ignore_padding(model, self._rows)
        super().__init__(
            *(model, model.optimizer, member, functions, group),
            _default_train_fn(model, self._rows),
            "GPU:0" if tf.config.get_visible_devices("GPU") else "CPU:0",
            lambda arrays: tuple(map(fields_of, arrays)),
        )
        # Each step is traced once for batches of one size.
        self._test_step = compiled_step(self._tested)
        self.timer = GraphStepTimer() if group.size > 1 else None
        if group.size > 1:
            horovod().broadcast_variables([_raw(v) for v in self._variables().values()], root_rank=0)
        if member.micro_batch_size is not None:
            self._accumulation = KerasAccumulation(model, self._added_up)
        elif group.size > 1:
            self._average_gradients()

    def _synchronized(self, loss: float, batches: Batches) -> float:
        if self._group.size == 1:
            return loss
        hvd, share = horovod(), batches.share
        # Each rank's statistics, such as batch-normalisation means, weighted by its share of the samples as
        # gradients are.
        own = [_raw(v) for v in self._model.non_trainable_variables if "float" in str(v.dtype)]
        if own:
            weighted = [variable * tf.cast(share, variable.dtype) for variable in own]
            for variable, mean in zip(own, hvd.grouped_allreduce(weighted, op=hvd.Sum), strict=True):
                variable.assign(mean)
        return float(hvd.allreduce(tf.constant(loss * share, tf.float64), op=hvd.Sum))

    def evaluate(self, batches: Iterable[tuple[Samples, int]]) -> dict[str, float]:
        """Evaluate this rank's share, and sum the metrics' variables over the ranks."""
        self._model.reset_metrics()
        self._predictions.begin()
        tested = False
        for samples, count in batches:
            tested |= count > 0
            x, y = pad(samples, self._member.rows_evaluated)
            if count:
                outputs = self._test_step(_tensors_of(x), tf.convert_to_tensor(y), tf.constant(count))
                self._predictions.add(outputs, samples[1][:count])
            else:
                self._predictions.skip()
        if self._group.size > 1:
            if not tested:
                # The first step creates the metrics' variables; a rank without samples needs them, at zero.
                self._test_step(*map(_tensors_of, samples), tf.constant(1))
                self._model.reset_metrics()
            # They are sums: added, they are those of all samples.
            own = [_raw(variable) for variable in self._model.metrics_variables]
            for variable, total in zip(own, horovod().grouped_allreduce(own, op=horovod().Sum), strict=True):
                variable.assign(total)
        return self._with_whole(self._metrics())

    def _tested(self, x: Any, y: Any, count: Any) -> Any:
        """Run Keras' test step on the first samples of a batch; return their outputs, which it does not."""
        model, seen = self._model, []
        compute = model.compute_metrics

        def compute_metrics(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            seen.append(y_pred)
            return compute(x, y, y_pred, sample_weight)

        model.compute_metrics = compute_metrics
        try:
            model.test_step((_first(x, count), y[:count]))
        finally:
            del model.compute_metrics
        # A test step of the user's own may compute its metrics in another way.
        return seen[-1] if seen else model(_first(x, count), training=False)

    def arrays_of(self, outputs: Any) -> Any:
        """Return outputs as arrays."""
        return tf.nest.map_structure(np.asarray, outputs)

    def metric_sums(self) -> dict[str, npt.NDArray[Any]]:
        """Return the variables of the metrics, by position: they are sums, as in Keras' own metrics."""
        return {str(i): array_of(variable) for i, variable in enumerate(self._model.metrics_variables)}

    def metrics_of(self, sums: Mapping[str, npt.NDArray[Any]]) -> dict[str, float]:
        """Return the metrics of sums, which are assigned to the variables."""
        for i, variable in enumerate(self._model.metrics_variables):
            variable.assign(sums[str(i)])
        return self._metrics()

    def metric_names(self) -> Collection[str]:
        """Return the names of the compiled metrics; none if ``evaluate_fn`` adds some."""
        return () if self._evaluate_fn else [f"val_{name}" for name in self._names]

    def _metrics(self) -> dict[str, float]:
        return {f"val_{name}": float(each) for name, each in self._model.get_metrics_result().items()}

    def save(self) -> dict[str, npt.NDArray[Any]]:
        """Return every variable by its position, and the factor of a schedule, which is not a variable."""
        arrays = {name: array_of(variable) for name, variable in self._variables().items()}
        packed = {} if self._context is None else packed_state.pack(self._context.save())
        own = {f"{CONTEXT}{name}": array for name, array in packed.items()}
        return {**arrays, **own, RATE_FACTOR: np.array(self._rate.factor)}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Assign every variable.

        Raises
        ------
        BadInputError
            If the network that ``model_fn`` now builds has other variables.
        """
        arrays = dict(arrays)
        rate_factor = float(arrays.pop(RATE_FACTOR))
        packed = {n.removeprefix(CONTEXT): arrays.pop(n) for n in list(arrays) if n.startswith(CONTEXT)}
        assign_all(self._variables(), arrays)
        self._rate.restore(rate_factor)
        if packed and self._context is not None:
            self._context.restore(packed_state.unpack(packed))

    def generators(self) -> Any:
        """Return the states of the layers' generators, in the order of the variables."""
        return [array_of(variable).tolist() for variable in self._seeds()]

    def set_generators(self, states: Any) -> None:
        """Assign the states of the layers' generators."""
        for variable, state in zip(self._seeds(), states, strict=True):
            variable.assign(state)

    def _seeds(self) -> list[Any]:
        """Return the variables with the states of the layers' random generators."""
        return [variable for variable in self._model.variables if variable.name == SEED]

    def _variables(self) -> dict[str, Any]:
        return {**numbered("model", self._model), **numbered("optimizer", self._optimizer)}

    def _average_gradients(self) -> None:
        """Average in the optimizer's ``apply``, which both ``fit`` and custom loops use.

        Each rank's weight is its share of the samples (LB-BSP, Equation 7). Keras 3 never calls the method
        that Horovod's own DistributedOptimizer overrides.
        """
        # A variable, because a Python number would be a constant of the traced step.
        self._weight = tf.Variable(1.0 / self._group.size, trainable=False, dtype=tf.float64)
        apply = self._optimizer.apply

        def apply_averaged(gradients: Any, trainable_variables: Any = None) -> Any:
            gradients, trainable_variables = with_gradients(gradients, trainable_variables)
            # Horovod would gather the rows of sparse gradients, as of embeddings, instead of adding them.
            dense = [tf.convert_to_tensor(g) for g in gradients]
            # Horovod's prescale_factor must be equal on all ranks; shares of a last batch may differ.
            own = [gradient * tf.cast(self._weight, gradient.dtype) for gradient in dense]
            return apply(self._added_up(own), trainable_variables)

        self._optimizer.apply = apply_averaged

    def _added_up(self, gradients: list[Any]) -> list[Any]:
        """Return the sums of weighted gradients over the ranks; the rank's own part of a step ends here."""
        if self.timer is None:
            return gradients
        return list(horovod().grouped_allreduce(self.timer.end(gradients), op=horovod().Sum))

    def _on_batch(self, batches: Batches, samples: int) -> None:
        """Tell the compiled step each batch's number of samples, and the averaging their share."""
        super()._on_batch(batches, samples)
        values: list[tuple[Any, float]] = [(self._rows, samples)]
        if self._accumulation is not None:
            values.append((self._accumulation.weight, batches.weight))
            values.append((self._accumulation.ends_step, batches.ends_step))
        elif self._group.size > 1:
            values.append((self._weight, batches.weight))
        for variable, value in values:
            # Most stay as they are from batch to batch.
            if self._assigned.get(id(variable)) != value:
                variable.assign(value)
                self._assigned[id(variable)] = value


class GraphStepTimer:
    """Timer whose end is an operation of the step's graph, between the gradients and their average."""

    def __init__(self) -> None:
        self._step = 0
        self._began = math.inf
        with tf.device("CPU:0"):
            self._ended = tf.Variable(0.0, trainable=False, dtype=tf.float64)

    def begin(self, step: int) -> None:
        """Start the time of a step."""
        # The wall clock, as tf.timestamp(): a jump may disturb one step.
        self._step, self._began = step, time.time()

    def end(self, gradients: list[Any]) -> list[Any]:
        """Return the gradients, available only after the time is taken."""
        with tf.device("CPU:0"), tf.control_dependencies(self._computed(gradients)):
            ended = self._ended.assign(tf.timestamp())
        with tf.control_dependencies([ended]):
            return [tf.identity(gradient) for gradient in gradients]

    def taken(self) -> list[tuple[int, float]]:
        """Return the last step, once, if it has averaged gradients."""
        seconds = float(self._ended.numpy()) - self._began
        self._began = math.inf
        return [(self._step, seconds)] if seconds > 0 else []

    @staticmethod
    def _computed(gradients: list[Any]) -> list[Any]:
        """Return tensors that exist once all gradients are computed: on a GPU, operations return earlier."""
        if not tf.config.get_visible_devices("GPU"):
            return gradients
        # To copy one number of each to the node's memory, the GPU has to finish them.
        numbers = [tf.cast(tf.reshape(gradient, [-1])[:1], tf.float32) for gradient in gradients]
        with tf.device("CPU:0"):
            return [tf.identity(tf.concat(numbers, axis=0))]


def numbered(owner: str, holder: Any) -> dict[str, Any]:
    """Return the variables of a model or an optimizer by their names in a checkpoint."""
    return {f"{owner}/{index:04d}": variable for index, variable in enumerate(holder.variables)}


def make_variables(model: Any, x: Any, y: Any) -> Collection[str]:
    """Create all variables of a model, its optimizer, loss and metrics; return the names of the metrics.

    A compiled step that creates variables is traced twice.
    """
    inputs, targets = _tensors_of(x[:1]), tf.convert_to_tensor(y[:1])
    outputs = model(inputs, training=False)
    model.optimizer.build(model.trainable_variables)
    model.compute_loss(x=inputs, y=targets, y_pred=outputs)
    model.compute_metrics(inputs, targets, outputs)
    # Without any sample, a user's metric may divide by zero.
    names = [*model.get_metrics_result()]
    model.reset_metrics()
    return names


def _tensors_of(rows: Any) -> Any:
    """Return an array as a tensor; of records, their fields by name."""
    return tf.nest.map_structure(tf.convert_to_tensor, fields_of(rows))


def _first(values: Any, count: Any) -> Any:
    """Return the first rows of a tensor, or of each in a mapping."""
    return tf.nest.map_structure(lambda value: value[:count], values)


def _default_train_fn(model: Any, rows: Any) -> Callable[[Any, Any, Any, dict[str, Any]], float]:
    """Return plain training by the model's compiled loss; it returns the mean loss over samples.

    Batches are padded to one size, so that the step is traced once. The loss takes only the first `rows`
    rows, so the padding has no gradient, whatever the reduction.
    """

    @compiled_step
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.nest.map_structure(
                lambda output: first_samples(output, rows), model(x, training=True)
            )
            loss = model.compute_loss(x=_first(x, rows), y=y[:rows], y_pred=outputs)
            # Optimizers of mixed precision divide gradients by the scale.
            scaled = model.optimizer.scale_loss(loss)
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return loss

    def train_fn(data: Any, _model: Any, _optimizer: Any, _config: dict[str, Any]) -> float:
        losses, sizes = [], []
        for x, y, _ in data.padded():
            data.loss = step(tf.nest.map_structure(tf.convert_to_tensor, x), tf.convert_to_tensor(y))
            # A tensor: reading its value in each step would wait for the GPU.
            losses.append(data.loss)
            sizes.append(data.counted)
        return float(np.average(np.array(losses, dtype=float), weights=sizes)) if any(sizes) else 0.0

    return train_fn
