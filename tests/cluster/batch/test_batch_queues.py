"""Queues, nodes and accounts, by answers of batch systems."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hetctl.cluster.batch.queues import (
    NodeClass,
    QueueFacts,
    keeps_history,
    parse_accounts,
    parse_nodes_of_partition,
    parse_partition,
    parse_pbs_nodes,
    parse_pbs_queue,
    parse_qos,
    parse_queue,
    parse_slurm_time,
    parse_start,
)

CAPTURED = Path(__file__).parent / "captured"
PARTITION = (
    "PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A "
    "DefaultTime=00:10:00 DisableRootJobs=NO MaxNodes={nodes} MaxTime={time} MinNodes=0 LLN=NO "
    "Nodes=n[1-4] PriorityTier=1 State={state} TotalCPUs=32 TotalNodes=4 SelectTypeParameters=NONE\n"
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-00:00:00", 86400),
        ("2-12", 60 * 3600),
        ("02:00:00", 7200),
        ("30:00", 1800),
        ("90", 5400),
        ("UNLIMITED", None),
        ("INFINITE", None),
        ("", None),
        ("1-", None),
    ],
)
def test_times_as_slurm_writes_them(text, seconds):
    assert parse_slurm_time(text) == seconds


@pytest.mark.parametrize(
    ("nodes", "time", "state", "facts"),
    [
        ("UNLIMITED", "UNLIMITED", "UP", QueueFacts(True, 4, None)),
        ("2", "1-00:00:00", "UP", QueueFacts(True, 2, 86400)),
        ("9", "30:00", "DRAIN", QueueFacts(False, 4, 1800)),
    ],
)
def test_limits_of_a_partition_are_parsed_from_scontrol(nodes, time, state, facts):
    assert parse_partition(PARTITION.format(nodes=nodes, time=time, state=state), "main") == facts


@pytest.mark.parametrize("text", ["", "Partition mian not found\n", PARTITION])
def test_a_partition_that_is_not_there(text):
    assert parse_partition(text, "mian") is None


def test_limits_of_a_qos_are_parsed_from_sacctmgr():
    text = "normal||\nregular|2-00:00:00|cpu=8,node=3072\n"
    assert parse_qos(text, "regular") == QueueFacts(True, 3072, 172800)
    assert parse_qos(text, "normal") == QueueFacts(True)
    assert parse_qos(text, "debug") is None


def test_nodes_of_a_partition():
    text = "4|8|8000|gpu:2\n12|64|515000+|gpu:a100:4(S:0-1),craynetwork:4\n1|2|900|(null)\nsinfo: error|\n"
    assert parse_nodes_of_partition(text) == (
        NodeClass(4, 8, 8000, 2),
        NodeClass(12, 64, 515000, 4),
        NodeClass(1, 2, 900, 0),
    )


def test_accounts_come_once_each():
    assert parse_accounts("ml\nml\n\nphysics\n") == ("ml", "physics")


@given(st.text(alphabet="PartionName=mxTe MaxNodes0123456789|:-,.()gpu\n\0é²", max_size=200))
@example("-0")
@example("4|8|8000|gpu:2\n4|8|8000|gpu:-2\n1|2|900|")
def test_any_text_is_read_without_a_traceback(text):
    for parse in (parse_partition, parse_qos):
        assert parse(text, "main") is None or "main" in text
    assert all(group.gpus >= 0 for group in parse_nodes_of_partition(text))
    assert parse_slurm_time(text) is None or text.strip()


LSF_QUEUE = """
QUEUE: normal
  -- For normal low priority jobs, running only if hosts are lightly loaded.

PARAMETERS/STATISTICS
PRIO NICE STATUS          MAX JL/U JL/P JL/H NJOBS  PEND   RUN SSUSP USUSP  RSV PJOBS
 30    0  Open:Active       -    -    -    -     0     0     0     0     0    0     0

DEFAULT LIMITS:
 RUNLIMIT
 15.0 min of hostA

MAXIMUM LIMITS:
 RUNLIMIT
 720.0 min of hostA

SCHEDULING PARAMETERS
"""


def test_the_maximum_of_a_queue_counts():
    assert parse_queue(LSF_QUEUE, "normal") == QueueFacts(True, None, 720 * 60)
    assert parse_queue(LSF_QUEUE.replace("Open:Active", "Closed:Inact"), "normal") == QueueFacts(
        False, None, 720 * 60
    )
    assert parse_queue(LSF_QUEUE.partition("MAXIMUM")[0], "normal") == QueueFacts(True)
    assert parse_queue("xyz: No such queue\n", "xyz") is None


@given(st.text(alphabet="QUEUE: mainRLIT.0123456789-\n", max_size=200))
def test_any_text_of_lsf_is_read_without_a_traceback(text):
    assert parse_queue(text, "main") is None or "main" in text


def test_the_expected_start_of_a_tested_script_is_read():
    said = "sbatch: Job 7 to start at 2026-11-29T12:30:00 using 4 processors on nodes n1 in partition main"
    assert parse_start(f"sbatch: warning: hello\n{said}\n") == "2026-11-29T12:30:00"
    assert parse_start("allocation failure: Requested node configuration is not available") is None


def test_queues_and_nodes_of_pbs():
    queue = (CAPTURED / "openpbs-23.06-queue.txt").read_text()
    assert parse_pbs_queue(queue, "workq") == QueueFacts(True)
    limited = queue + "    resources_max.nodect = 16\n    resources_max.walltime = 168:00:00\n"
    assert parse_pbs_queue(limited, "workq") == QueueFacts(True, 16, 168 * 3600)
    assert parse_pbs_queue(queue.replace("started = True", "started = False"), "workq") == QueueFacts(False)
    assert parse_pbs_queue(queue, "work") is None
    nodes = (CAPTURED / "openpbs-23.06-pbsnodes.txt").read_text()
    assert parse_pbs_nodes(nodes) == (NodeClass(2, 4, 4096, 2),)
    assert parse_pbs_nodes(nodes.replace("4gb", "527672492kb", 1)) == (
        NodeClass(1, 4, 515305, 2),
        NodeClass(1, 4, 4096, 2),
    )
    assert keeps_history("Server: s\n    job_history_enable = True\n")
    assert not keeps_history("Server: s\n    job_history_enable = False\n")


@given(st.text(alphabet="Queue: workq\n =.resources_availablencpusmaxwalltime0123456789", max_size=200))
def test_any_text_of_pbs_is_read_without_a_traceback(text):
    assert parse_pbs_queue(text, "workq") is None or "workq" in text
    assert all(group.cores >= 0 for group in parse_pbs_nodes(text))
