"""Layers measured one after another: in NumPy with a gauge of known values, and in PyTorch on a rank."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from ranks import result_of
from tiny_networks import ENSEMBLES, MODULES, functions_of

from hetctl.model.ensemble import Ensemble, Member, StopRule
from hetctl.model.errors import BadInputError
from hetctl.model.profile import LayerPoint
from hetctl.model.serialization import decode
from hetctl.model.site import Queue, Site
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.frameworks.stage_network import ComputeTime, TensorMemory
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import RankInfo
from hetctl.runtime.worker.measuring.measure_layers import (
    LEAST_PASSES,
    LEAST_S,
    MOST_PASSES,
    WARM_UPS,
    measure_layers,
    measured_layers,
)
from hetctl.runtime.worker.messages import MEASURE_LAYERS, Assignment, TaskMessage
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.event_files import read_folder
from hetctl.storage.profile_request import LAYERS, Measurements, ProfileTarget, write_measurements

SITE = Site("here", "local", "local", 1, 1, 1, 2**30, (Queue("local"),), device="slot", gpu_type="test")
SLOW_S = 0.004
BATCH = np.ones((8, 4), np.float32), np.zeros(8, np.int64)


class Scaling:
    """A layer that multiplies by one weight, and takes `SLOW_S` backward."""

    def __init__(self, calls, clock=None):
        self.clock = clock
        self.weight = np.full(1, 2.0, np.float32)
        self.calls = calls
        self.open = {}

    def version(self):
        return self.weight.copy()

    def forward(self, minibatch, version, inputs):
        self.calls.append("forward")
        self.open[minibatch] = version, inputs
        return inputs * version

    def backward(self, minibatch, gradient):
        self.calls.append("backward")
        time.sleep(SLOW_S)
        version, inputs = self.open.pop(minibatch)
        self.gradient = float((gradient * inputs).sum())
        return gradient * version

    def forward_backward(self, _minibatch, version, inputs, targets):
        self.calls.append("forward_backward")
        assert len(targets) == len(inputs)
        time.sleep(SLOW_S)
        self.gradient = 1.0
        return 0.0, inputs * version

    def update(self, _minibatch):
        self.calls.append("update")
        self.weight -= 0.001 * self.gradient

    def infer(self, inputs):
        return inputs * self.weight

    def weights(self):
        return [self.weight.copy()]

    def slot_bytes(self):
        return 2 * self.weight.nbytes

    def computed(self):
        return self.clock and self.clock()


class ScalingChain:
    layers = ("first", "middle", "last")

    def __init__(self, clock=None):
        self.calls = {}
        self.stages = []
        self.clock = clock

    def build(self, layers, _sample):
        (number,) = layers
        self.stages.append(Scaling(self.calls.setdefault(number, []), self.clock))
        return self.stages[-1]


class Gauge:
    """A device on which every pass takes 1000 bytes, of which it keeps 600, and each copy 1 ms."""

    def used(self):
        return 5000

    def reset_peak(self):
        pass

    def peak(self):
        return 6000

    def received_bytes(self, inputs):
        return inputs.nbytes

    def kept_by(self, forward, _inputs):
        forward()
        return 600

    def synchronize(self):
        pass

    def copy_s(self, _array):
        return 0.001


def measured_chain(chain):
    prepared = []
    found = list(
        measured_layers(
            chain, TensorMemory(), BATCH, BATCH, Gauge(), lambda: prepared.append(1), lambda: None
        )
    )
    assert len(prepared) == len(chain.layers)
    return found


def test_each_layer_is_built_alone_and_fed_by_the_one_before():
    chain = ScalingChain()
    layers = measured_chain(chain)
    assert [layer.name for layer in layers] == ["first", "middle", "last"]
    assert len(chain.stages) == 3
    assert [layer.activation_bytes for layer in layers] == [128, 128, 128]
    assert [layer.parameter_bytes for layer in layers] == [4, 4, 4]


def test_the_last_layer_runs_both_passes_as_one():
    chain = ScalingChain()
    measured_chain(chain)
    assert set(chain.calls[0]) == set(chain.calls[1]) == {"forward", "backward", "update"}
    assert set(chain.calls[2]) == {"forward_backward", "update"}


def test_passes_are_repeated_until_their_time_is_known():
    chain = ScalingChain()
    measured_chain(chain)
    timed = chain.calls[1].count("backward") - WARM_UPS - 2  # once for the outputs, once for the memory
    assert LEAST_PASSES <= timed <= min(MOST_PASSES, LEAST_S / SLOW_S + 1)


def test_copies_of_activations_are_no_part_of_the_times():
    layers = measured_chain(ScalingChain())
    assert [layer.forward_s for layer in layers] == [0.0, 0.0, 0.0]
    assert all(layer.backward_s >= SLOW_S - 0.002 for layer in layers)


def test_times_are_those_of_the_gpu_where_it_tells_them():
    layers = measured_chain(ScalingChain(clock=lambda: ComputeTime(0.25)))
    assert [layer.forward_s for layer in layers] == [0.25, 0.25, 0.25]
    # The last layer's both passes as one take as long as its forward pass alone.
    assert [layer.backward_s for layer in layers] == [0.5, 0.5, 0.25]


def test_launches_count_where_they_take_longer_than_kernels():
    launches = {0: 0.5, 1: 0.2, 2: 0.3}
    chain = ScalingChain()
    chain.clock = lambda: ComputeTime(0.25, launches[len(chain.stages) - 1])
    layers = measured_chain(chain)
    # Less the 0.2 s that all have.
    assert [layer.forward_s for layer in layers] == pytest.approx([0.3, 0.25, 0.25])
    assert [layer.backward_s for layer in layers] == pytest.approx([0.6, 0.5, 0.25])


def test_memory_is_divided_into_held_and_workspace():
    first, middle, last = measured_chain(ScalingChain())
    assert (first.held_bytes, middle.held_bytes, last.held_bytes) == (600 + 128, 600, 128)
    # Inputs and outputs have 128 bytes, and the gradient of the weight has 4.
    assert (first.workspace_bytes, middle.workspace_bytes) == (1000 - 600 - 128 - 4,) * 2
    assert last.workspace_bytes == 1000 - 128 - 128 - 4
    assert [layer.optimizer_bytes for layer in (first, middle, last)] == [8, 8, 8]


def on_a_rank(folder, framework, config, functions):
    """Measure the layers of a small network; return the event of the result."""
    member = Member("m", config, 32, 5, StopRule(metric="val_accuracy", mode="max"))
    ensemble = Ensemble("tiny", framework, functions, (member,), str(ENSEMBLES))
    target = ProfileTarget("m", 1, LAYERS)
    for path in (folder, folder / "events", folder / "logs"):
        make_private_folder(path)
    write_measurements(folder, Measurements(ensemble, SITE, (target,), ()))
    task = TaskMessage(MEASURE_LAYERS, str(folder), target.source)
    with ExitStack() as keep:
        measure_layers(
            Assignment(task, RankInfo(0, 1), time.time()),
            WorkerContext(Binding("localhost", 0, None, (0,)), keep),
        )
    (event,) = read_folder(folder / "events")
    return event


def refusal_of(folder, config, functions):
    with pytest.raises(BadInputError) as refused:
        on_a_rank(folder, "pytorch", config, functions)
    return refused.value.message


def point_of(folder, framework):
    found = result_of(on_a_rank, folder, framework, {"units": 512}, functions_of(framework))
    assert (found.kind, found.source) == ("layers", "m@layers")
    return decode(LayerPoint, dict(found.data))


@pytest.mark.training
@pytest.mark.parametrize("framework", MODULES)
def test_a_network_is_measured_layer_by_layer(tmp_path, framework):
    point = point_of(tmp_path / "p", framework)
    assert (point.batch_size, point.samples_per_epoch, point.machine.gpu_type) == (32, 640, "test")
    assert point.context_bytes > 50_000_000
    assert sum(layer.parameter_bytes for layer in point.layers) == 4 * (512 * 65 + 10 * 513)
    assert point.layers[0].held_bytes == 2 * 32 * 64 * 4
    assert point.layers[-1].activation_bytes == 32 * 10 * 4
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in point.layers)


@pytest.mark.training
def test_pytorch_tells_what_each_layer_holds(tmp_path):
    point = point_of(tmp_path / "p", "pytorch")
    flatten, linear, relu, last = point.layers
    assert linear.parameter_bytes == 4 * 512 * 65
    assert (flatten.parameter_bytes, relu.parameter_bytes) == (0, 0)
    assert last.parameter_bytes == 4 * 10 * 513
    assert linear.activation_bytes == relu.activation_bytes == 32 * 512 * 4
    assert linear.held_bytes == relu.held_bytes == 32 * 512 * 4


@pytest.mark.training
def test_a_network_that_cannot_be_cut_is_refused_before_its_data(tmp_path):
    functions = replace(functions_of("pytorch"), input_fn="tiny_torch:no_input_fn")
    error = result_of(refusal_of, tmp_path / "p", {"uncut": True}, functions)
    assert error.endswith("Uncut as model instead of torch.nn.Sequential for m: it cannot be cut into stages")
