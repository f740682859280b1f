"""Steps of several members at once in a job of the stand-in for LSF, started as the launchers say."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import sys

import pytest
from workbench import wait_for

from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.core.site import Queue, Site
from hetctl.launchers import LAUNCHERS

HOSTS = {"a1": (8, 4), "a2": (8, 4)}
# Each rank says who it is and when, and stays a while so that others meet it.
WITNESS = """
import json, os, sys, time
start = time.time()
time.sleep(0.5)
names = ("LSF_STANDIN_HOST", "CUDA_VISIBLE_DEVICES", "OMPI_COMM_WORLD_LOCAL_RANK")
with open(sys.argv[2], "a") as file:
    file.write(json.dumps([sys.argv[1], start, time.time(), *map(os.environ.get, names)]) + "\\n")
"""
MPI = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no Open MPI on this machine")


@pytest.fixture
def run_steps(start_lsf, tmp_path):
    """Run steps side by side in one job on both hosts; return what the job printed and the ranks said."""

    def run(launcher, *placements):
        csm = launcher != "mpirun"
        cluster = start_lsf(hosts=HOSTS, launch_host="batch1" if csm else None)
        site = Site("s", "lsf", launcher, 2, 4, 8, 2**36, (Queue("normal"),))
        (tmp_path / "witness.py").write_text(WITNESS)
        lines = [line(site, f"m{number}", placement, tmp_path) for number, placement in enumerate(placements)]
        asked = ["-nnodes", "2"] if csm else ["-n", "16", "-R", "span[ptile=8]", "-gpu", "num=4"]
        output = tmp_path / "out"
        script = " ".join(f"{line} & " for line in lines) + "wait"
        assert cluster.run("bsub", *asked, "-o", str(output), script).returncode == 0
        wait_for(lambda: cluster.ask("jobs")[0]["fields"]["stat"] in ("DONE", "EXIT"), 60)
        said = tmp_path / "said"
        return output.read_text(), [json.loads(text) for text in said.read_text().splitlines()]

    return run


def line(site, member, placement, folder) -> str:
    places = tuple(Placement(node, gpus) for node, gpus in placement.items())
    allocation = Allocation(member, sum(len(p.gpus) for p in places), DATA_PARALLEL, 1.0, places)
    command = (sys.executable, str(folder / "witness.py"), member, str(folder / "said"))
    step = LAUNCHERS[site.launcher](site, allocation, command)
    variables = dict(step.environment)
    if step.file is not None:
        variables[step.file_variable] = str(folder / f"{member}.launch")
        (folder / f"{member}.launch").write_text("\n".join(step.file) + "\n")
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *step.argv])


def assert_disjoint(said) -> None:
    """No two members had a GPU of the same host at the same time."""
    for first, second in itertools.combinations(said, 2):
        same_time = first[1] < second[2] and second[1] < first[2]
        if first[0] != second[0] and first[3] == second[3] and same_time:
            assert not set(first[4].split(",")) & set(second[4].split(",")), (first, second)


@MPI
@pytest.mark.parametrize("launcher", ["jsrun", "jsrun-erf", "mpirun"])
def test_members_side_by_side_have_gpus_of_their_own(run_steps, launcher):
    _, said = run_steps(
        launcher,
        {"a1": (0, 1)},
        {"a1": (2,), "a2": (2,)},
        {"a2": (0, 1)},
        {"a1": (3,)},
        {"a2": (3,)},
    )
    assert sorted(rank[0] for rank in said) == ["m0", "m0", "m1", "m1", "m2", "m2", "m3", "m4"]
    assert_disjoint(said)
    ranks = {(member, host, local) for member, _, _, host, _, local in said if member in ("m0", "m2")}
    assert {local for _, _, local in ranks} == {"0", "1"}
    if launcher != "jsrun":  # which takes free GPUs, wherever they were promised
        assert {(rank[0], rank[3]) for rank in said} == {
            ("m0", "a1"), ("m1", "a1"), ("m1", "a2"), ("m2", "a2"), ("m3", "a1"), ("m4", "a2"),
        }  # fmt: skip


@MPI
@pytest.mark.parametrize("launcher", ["jsrun", "jsrun-erf"])
def test_what_does_not_fit_beside_others_waits_for_them(run_steps, launcher):
    _, said = run_steps(launcher, {"a1": (0, 1, 2, 3)}, {"a1": (0, 1, 2), "a2": (0,)}, {"a2": (0, 1, 2, 3)})
    assert sorted(rank[0] for rank in said) == ["m0"] * 4 + ["m1"] * 4 + ["m2"] * 4
    assert_disjoint(said)


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
