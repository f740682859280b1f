"""Layers of a member, each built alone on one GPU and run with the outputs of the one before it.

This also measures networks that no GPU holds. HetPipe (section 7) profiles layers of whole networks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from hetctl.model.profile import LayerPoint, MeasuredLayer
from hetctl.model.serialization import encode
from hetctl.runtime.data.input_pipeline import Sharing, refuse_own_batches
from hetctl.runtime.data.loaders import Loader, Samples
from hetctl.runtime.data.named_arrays import refuse_named
from hetctl.runtime.frameworks.stage_network import Chain, ComputeTime, StageNetwork, Tensor, TensorMemory
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.hardware import MemoryGauge, hardware_here
from hetctl.runtime.worker.messages import Assignment
from hetctl.storage.profile_request import read_measurements

WARM_UPS = 2
LEAST_PASSES, MOST_PASSES = 5, 50
LEAST_S = 0.2
"""Seconds of a layer's timed passes, at most `MOST_PASSES` of them."""

Passes = tuple[ComputeTime, ComputeTime, ComputeTime]
"""Times of a layer's forward pass, its backward pass and its update."""


def measure_layers(assignment: Assignment, context: WorkerContext) -> None:
    """Measure all layers of a member; write the result to its event file.

    Raises
    ------
    BadInputError
        If the network is not a chain of layers.
    """
    measurements = read_measurements(Path(assignment.task.folder))
    member = measurements.ensemble.member(measurements.target(assignment.task.name).member)
    site = measurements.site
    # Before the loading of samples, which may take long.
    framework, chain = context.chain(measurements.ensemble.of(member))
    gauge = framework.memory_gauge(context.binding.device)
    context_bytes = gauge.context_bytes()
    sharing = Sharing(preprocessors=site.cores_per_gpu, timeouts=site.timeouts)
    with ExitStack() as stack:
        training = context.open_alone(measurements.ensemble.of(member), sharing, stack)
        batch, sample, samples = first_batch(training), training.sample, training.samples
    memory = framework.tensor_memory()
    layers = measured_layers(
        chain, memory, batch, sample, gauge, lambda: context.start_layer(member), context.heartbeat
    )
    result = LayerPoint(
        member=member.name,
        fingerprint=member.fingerprint,
        batch_size=member.batch_size,
        measured_at=time.time(),
        machine=hardware_here(assignment.task.gpu_type or site.gpu_type, framework.version()),
        samples_per_epoch=measurements.ensemble.samples_per_epoch or samples,
        context_bytes=context_bytes,
        layers=layers,
    )
    context.writer(assignment.task).write("layers", **encode(result))


def first_batch(loader: Loader) -> Samples:
    """Return a copy, since the loader reuses the memory, of the first batch of the first epoch."""
    refuse_own_batches(loader, "a chain of layers")
    batches = loader.batches(1, 0)
    (x, y), _ = next(batches)
    refuse_named(x, "a chain of layers")
    copies = np.array(x), np.array(y)
    batches.close()
    return copies


def measured_layers(
    chain: Chain,
    memory: TensorMemory,
    batch: Samples,
    sample: Samples,
    gauge: MemoryGauge,
    prepare: Callable[[], None],
    heartbeat: Callable[[], None],
) -> tuple[MeasuredLayer, ...]:
    """Return the measurements of all layers, in order.

    Parameters
    ----------
    batch : tuple of array
        Inputs and targets of a batch of the whole network.
    sample : tuple of array
        A batch with one sample.
    prepare : callable
        Function called before a layer is built: it releases the layer before, and seeds the generators.
    heartbeat : callable
        Function called between passes, as a heartbeat.
    """
    inputs, targets = batch
    last = len(chain.layers) - 1
    layers, times = [], []
    for number, name in enumerate(chain.layers):
        prepare()
        stage = chain.build(range(number, number + 1), sample)
        layer = _RunLayer(stage, memory, inputs, gauge, targets if number == last else None)
        found = _steady(layer.timed_passes, heartbeat)
        if not stage.computed():
            # In a stage, activations between layers stay on the GPU. Its own clock leaves copies out.
            (forward, backward, update), (there_s, back_s) = found, layer.copies()
            found = (
                forward._replace(compute_s=forward.compute_s - there_s),
                backward._replace(compute_s=backward.compute_s - back_s),
                update,
            )
        times.append(found)
        held, beyond = layer.memory()
        parameters = sum(array.nbytes for array in stage.weights())
        layers.append(
            MeasuredLayer(
                name=name,
                forward_s=0.0,
                backward_s=0.0,
                activation_bytes=layer.outputs.nbytes,
                parameter_bytes=parameters,
                # Inputs of later layers are outputs of the layers before, or were received.
                held_bytes=held + (inputs.nbytes if number == 0 else 0),
                # The layers of a stage hold all gradients at once, but share one workspace.
                workspace_bytes=max(0, beyond - parameters),
                optimizer_bytes=stage.slot_bytes(),
            )
        )
        inputs = layer.outputs
    return tuple(_with_times(layers, times))


