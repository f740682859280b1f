from __future__ import annotations

import pytest

from hetctl.core.errors import InfeasibleError
from hetctl.core.site import Node, Queue, Site
from hetctl.launchers import LAUNCHERS

SLOTS = Site("local", "local", "local", 1, 2, 4, 4 * 2**30, (Queue("main"),), device="slot")
GPUS = Site("local", "local", "local", 1, 4, 8, 4 * 2**30, (Queue("main"),))


def test_the_agent_is_a_process_of_this_machine() -> None:
    found = LAUNCHERS["local"](SLOTS, [Node("localhost", (1,))], ("python",))
    assert found.argv == ("python",)
    assert found.environment == {"PYTHONUNBUFFERED": "1", "HETCTL_NODE": "localhost"}


def test_a_job_sees_its_own_gpus_alone() -> None:
    found = LAUNCHERS["local"](GPUS, [Node("localhost", (1, 3))], ("python",))
    assert found.environment["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_a_second_node_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="2 nodes"):
        LAUNCHERS["local"](SLOTS, [Node("a", (0,)), Node("b", (0,))], ("python",))
