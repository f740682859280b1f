"""The layers of a member, each built alone on one GPU and run with the outputs of the one before it.

So that a network can be measured that no GPU holds (HetPipe, section 7, profiles layers on whole networks).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import numpy as np

from hetctl.model.profile import Hardware, LayerPoint, MeasuredLayer
from hetctl.model.serialization import encode
from hetctl.runtime.data.input_pipeline import Sharing, refuse_own_batches
from hetctl.runtime.data.loaders import Loader, Samples
from hetctl.runtime.data.named_arrays import refuse_named
from hetctl.runtime.frameworks.stage_network import Chain, StageNetwork, Tensor
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.hardware import gpu_and_driver
from hetctl.runtime.worker.measuring.layer_memory import MemoryGauge
from hetctl.runtime.worker.messages import Assignment
from hetctl.runtime.worker.reporting import writer_of
from hetctl.storage.profile_request import read_measurements

WARM_UPS = 2
LEAST_PASSES, MOST_PASSES = 5, 50
LEAST_S = 0.2
"""Seconds of timed passes of a layer, unless it has `MOST_PASSES` before."""

PassTimes = tuple[float, float]
"""Seconds forward and backward."""


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
    # Before the samples are loaded, which may take long.
    framework, chain = context.chain(measurements.ensemble.of(member), member)
    gauge = framework.memory_gauge(context.binding.device)
    context_bytes = gauge.context_bytes()
    sharing = Sharing(preprocessors=site.cores_per_gpu, timeouts=site.timeouts)
    with ExitStack() as stack:
        training = context.open_alone(measurements.ensemble.of(member), member, sharing, stack)
        batch, sample, samples = first_batch(training), training.sample, training.samples
    gpu_type, driver = gpu_and_driver()
    layers = tuple(
        measured_layers(chain, batch, sample, gauge, lambda: context.start_layer(member), context.heartbeat)
    )
    machine = Hardware(assignment.task.gpu_type or site.gpu_type or gpu_type, driver, framework.version())
    result = LayerPoint(
        member=member.name,
        fingerprint=member.fingerprint,
        batch_size=member.batch_size,
        measured_at=time.time(),
        machine=machine,
        samples_per_epoch=measurements.ensemble.samples_per_epoch or samples,
        context_bytes=context_bytes,
        layers=layers,
    )
    writer_of(assignment.task, context.send_written).write("layers", **encode(result))


def first_batch(loader: Loader) -> Samples:
    """Return a copy of the first batch of the first epoch: its memory is the loader's."""
    refuse_own_batches(loader, "a chain of layers")
    batches = loader.batches(1, 0)
    (x, y), _ = next(batches)
    refuse_named(x, "a chain of layers")
    copies = np.array(x), np.array(y)
    batches.close()
    return copies


