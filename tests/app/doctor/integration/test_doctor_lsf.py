"""The doctor on a cluster of the stand-in for LSF."""

from __future__ import annotations

import pytest
from workbench import new_project

RIGHT = """\
extends: lsf
nodes: 2
gpus_per_node: 2
cores_per_node: 4
memory_per_node: 2GB
queues: [{name: normal, max_nodes: 2, max_wall: 12h}, {name: long, max_nodes: 2, max_wall: 30h}]
queue: normal
"""


@pytest.fixture
def cluster(start_lsf):
    return start_lsf(queues={"normal": 720, "long": None})


@pytest.fixture
def examine(cluster, tmp_path):
    project = new_project(tmp_path / "project")

    def examine(site):
        (project.path / "lab.yaml").write_text(site)
        return project.here("doctor", "--json", "--site", "./lab.yaml", **cluster.environment())

    return examine


def check_of(result, check):
    return next(one for one in result.json["checks"] if one["name"] == check)


def test_a_right_site_file(examine):
    result = examine(RIGHT)
    assert result.code == 0, result.stdout
    assert check_of(result, "batch system")["message"] == "LSF answers"
    for queue, limit in (("normal", "12h"), ("long", "any time")):
        check = check_of(result, f"queue {queue}")
        assert (check["status"], f"any nodes for {limit}," in check["message"]) == ("ok", True), check


@pytest.mark.parametrize(
    ("old", "new", "check", "words"),
    [
        ("normal", "nromal", "queue nromal", "lsf has none of this name"),
        ("max_wall: 12h", "max_wall: 13h", "queue normal", "takes 12h, but the site file says 13h"),
        ("max_wall: 12h", "max_wall: null", "queue normal", "takes 12h, but the site file says no limit"),
    ],
)
def test_a_wrong_site_file(examine, old, new, check, words):
    result = examine(RIGHT.replace(old, new))
    assert result.code == 2, result.stdout
    assert [one["name"] for one in result.json["checks"] if one["status"] == "failed"] == [check]
    failed = check_of(result, check)
    assert words in failed["message"]
    assert failed["hint"]


def test_what_is_wrong_with_a_queue_that_is_not_used_only_warns(examine):
    result = examine(RIGHT.replace("long", "lnog"))
    assert result.code == 0, result.stdout
    assert check_of(result, "queue lnog")["status"] == "warning"


def test_lsf_that_does_not_answer(cluster, examine):
    cluster.stop()
    result = examine(RIGHT)
    assert result.code == 4, result.stdout
    check = check_of(result, "batch system")
    assert (check["status"], "Connection refused" in check["message"]) == ("failed", True)
