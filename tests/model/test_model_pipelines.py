"""Use of the GPUs and links of a pipeline, from the reports of its stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pipelined_run import STAGES

from hetctl.model.pipelines import PARAMETER_KINDS, LinkBytes, pipeline_use
from hetctl.runtime.stages.parameter_server import INIT, PUSH, WEIGHTS
from hetctl.runtime.stages.stage_worker import BACKWARD, FORWARD, INFER


def test_the_slowest_stage_has_the_longest_passes():
    use = pipeline_use(STAGES)
    assert (use.slowest, use.gpu_busy_fraction) == ("n1:1", 0.8)


def test_waits_are_those_of_first_stages_and_bubbles_of_all():
    use = pipeline_use(STAGES)
    assert use.wave_wait_fraction == pytest.approx((1 + 3) / 20)
    assert use.idle_fraction == pytest.approx((4 + 2 + 4 + 3) / 40)


def test_bytes_are_divided_by_link_and_content():
    use = pipeline_use(STAGES)
    assert use.within_node == LinkBytes(1000 + 10 + 900 + 1000 + 900, 5)
    assert use.between_nodes == LinkBytes(8, 70 + 30)


def test_stages_that_took_no_time_have_no_shares():
    idle = replace(STAGES[0], forward_s=0.0, backward_s=0.0, wave_wait_s=0.0, idle_s=0.0)
    use = pipeline_use([idle])
    assert (use.gpu_busy_fraction, use.wave_wait_fraction, use.idle_fraction) == (0, 0, 0)


def test_kinds_of_parameters_are_those_of_servers():
    assert {INIT, PUSH, WEIGHTS} == PARAMETER_KINDS
    assert not {FORWARD, BACKWARD, INFER} & PARAMETER_KINDS
