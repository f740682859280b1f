"""GPU and cores of each rank on a node."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.runtime.agent.binding import THREAD_VARIABLES, Binding, binding_of
from hetctl.runtime.agent.messages import AgentAssignment, AgentFacts, GpuFacts


def assignment_of(node, gpus, device, cores_per_gpu):
    return AgentAssignment(node, gpus, device, cores_per_gpu, memory_per_gpu=2**30, silence_s=1.0)


def test_a_slot_has_cores_of_its_own_and_no_device():
    assignment = assignment_of("n1", (0, 1), "slot", 2)
    cores = (4, 5, 6, 7)
    assert [binding_of(assignment, slot, AgentFacts("s", "h", {}, cores)) for slot in (0, 1)] == [
        Binding("n1", 0, None, (4, 5), 2**30),
        Binding("n1", 1, None, (6, 7), 2**30),
    ]


def test_ranks_that_share_a_gpu_have_its_device_and_cores():
    assignment = replace(assignment_of("n1", (2, 3), "gpu", 2), gpus_of_node=4)
    facts = AgentFacts("s", "h", {}, (4, 5, 6, 7))
    assert [binding_of(assignment, rank, facts) for rank in (3, 7, 11)] == [
        Binding("n1", rank, 1, (6, 7), 2**30) for rank in (3, 7, 11)
    ]


def test_the_device_of_a_gpu_is_its_index_among_visible_ones():
    assignment = assignment_of("n1", (2, 5), "gpu", 1)
    assert [
        binding_of(assignment, gpu, AgentFacts("s", "h", {}, tuple(range(8)))).device for gpu in (2, 5)
    ] == [
        0,
        1,
    ]


def test_more_slots_than_cores_go_round():
    assignment = assignment_of("n1", tuple(range(5)), "slot", 1)
    assert [binding_of(assignment, slot, AgentFacts("s", "h", {}, (8, 9))).cores for slot in range(5)] == [
        (8,),
        (9,),
        (8,),
        (9,),
        (8,),
    ]


def test_each_rank_has_its_own_cores_near_its_gpu():
    near = (0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3), (4, 5, 6, 7)
    facts = AgentFacts("s", "h", {}, tuple(range(8)), tuple(GpuFacts("u", "A100", cores) for cores in near))
    assignment = assignment_of("n1", (0, 1, 2, 3), "gpu", 2)
    assert [binding_of(assignment, gpu, facts).cores for gpu in range(4)] == [(0, 1), (4, 5), (2, 3), (6, 7)]


def test_without_a_library_the_site_file_says_which_cores_are_near_a_gpu():
    """Frontier, whose GPU 0 is near the cores 49 to 55."""
    lists = ("49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47")
    allocatable = tuple(core for core in range(64) if core % 8)
    assignment = replace(assignment_of("n1", tuple(range(8)), "gpu", 7), gpu_cores=lists)
    facts = AgentFacts("s", "h", {}, allocatable)
    assert binding_of(assignment, 0, facts).cores == tuple(range(49, 56))
    assert {core for gpu in range(8) for core in binding_of(assignment, gpu, facts).cores} == {*allocatable}
    seen = replace(facts, gpus=tuple(GpuFacts("u", "MI250X", (8 * gpu + 1,)) for gpu in range(8)))
    assert binding_of(assignment, 0, seen).cores == (1,)


def test_near_cores_that_the_job_has_not_got_are_no_use():
    facts = AgentFacts("s", "h", {}, (0, 1), (GpuFacts("u", "A100", (8, 9)),))
    assert binding_of(assignment_of("n1", (0,), "gpu", 1), 0, facts).cores == (0,)


def test_an_agent_that_is_confined_shares_its_cores_out_in_order():
    """GPU numbers are those of the plan; they do not determine the cores of a member's own step."""
    assignment = assignment_of("n1", (0, 3, 5), "gpu", 2)
    cores = tuple(range(10, 16))
    bindings = [binding_of(assignment, gpu, AgentFacts("s", "h", {}, cores)) for gpu in (0, 3, 5)]
    assert [(each.device, each.cores) for each in bindings] == [(0, (10, 11)), (1, (12, 13)), (2, (14, 15))]


def test_cores_follow_gpu_numbers_if_the_agent_sees_all_cores():
    assignment = assignment_of("n1", (1, 3), "slot", 2)
    facts = AgentFacts("s", "h", {}, tuple(range(8)))
    assert [binding_of(assignment, slot, facts).cores for slot in (1, 3)] == [(2, 3), (6, 7)]


@given(st.integers(1, 8), st.integers(1, 16))
def test_ranks_share_no_core_where_there_are_enough(gpus, cores_per_gpu):
    assignment = assignment_of("n1", tuple(range(gpus)), "gpu", cores_per_gpu)
    cores = tuple(range(100, 100 + gpus * cores_per_gpu))
    shares = [binding_of(assignment, gpu, AgentFacts("s", "h", {}, cores)).cores for gpu in range(gpus)]
    assert sorted(core for share in shares for core in share) == list(cores)


WITHOUT_DRIVER = """
import os, sys
from threadpoolctl import threadpool_info
from hetctl.runtime.agent.__main__ import main
sys.argv = ["agent", "absent.json", "--step", "agents", "--threads", "1"]
try:
    main()
except FileNotFoundError:
    import hetctl.runtime.agent.agent_process
print([pool["num_threads"] for pool in threadpool_info()], len(os.listdir("/proc/self/task")))
"""
"""An agent up to where it needs its driver, and then the libraries that its ranks inherit."""


def test_libraries_of_ranks_have_threads_for_their_cores_alone():
    environment = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    command = [sys.executable, "-c", WITHOUT_DRIVER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[1]", "1"]


MIG = ("MIG-c1d3d074-7dc1-5e89-8a5f-6d0b08327092", "MIG-84e0b369-ad9b-5b6f-a11f-74e7d7de0637")


@pytest.mark.parametrize(
    "facts",
    [
        # As Slurm names them, and as NVML lists them.
        AgentFacts("s", "h", {}, (0, 1), devices={"CUDA_VISIBLE_DEVICES": ",".join(MIG)}),
        AgentFacts("s", "h", {}, (0, 1), tuple(GpuFacts(uuid, "A100 MIG 1g.5gb") for uuid in MIG)),
    ],
)
def test_a_rank_has_one_mig_device_and_sees_no_other(facts):
    assignment = replace(assignment_of("n1", (0, 1), "gpu", 1), gpus_of_node=2)
    found = [binding_of(assignment, rank, facts) for rank in (0, 1, 3)]
    assert [(one.device, one.mig_device) for one in found] == [(0, MIG[0]), (0, MIG[1]), (0, MIG[1])]
