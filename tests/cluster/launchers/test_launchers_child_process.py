from __future__ import annotations

import pytest

from hetctl.cluster.launchers import LAUNCHERS, ResourceSet
from hetctl.model.errors import InfeasibleError
from hetctl.model.site import Queue, Site

SLOTS = Site("local", "local", "local", 1, 2, 4, 4 * 2**30, (Queue("main"),), device="slot")
GPUS = Site("local", "local", "local", 1, 4, 8, 4 * 2**30, (Queue("main"),))


def test_the_agent_is_a_process_of_this_machine() -> None:
    found = LAUNCHERS["local"].agents(SLOTS, "agents", [ResourceSet("localhost", (1,))], ("python",))
    assert found.argv == ("python",)
    assert found.environment == {"PYTHONUNBUFFERED": "1", "HETCTL_NODE": "localhost"}


@pytest.mark.parametrize(
    ("given", "seen"), [("", "1,3"), ("4,5,6,7", "5,7"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-b,GPU-d")]
)
def test_an_agent_sees_the_gpus_of_its_set_alone(monkeypatch, given: str, seen: str) -> None:
    sets = [ResourceSet("localhost", (1, 3))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    found = LAUNCHERS["local"].agents(GPUS, "r/m", sets, ("python",))
    assert (found.name, found.environment["CUDA_VISIBLE_DEVICES"]) == ("r/m", seen)
    assert "CUDA_VISIBLE_DEVICES" not in LAUNCHERS["local"].agents(SLOTS, "r/m", sets, ()).environment


def test_gpus_that_the_users_own_variable_hides_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    agents = LAUNCHERS["local"].agents
    assert (
        agents(GPUS, "r/m", [ResourceSet("localhost", (0, 1))], ()).environment["CUDA_VISIBLE_DEVICES"]
        == "2,3"
    )
    with pytest.raises(InfeasibleError, match="CUDA_VISIBLE_DEVICES=2,3 leaves 2 of 4 GPUs"):
        agents(GPUS, "r/m", [ResourceSet("localhost", (1, 2))], ())


def test_a_second_node_is_refused() -> None:
    sets = [ResourceSet("a", (0,)), ResourceSet("b", (0,))]
    with pytest.raises(InfeasibleError, match="2 nodes"):
        LAUNCHERS["local"].agents(SLOTS, "agents", sets, ("python",))
