"""Reasons for the end of steps, from the output of real launchers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.events import CLEAN_EXITS, EXIT_CODES, MEMBER_FAULTS, ExitReason
from hetctl.runtime.driver.rank_group import exit_reason_of, failed_nodes, with_peak

CANCELLED = "slurmstepd: error: *** STEP 7.3 ON n1 CANCELLED AT 2026-01-02T03:04:05"
UNABLE = "srun: error: Unable to create step for job 7"
OUTPUTS = [
    (143, f"{CANCELLED} DUE TO TIME LIMIT ***", "time"),
    (137, f"{CANCELLED} DUE TO PREEMPTION ***", "preempted"),
    (143, f"{CANCELLED} DUE TO JOB REQUEUE ***", "cancelled"),
    (1, f"{UNABLE}: Job/step already completing or completed", "cancelled"),
    (1, "srun: error: Unable to confirm allocation for job 7: Invalid job id specified", "cancelled"),
    (1, "srun: error: Slurm job 1 has expired", "cancelled"),
    (1, "srun: error: Unable to confirm allocation for job 3: Job is pending execution", "cancelled"),
    (0, "srun: error: Node failure on n2", "node-failure"),
    (1, f"{UNABLE}: Requested node configuration is not available", "node-failure"),
    (137, f"{CANCELLED} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***", "cancelled"),
    (1, f"{UNABLE}: Required node not available (down, drained or reserved)", "node-failure"),
    (
        137,
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have been "
        "killed by the cgroup out-of-memory handler.",
        "out-of-memory",
    ),
    (
        1,
        "slurmstepd-n1: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM "
        "Killed.",
        "out-of-memory",
    ),
    (137, "srun: error: n1: task 0: Out Of Memory", "out-of-memory"),
    (
        1,
        "srun: error: Unable to confirm allocation for job 1: Unable to contact slurm controller (connect "
        "failure)\nsrun: Check SLURM_JOB_ID environment variable. Expired or invalid job 1",
        "not-launched",
    ),
    (
        143,
        "2.376s: job.exception \u01923Pmjmw5 type=exec severity=0 node failure on n2 (rank 1)\n"
        "2.376s: flux-shell[0]:  WARN: exception: node failure on n2 (shell rank 1)\n"
        "flux-job: task(s) Terminated",
        "node-failure",
    ),
    (
        1,
        "0.028s: job.exception \u01925wJzJXR type=alloc severity=0 unsatisfiable request: need 2 exclusive "
        "node(s), only 1 eligible",
        "node-failure",
    ),
    (1, f"{UNABLE}: Socket timed out on send/recv operation", "not-launched"),
    (
        1,
        "agent: gone\nplacement could not be kept: r/m was to start on n1, and started on n2",
        "not-launched",
    ),
    (1, f"{UNABLE}: More processors requested than permitted", "program-error"),
    (253, "", "out-of-memory"),
    (137, f"{CANCELLED} ***\nsrun: error: n3: task 0: Killed", "killed"),
    (0, "", "program-error"),
    (143, "", "killed"),
    (1, "ValueError: no such layer", "program-error"),
    (7, "", "program-error"),
    (71, "", "out-of-memory"),
    (74, "", "disk-full"),
    (73, "", "disk-error"),
]


@pytest.mark.parametrize(
    ("code", "output", "reason"), OUTPUTS, ids=[f"{o[2]}-{n}" for n, o in enumerate(OUTPUTS)]
)
def test_launcher_output_decides_the_exit_reason(code, output, reason):
    assert exit_reason_of(code, f"epoch 1\n{output}\nsrun: Terminating StepId=7.0\n") is ExitReason(reason)


@pytest.mark.parametrize(
    "line", ["srun is out of memory", "I had a node failure: srun: error", "loss 0.1 DUE TO TIME LIMIT"]
)
def test_program_output_does_not_decide_the_exit_reason(line):
    assert exit_reason_of(1, line) is ExitReason.PROGRAM_ERROR


def test_launcher_output_outranks_trainer_event_and_exit_code():
    assert exit_reason_of(1, "srun: error: Node failure on n2", "program-error") is ExitReason.NODE_FAILURE
    assert exit_reason_of(143, "", "out-of-memory") is ExitReason.OUT_OF_MEMORY


@given(st.integers(0, 255), st.text(max_size=200))
def test_no_failure_is_taken_for_an_end_in_order(code, output):
    assert exit_reason_of(code, output) not in CLEAN_EXITS


def test_exit_codes_map_to_different_reasons():
    assert {exit_reason_of(code, "") for code in EXIT_CODES.values()} == set(EXIT_CODES)
    assert ExitReason.DISK_FULL not in MEMBER_FAULTS


@pytest.mark.parametrize(
    ("output", "nodes", "failed"),
    [
        ("srun: error: Node failure on n2", ("n1", "n2"), ("n2",)),
        ("srun: error: Node failure on n12", ("n1", "n2", "n12"), ("n12",)),
        ("n1 is fine\nsrun: error: Node failure on n2", ("n1", "n2"), ("n2",)),
        ("srun: error: Node failure on n[1-2]", ("n1", "n2"), ()),
        ("srun: error: Required node not available", ("n3",), ("n3",)),
    ],
)
def test_failed_nodes_are_those_that_are_named(output, nodes, failed):
    assert failed_nodes(output, nodes) == failed


def test_a_known_peak_is_appended_to_the_cause():
    assert with_peak("out of memory", 3 * 2**29) == "out of memory: 1.50 GiB at its peak"
    assert with_peak("out of memory", 0) == "out of memory"
