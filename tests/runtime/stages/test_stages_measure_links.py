"""Links between two ranks, within a node and between nodes."""

from __future__ import annotations

import pytest
from stage_ranks import layout_of, run_ranks

from hetctl.runtime.frameworks.stage_network import TensorMemory
from hetctl.runtime.stages.measure_links import SIZES, measured_points

COPY_S = 10.0


@pytest.mark.parametrize("nodes", [["a", "a"], ["a", "b"]], ids=["one node", "two nodes"])
def test_messages_of_all_sizes_are_timed_with_their_copies(nodes):
    def work(rank):
        beats = []
        points = {}
        for copy_s in (0.0, COPY_S):
            found = measured_points(
                rank.transport, TensorMemory(), lambda _array, s=copy_s: s, lambda: beats.append(1)
            )
            points[copy_s] = list(found)
        assert len(beats) == 2 * len(SIZES)
        return points, rank.transport.take_sent()

    (points, sent), _ = run_ranks(layout_of(1, 2, 2, in_flight=1), work, nodes)
    plain = points[0.0]
    assert [size for size, _ in plain] == list(SIZES)
    assert all(0 < seconds < COPY_S for _, seconds in plain)
    assert plain[-1][1] > plain[0][1]
    assert all(2 * COPY_S < seconds < 3 * COPY_S for _, seconds in points[COPY_S])
    # The way is that of activations.
    assert sent["within_node" if nodes == ["a", "a"] else "between_nodes"]["sent"] > 2 * sum(SIZES)
