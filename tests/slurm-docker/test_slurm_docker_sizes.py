"""The Docker cluster has the names and sizes that the site file says, and goes by what there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from hetctl.inputs.site_file import find_site
from hetctl.model.run_status import MemberStatus, RunStatus
from hetctl.model.site import Site

FOLDER = Path(__file__).parent
MIB = 1024**2


@pytest.fixture
def site() -> Site:
    return find_site("slurm-docker", project=None, home=None)


def options(keyword: str) -> dict[str, str]:
    (line,) = re.findall(rf"^{keyword}=.*", (FOLDER / "slurm.conf").read_text(encoding="utf-8"), re.MULTILINE)
    return dict(item.split("=", 1) for item in line.split())


def test_nodes_have_the_sizes_that_the_site_file_says(site: Site) -> None:
    node = options("NodeName")
    assert node["NodeName"] == f"c[1-{site.nodes}]"
    assert int(node["CPUs"]) == site.cores_per_node
    assert int(node["RealMemory"]) * MIB == site.memory_per_node


def test_the_partition_has_the_limits_of_the_site_file(site: Site) -> None:
    partition = options("PartitionName")
    days, clock = partition["MaxTime"].split("-")
    assert clock == "00:00:00"
    assert [(queue.name, queue.max_nodes, queue.max_wall_s) for queue in site.queues] == [
        (partition["PartitionName"], site.nodes, int(days) * 86400)
    ]


def test_containers_are_called_as_slurm_calls_them(site: Site) -> None:
    compose = (FOLDER / "docker-compose.yml").read_text(encoding="utf-8")
    hosts = re.findall(r"^    hostname: (.*)$", compose, re.MULTILINE)
    assert set(site.host_patterns) == {options("SlurmctldHost")["SlurmctldHost"]} <= set(hosts)
    assert {f"c{index}" for index in range(1, site.nodes + 1)} <= set(hosts)
    assert "privileged" not in compose.split("services:")[1]


def test_the_image_copies_what_is_there() -> None:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^COPY (?!.*--from)(.*)$", text, re.MULTILINE)
    sources = [word for line in lines for word in line.split()[:-1] if not word.startswith("--")]
    assert [source for source in sources if not (FOLDER.parents[1] / source).exists()] == []


@pytest.mark.parametrize(("name", "kind"), [("status", RunStatus), ("member", MemberStatus)])
def test_the_story_reads_fields_that_statuses_have(name: str, kind: type) -> None:
    story = (FOLDER / "story.py").read_text(encoding="utf-8")
    read = set(re.findall(rf"\b{name}\[['\"](\w+)['\"]\]", story))
    assert read
    assert read <= {field.name for field in fields(kind)}