def _with_times(layers: Sequence[MeasuredLayer], times: Sequence[Passes]) -> Iterator[MeasuredLayer]:
    forward, backward, updates = zip(*times, strict=True)
    # Optimizers without weights launch nothing.
    updates = tuple(
        update if layer.parameter_bytes else update._replace(launch_s=0.0)
        for layer, update in zip(layers, updates, strict=True)
    )
    seconds = zip(*map(_seconds_in_stage, (forward, backward, updates)), strict=True)
    for layer, (forward_s, backward_s, update_s) in zip(layers, seconds, strict=True):
        yield replace(layer, forward_s=forward_s, backward_s=backward_s + update_s)


def _seconds_in_stage(times: Sequence[ComputeTime]) -> list[float]:
    """Return each layer's seconds in a stage of several layers: of its kernels, or of their launches.

    A part of the launch time occurs once in a stage, whatever its layers: about the least launch time of any
    layer.
    """
    fixed_s = min((one.launch_s for one in times if one.launch_s), default=0.0)
    return [max(0.0, one.compute_s, one.launch_s - fixed_s) for one in times]


def _steady(passes: Callable[[], Passes], heartbeat: Callable[[], None]) -> Passes:
    """Return the median times after a warm-up."""
    for _ in range(WARM_UPS):
        passes()
        heartbeat()
    found: list[Passes] = []
    spent_s = 0.0
    while len(found) < LEAST_PASSES or (spent_s < LEAST_S and len(found) < MOST_PASSES):
        found.append(passes())
        spent_s += sum(time.compute_s for time in found[-1])
        heartbeat()
    forward, backward, update = (
        ComputeTime(*map(statistics.median, zip(*phase, strict=True))) for phase in zip(*found, strict=True)
    )
    return forward, backward, update


class _RunLayer:
    """A layer with its inputs; one with targets is the last, which runs both passes as one.

    Validation runs the forward pass of the last layer alone.
    """

    def __init__(
        self,
        stage: StageNetwork,
        memory: TensorMemory,
        inputs: Tensor,
        gauge: MemoryGauge,
        targets: Tensor | None,
    ) -> None:
        self._stage, self._memory, self._inputs, self._gauge = stage, memory, inputs, gauge
        self._targets, self._minibatches = targets, count()
        self._gradient, self._returns_gradient = None, True
        if targets is not None:
            self.outputs = memory.array(stage.infer(inputs))
            return
        minibatch = next(self._minibatches)
        self.outputs = memory.array(stage.forward(minibatch, stage.version(), inputs))
        self._gradient = np.full_like(self.outputs, 1 / max(1, self.outputs.size))
        self._returns_gradient = stage.backward(minibatch, self._gradient) is not None
        stage.update(minibatch)

    def timed_passes(self) -> Passes:
        """Run a minibatch forward and back with a version of the weights of its own; return the times."""
        minibatch = next(self._minibatches)
        forward = self._time_of(lambda: self._forward(minibatch))
        backward = self._time_of(lambda: self._backward(minibatch))
        if self._targets is not None:
            backward = ComputeTime(
                backward.compute_s - forward.compute_s, backward.launch_s - forward.launch_s
            )
        return forward, backward, self._time_of(lambda: self._update(minibatch))

    def copies(self) -> tuple[float, float]:
        """Return the seconds of copying in the forward pass and in the backward pass."""
        inputs_s, outputs_s = self._gauge.copy_s(self._inputs), self._gauge.copy_s(self.outputs)
        if self._targets is not None:
            # The joint passes copy inputs and return their gradient.
            return inputs_s + outputs_s, inputs_s - outputs_s
        return inputs_s + outputs_s, outputs_s + inputs_s * self._returns_gradient

    def memory(self) -> tuple[int, int]:
        """Return the bytes held between the passes, and the further bytes of passes and update."""
        minibatch, gauge = next(self._minibatches), self._gauge
        before = gauge.used()
        gauge.reset_peak()
        held = int(self.outputs.nbytes)
        if self._targets is None:
            held = gauge.kept_by(lambda: self._forward(minibatch), self._inputs)
        self._backward(minibatch)
        self._update(minibatch)
        # Further bytes are those neither there before, nor held, nor received.
        return held, max(0, gauge.peak() - before - held - gauge.received_bytes(self._inputs))

    def _forward(self, minibatch: int) -> Tensor:
        if self._targets is not None:
            outputs = self._stage.infer(self._inputs)
        else:
            outputs = self._stage.forward(minibatch, self._stage.version(), self._inputs)
        self._gauge.synchronize()
        return self._memory.array(outputs)

    def _backward(self, minibatch: int) -> None:
        """Run the backward pass; of the last layer, both."""
        if self._targets is not None:
            version = self._stage.version()
            self._stage.forward_backward(minibatch, version, self._inputs, self._targets)
        else:
            self._stage.backward(minibatch, self._gradient)
        self._gauge.synchronize()

    def _update(self, minibatch: int) -> None:
        self._stage.update(minibatch)
        self._gauge.synchronize()

    def _time_of(self, run: Callable[[], object]) -> ComputeTime:
        """Return a call's time on the GPU; on a slot, the elapsed time."""
        self._stage.computed()
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
        return self._stage.computed() or ComputeTime(seconds)
