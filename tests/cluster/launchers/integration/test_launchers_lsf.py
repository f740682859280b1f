"""The step of the agents in a job of the stand-in for LSF, started as the launchers say."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys

import pytest
from workbench import wait_for

from hetctl.cluster.launchers import LAUNCHERS, LaunchSpec, ResourceSet
from hetctl.cluster.launchers.nodes import node_of_agent
from hetctl.model.site import MEMBERS, Queue, Site

HOSTS = {"a1": (8, 4), "a2": (8, 4)}
# An agent says where it is, which GPUs and how many cores it sees.
WITNESS = """
import json, os, sys
names = ("PMIX_HOSTNAME", "HETCTL_NODE", "CUDA_VISIBLE_DEVICES")
with open(sys.argv[1], "a") as file:
    file.write(json.dumps([*map(os.environ.get, names), len(os.sched_getaffinity(0))]) + "\\n")
"""
MPI = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no Open MPI on this machine")


@MPI
@pytest.mark.parametrize("launcher", ["jsrun", "mpirun"])
def test_one_step_starts_an_agent_on_each_node_with_all_gpus(start_lsf, tmp_path, launcher):
    csm = launcher == "jsrun"
    cluster = start_lsf(hosts=HOSTS, launch_host="batch1" if csm else None)
    site = Site("s", "lsf", launcher, 2, 4, 8, 2**36, (Queue("normal"),))
    (tmp_path / "witness.py").write_text(WITNESS)
    command = (sys.executable, str(tmp_path / "witness.py"), str(tmp_path / "said"))
    sets = [ResourceSet(host, (0, 1, 2, 3)) for host in HOSTS]
    line = line_of(LAUNCHERS[launcher].agents(site, "agents", sets, command))
    asked = ["-nnodes", "2"] if csm else ["-n", "16", "-R", "span[ptile=8]", "-gpu", "num=4"]
    assert cluster.run("bsub", *asked, "-o", str(tmp_path / "out"), line).returncode == 0
    wait_for(lambda: cluster.ask("jobs")[0]["fields"]["stat"] in ("DONE", "EXIT"))
    said = [json.loads(text) for text in (tmp_path / "said").read_text().splitlines()]
    nodes = tuple(HOSTS)
    placed = [node_of_agent(nodes, _named(pmix, own), "shared") for pmix, own, _, _ in said]
    assert sorted(placed) == sorted(nodes)
    assert {gpus for _, _, gpus, _ in said} == {"0,1,2,3"}
    assert {cores for *_, cores in said} == {min(8, len(os.sched_getaffinity(0)))}


def line_of(step: LaunchSpec) -> str:
    return shlex.join(["env", *(f"{name}={value}" for name, value in step.environment.items()), *step.argv])


@MPI
def test_members_side_by_side_have_gpus_and_cores_of_their_own(start_lsf, tmp_path):
    """Three on two nodes, each in a jsrun of its own, all at work at once; they fit wherever jsrun begins."""
    cluster = start_lsf(hosts=HOSTS, launch_host="batch1")
    site = Site("s", "lsf", "jsrun", 2, 4, 8, 2**36, (Queue("normal"),), launch=MEMBERS)
    members = {
        "one": [ResourceSet("a1", (0,))],
        "other": [ResourceSet("a2", (2,))],
        "wide": [ResourceSet("a1", (2, 3)), ResourceSet("a2", (0, 1))],
    }
    (tmp_path / "witness.py").write_text(WITNESS + TOGETHER)
    command = (sys.executable, str(tmp_path / "witness.py"), str(tmp_path / "said"), "4")
    steps = [LAUNCHERS["jsrun"].agents(site, name, sets, command) for name, sets in members.items()]
    script = tmp_path / "job.sh"
    script.write_text("\n".join(["#!/bin/sh", *(f"{line_of(step)} &" for step in steps), "wait", ""]))
    script.chmod(0o755)
    assert cluster.run("bsub", "-nnodes", "2", "-o", str(tmp_path / "out"), str(script)).returncode == 0
    wait_for(lambda: cluster.ask("jobs")[0]["fields"]["stat"] in ("DONE", "EXIT"))
    said = [json.loads(text) for text in (tmp_path / "said").read_text().splitlines()]
    held = [(host, gpu) for host, _, gpus, _ in said for gpu in gpus.split(",")]
    assert len(held) == len(set(held)) == 6
    assert sorted(len(gpus.split(",")) for _, _, gpus, _ in said) == [1, 1, 2, 2]


TOGETHER = """
import time
end = time.monotonic() + 60
while len(open(sys.argv[1]).readlines()) < int(sys.argv[2]):
    assert time.monotonic() < end, "the others did not start"
    time.sleep(0.05)
"""


def _named(pmix, own):
    said = {"PMIX_HOSTNAME": pmix, "HETCTL_NODE": own}
    return {name: value for name, value in said.items() if value}


def jsrun(cluster, tmp_path, *arguments, **variables):
    command = shlex.join(["env", *(f"{k}={v}" for k, v in variables.items()), "jsrun", *arguments])
    output = tmp_path / f"out-{os.urandom(4).hex()}"
    cluster.run("bsub", "-nnodes", "1", "-o", str(output), command)
    last = len(cluster.ask("jobs")) - 1
    wait_for(lambda: cluster.ask("jobs")[last]["fields"]["stat"] in ("DONE", "EXIT"))
    return cluster.ask("jobs")[last]["fields"]["exit_code"], output.read_text()


def test_a_resource_set_that_no_node_holds_is_refused(start_lsf, tmp_path):
    cluster = start_lsf(hosts=HOSTS, launch_host="batch1")
    code, text = jsrun(cluster, tmp_path, "-n1", "-a1", "-c1", "-g5", "true")
    assert (code, "cannot hold the requested resource sets" in text) == ("255", True)
    code, text = jsrun(cluster, tmp_path, "-n1", "-a1", "-c9", "true")
    assert (code, "cannot hold" in text) == ("255", True)


def test_what_jsrun_does_not_start_with(start_lsf, tmp_path):
    cluster = start_lsf(hosts=HOSTS, launch_host="batch1")
    assert jsrun(cluster, tmp_path, "-n1", "true", TMPDIR="/tmp")[0] == "255"
    assert "Illegal option" in jsrun(cluster, tmp_path, "--gpus", "1", "true")[1]
    outside = cluster.run("jsrun", "-n1", "true")
    assert (outside.returncode, "RM connection" in outside.stderr) == (255, True)


def test_the_exit_code_of_a_rank_is_that_of_jsrun(start_lsf, tmp_path):
    cluster = start_lsf(hosts=HOSTS, launch_host="batch1")
    assert jsrun(cluster, tmp_path, "-n1", "sh", "-c", "exit 7")[0] == "7"
    assert jsrun(cluster, tmp_path, "-n1", "sh", "-c", "kill -KILL $$")[0] == "137"
