"""GPU and cores of each rank on a node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetctl.runtime.agent.binding import Binding, binding_of
from hetctl.runtime.agent.messages import GpuFacts, NodeFacts, Welcome


def test_a_slot_has_cores_of_its_own_and_no_device():
    welcome = Welcome("n1", (0, 1), "slot", 2)
    cores = (4, 5, 6, 7)
    assert [binding_of(welcome, slot, NodeFacts("h", {}, cores)) for slot in (0, 1)] == [
        Binding("n1", 0, None, (4, 5)),
        Binding("n1", 1, None, (6, 7)),
    ]


def test_a_gpu_is_known_by_its_place_among_those_that_processes_see():
    welcome = Welcome("n1", (2, 5), "gpu", 1)
    assert [binding_of(welcome, gpu, NodeFacts("h", {}, tuple(range(8)))).device for gpu in (2, 5)] == [0, 1]


def test_more_slots_than_cores_go_round():
    welcome = Welcome("n1", tuple(range(5)), "slot", 1)
    assert [binding_of(welcome, slot, NodeFacts("h", {}, (8, 9))).cores for slot in range(5)] == [
        (8,),
        (9,),
        (8,),
        (9,),
        (8,),
    ]


def test_a_rank_has_cores_near_its_gpu_and_no_other_rank_has_them():
    near = (0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3), (4, 5, 6, 7)
    facts = NodeFacts("h", {}, tuple(range(8)), tuple(GpuFacts("u", "A100", cores) for cores in near))
    welcome = Welcome("n1", (0, 1, 2, 3), "gpu", 2)
    assert [binding_of(welcome, gpu, facts).cores for gpu in range(4)] == [(0, 1), (4, 5), (2, 3), (6, 7)]


def test_near_cores_that_the_job_has_not_got_are_no_use():
    facts = NodeFacts("h", {}, (0, 1), (GpuFacts("u", "A100", (8, 9)),))
    assert binding_of(Welcome("n1", (0,), "gpu", 1), 0, facts).cores == (0,)


@given(st.integers(1, 8), st.integers(1, 16))
def test_ranks_share_no_core_where_there_are_enough(gpus, cores_per_gpu):
    welcome = Welcome("n1", tuple(range(gpus)), "gpu", cores_per_gpu)
    cores = tuple(range(100, 100 + gpus * cores_per_gpu))
    shares = [binding_of(welcome, gpu, NodeFacts("h", {}, cores)).cores for gpu in range(gpus)]
    assert sorted(core for share in shares for core in share) == list(cores)
