"""Memory of nodes beside GPUs: what servers and stages hold stays within it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipeline_layouts import NODES, problem
from test_pipeline_transfers import BY_NODE, EQUAL

from hetctl.methods.pipeline.layouts import lay_out
from hetctl.methods.pipeline.stage_costs import Layer, LayerProfile
from hetctl.methods.pipeline.stages import (
    SLOTS,
    VirtualWorker,
    passing_bytes,
    server_copies,
    wave_bytes,
)
from hetctl.methods.pipeline.transfers import Waves, server_gpus
from hetctl.methods.pipeline.wsp import Bounds, WspClock
from hetctl.model.errors import InfeasibleError
from hetctl.model.pipelines import Stage
from hetctl.model.plan import LOCAL
from hetctl.runtime.stages.parameter_server import GlobalWeights

SIZES = [100, 10, 100, 10]


class Follower:
    """A virtual worker that starts and completes minibatches as WSP allows, and its server."""

    def __init__(self, number: int, bounds: Bounds, server: GlobalWeights) -> None:
        self.number, self.server = number, server
        self.clock = WspClock(bounds)

    def step(self) -> None:
        """Pull, or complete the oldest minibatch, or start one, if any of these is possible."""
        wanted = self.clock.waves_wanted
        if self.clock.must_pull and self.server.clock.now >= wanted:
            self.server.note_read(self.number, wanted)
            self.clock = self.clock.pull(wanted)
        while self.clock.may_start:
            self.clock = self.clock.start()
        if self.clock.completed < self.clock.started:
            before = self.clock.waves
            self.clock = self.clock.complete()
            if self.clock.waves > before:
                self.server.push(self.number, before, [np.ones(1)])


@settings(max_examples=60)
@given(st.data(), st.integers(2, 4), st.integers(1, 3), st.integers(0, 3))
def test_a_server_holds_no_more_versions_than_planned(data, workers, in_flight, distance):
    server = GlobalWeights([np.zeros(1)], workers)
    all_ = [Follower(number, Bounds(in_flight, distance), server) for number in range(workers)]
    order = data.draw(st.lists(st.integers(0, workers - 1), min_size=20, max_size=120))
    most = 0
    for number in order:
        all_[number].step()
        most = max(most, len(server._versions) + len(server._waves))
    assert most <= server_copies(workers, distance)


def test_the_bound_of_a_server_is_almost_reached():
    server = GlobalWeights([np.zeros(1)], 2)
    slow, fast = (Follower(number, Bounds(1, 2), server) for number in (0, 1))
    most = 0
    for _ in range(8):
        for _ in range(8):
            fast.step()
        slow.step()
        most = max(most, len(server._versions) + len(server._waves))
    assert server_copies(2, 2) - 1 <= most <= server_copies(2, 2)


def test_waves_and_servers_by_hand():
    # Each of two nodes has two stages of 110 bytes and D = 1: 3 x 110 for each, and the versions of the
    # layers that it serves, 3 + 1 x 2 of them. A rank that does not serve has slots for its largest layer.
    servers = server_gpus(EQUAL, SIZES, 2, LOCAL)
    assert servers == [(0, 0), (0, 0), (1, 0), (1, 0)]
    each = 2 * 3 * 110 + 5 * 110 + 2 * 2 * 100
    assert wave_bytes(EQUAL, SIZES, servers, 1) == {0: each, 1: each}
    apart = wave_bytes(BY_NODE, SIZES, server_gpus(BY_NODE, SIZES, 2, LOCAL), 0)
    assert apart == {0: 2 * 220 + 3 * 110, 1: 2 * 220 + 3 * 110}


def stage(first, last, node, gpu, recomputes=False):
    return Stage(first, last, node, gpu, "A", 1.0, 2.0, 0.0, 0, recomputes)


def network(inputs=7, activations=(40, 30, 20, 10)):
    """Layers of which the first keeps the inputs, too."""
    layers = [Layer(f"l{at}", {}, {}, size, 100) for at, size in enumerate(activations)]
    layers[0] = replace(layers[0], held_bytes=activations[0] + inputs)
    return LayerProfile(tuple(layers))


def test_minibatches_on_their_way_by_hand():
    stages = (stage(0, 0, 0, 0), stage(1, 2, 0, 1, recomputes=True), stage(3, 3, 1, 0))
    # Node 0 has 4 inputs, slots for the cut of 40 bytes within it, the 3 inputs of 40 bytes that its second
    # stage keeps, and at most 4 minibatches of 40 bytes on their way; node 1 4 of 20 bytes.
    assert passing_bytes(network(), VirtualWorker(stages, 4)) == {
        0: 4 * 7 + 2 * SLOTS * 40 + 3 * 40 + 4 * 40,
        1: 4 * 20,
    }


def test_files_that_say_nothing_of_inputs_have_none():
    first, *others = network().layers
    silent = LayerProfile((replace(first, held_bytes=None), *others))
    assert (network().input_bytes, silent.input_bytes) == (7, 0)
    assert passing_bytes(silent, VirtualWorker((stage(0, 3, 0, 0),), 4)) == {0: 0}


def test_one_virtual_worker_has_neither_waves_nor_servers():
    assert wave_bytes(EQUAL[:1], SIZES, [], 4) == {}
    layout = lay_out(problem("np"), NODES[:1]).layout
    assert layout.servers == ()
    # Two minibatches of 100 bytes at the cut, and the slots of two ranks.
    assert layout.node_bytes == (2 * 100 + 2 * SLOTS * 100,)


def test_a_plan_without_slack_is_taken_where_memory_is_short():
    own = problem("np", in_flight=None)
    most = lay_out(own, NODES).layout
    less = lay_out(replace(own, node_memory_bytes=max(most.node_bytes) - 1), NODES).layout
    assert max(less.node_bytes) < max(most.node_bytes)
    assert less.in_flight == most.in_flight - 1


def test_a_pipeline_that_no_node_has_room_for_is_refused():
    own = problem("ed", waves=Waves(3, LOCAL))
    needed = lay_out(own, NODES).layout.node_bytes
    assert len(needed) == len(NODES)
    assert lay_out(replace(own, node_memory_bytes=max(needed)), NODES).layout.node_bytes == needed
    with pytest.raises(InfeasibleError, match=f"up to {max(needed):,} bytes of .* node n") as raised:
        lay_out(replace(own, node_memory_bytes=max(needed) - 1), NODES)
    assert raised.value.hint == "lower --clock-distance, now 3, or form other virtual workers with --policy"
    without = replace(own, waves=Waves(0, LOCAL), node_memory_bytes=1)
    with pytest.raises(InfeasibleError) as raised:
        lay_out(without, NODES)
    assert raised.value.hint == "lower --in-flight, now 2, or form other virtual workers with --policy"
    with pytest.raises(InfeasibleError) as raised:
        lay_out(replace(without, in_flight=1), NODES)
    assert raised.value.hint == "use fewer GPUs, or form other virtual workers with --policy"
    with pytest.raises(InfeasibleError, match="minibatches on their way take up to 600 bytes"):
        lay_out(problem("np", node_memory_bytes=1), NODES[:1])