def measured_layers(
    chain: Chain,
    batch: Samples,
    sample: Samples,
    gauge: MemoryGauge,
    prepare: Callable[[], None],
    heartbeat: Callable[[], None],
) -> Iterator[MeasuredLayer]:
    """Yield the measurements of all layers, in order.

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
    for number, name in enumerate(chain.layers):
        prepare()
        stage = chain.build(range(number, number + 1), sample)
        layer: _InnerLayer | _LastLayer = (
            _LastLayer(stage, inputs, targets, gauge) if number == last else _InnerLayer(stage, inputs, gauge)
        )
        (forward_s, backward_s), (there_s, back_s) = _steady(layer.timed_passes, heartbeat), layer.copies()
        held, beyond = layer.memory()
        parameters = _size_of(stage.weights())
        yield MeasuredLayer(
            name=name,
            # Within a stage of several layers, activations stay on the GPU.
            forward_s=max(0.0, forward_s - there_s),
            backward_s=max(0.0, backward_s - back_s),
            activation_bytes=layer.outputs.nbytes,
            parameter_bytes=parameters,
            # The inputs of other layers are the outputs of those before them, or were received.
            held_bytes=held + (inputs.nbytes if number == 0 else 0),
            # All layers of a stage have their gradients at once, but share one workspace.
            workspace_bytes=max(0, beyond - parameters),
            optimizer_bytes=stage.slot_bytes(),
        )
        inputs = layer.outputs


def _steady(passes: Callable[[], PassTimes], heartbeat: Callable[[], None]) -> PassTimes:
    """Return the median times after a warm-up."""
    for _ in range(WARM_UPS):
        passes()
        heartbeat()
    times: list[PassTimes] = []
    while len(times) < LEAST_PASSES or (sum(map(sum, times)) < LEAST_S and len(times) < MOST_PASSES):
        times.append(passes())
        heartbeat()
    forward, backward = zip(*times, strict=True)
    return statistics.median(forward), statistics.median(backward)


class _InnerLayer:
    """A layer that another one follows."""

    def __init__(self, stage: StageNetwork, inputs: Tensor, gauge: MemoryGauge) -> None:
        self._stage = stage
        self._inputs = inputs
        self._gauge = gauge
        self._minibatches = count()
        minibatch = next(self._minibatches)
        self.outputs = stage.forward(minibatch, stage.version(), inputs)
        self._gradient = np.full_like(self.outputs, 1 / max(1, self.outputs.size))
        self._returns_gradient = stage.backward(minibatch, self._gradient) is not None
        stage.update(minibatch)

    def timed_passes(self) -> PassTimes:
        """Run a minibatch forward and back, with its own version of the weights; return the times."""
        minibatch = next(self._minibatches)
        forward_s = _seconds_of(self._stage, lambda: self._forward(minibatch))
        return forward_s, _seconds_of(self._stage, lambda: self._finish(minibatch))

    def copies(self) -> PassTimes:
        """Return the part of both times in which activations and gradients are copied to the GPU or back."""
        if self._stage.computed_s() is not None:
            return 0.0, 0.0
        inputs_s, outputs_s = self._gauge.copy_s(self._inputs), self._gauge.copy_s(self.outputs)
        return inputs_s + outputs_s, outputs_s + inputs_s * self._returns_gradient

    def memory(self) -> tuple[int, int]:
        """Return the bytes held between the passes, and those that they and the update need beyond that."""
        minibatch = next(self._minibatches)
        before = self._gauge.used()
        self._gauge.reset_peak()
        held = self._gauge.kept_by(lambda: self._forward(minibatch), self._inputs)
        self._finish(minibatch)
        return held, _beyond(self._gauge, before, held, self._inputs)

    def _forward(self, minibatch: int) -> Tensor:
        outputs = self._stage.forward(minibatch, self._stage.version(), self._inputs)
        self._gauge.synchronize()
        return outputs

    def _finish(self, minibatch: int) -> None:
        self._stage.backward(minibatch, self._gradient)
        self._stage.update(minibatch)
        self._gauge.synchronize()


class _LastLayer:
    """The last layer, which runs both passes as one; validation has its forward pass alone."""

    def __init__(self, stage: StageNetwork, inputs: Tensor, targets: Tensor, gauge: MemoryGauge) -> None:
        self._stage = stage
        self._inputs, self._targets = inputs, targets
        self._gauge = gauge
        self._minibatches = count()
        self.outputs = stage.infer(inputs)

    def timed_passes(self) -> PassTimes:
        """Return the time of the forward pass alone, and of both passes without that."""
        forward_s = _seconds_of(self._stage, self._infer)
        return forward_s, _seconds_of(self._stage, self._both) - forward_s

    def copies(self) -> PassTimes:
        """Return the same as for an inner layer: both passes copy the inputs, and return their gradient."""
        if self._stage.computed_s() is not None:
            return 0.0, 0.0
        inputs_s, outputs_s = self._gauge.copy_s(self._inputs), self._gauge.copy_s(self.outputs)
        return inputs_s + outputs_s, inputs_s - outputs_s

    def memory(self) -> tuple[int, int]:
        """Return the bytes of the outputs, and all others that both passes need."""
        before = self._gauge.used()
        self._gauge.reset_peak()
        self._both()
        held = self.outputs.nbytes
        return held, _beyond(self._gauge, before, held, self._inputs)

    def _infer(self) -> None:
        self._stage.infer(self._inputs)
        self._gauge.synchronize()

    def _both(self) -> None:
        minibatch = next(self._minibatches)
        self._stage.both(minibatch, self._stage.version(), self._inputs, self._targets)
        self._stage.update(minibatch)
        self._gauge.synchronize()


def _seconds_of(stage: StageNetwork, run: Callable[[], object]) -> float:
    """Return the seconds for which a GPU computes in a call, or else those that the call takes."""
    stage.computed_s()
    began = time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    computed_s = stage.computed_s()
    return seconds if computed_s is None else computed_s


def _beyond(gauge: MemoryGauge, before: int, held: int, inputs: Tensor) -> int:
    """Return the peak of the passes beyond what was there before, is held, or was received."""
    return max(0, gauge.peak() - before - held - gauge.received_bytes(inputs))


def _size_of(arrays: Iterable[Tensor]) -> int:
    return sum(array.nbytes for array in arrays)
