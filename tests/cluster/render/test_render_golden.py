"""A golden script for every shipped site, to be read beside its documentation, and how other cases differ.

After a wanted change, write them anew with ``HETCTL_REGENERATE=1 pytest tests/cluster/render``
and read the difference line by line.
"""

from __future__ import annotations

import difflib
import os
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hetctl.app.doctor.sample_jobs import case_text, cases_of
from hetctl.inputs.site_file import find_site, list_sites
from hetctl.model.site import MEMBERS

GOLDEN = Path(__file__).parent / "golden"
SITES = [find_site(name, project=None, home=None) for name, _ in list_sites(project=None, home=None)]
CASES = [(site, case) for site in SITES for case in cases_of(site)]
CHANGED = "changed on purpose? HETCTL_REGENERATE=1 pytest tests/cluster/render writes it anew"


@pytest.fixture(scope="module")
def script_of():
    """Return the script of a case on a site, which is rendered once."""
    return cache(lambda name, case: case_text(next(site for site in SITES if site.name == name), case))


def golden_file(site, case):
    kind = "sh" if case == cases_of(site)[0] else "diff"
    return GOLDEN / site.name / f"{case.name}.{kind}"


@pytest.mark.parametrize(("site", "case"), CASES, ids=[f"{site.name}-{case.name}" for site, case in CASES])
def test_scripts_are_equal_to_their_golden_files(site, case, script_of):
    """The first case of a site has its script, the others have the changes to that."""
    golden, text, first = golden_file(site, case), script_of(site.name, case), cases_of(site)[0]
    if case != first:
        scripts = (script_of(site.name, first).splitlines(), text.splitlines())
        lines = difflib.unified_diff(*scripts, f"{first.name}.sh", f"{case.name}.sh", n=0, lineterm="")
        text = "\n".join([*lines, ""])
    if os.environ.get("HETCTL_REGENERATE") == "1":
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), f"{golden}: {CHANGED}"


CONFINES = [site for site in SITES if site.requests_gpus or site.device == "slot"]
"""Sites that can confine each member to its GPUs, of which there is an option or no need."""


@pytest.mark.parametrize("site", CONFINES, ids=lambda site: site.name)
def test_launch_members_keeps_the_script_with_a_step_per_member(site, script_of):
    for case in cases_of(site):
        by_nodes, by_members = (
            text.split("\n# The driver starts ")
            for text in (script_of(site.name, case), case_text(replace(site, launch=MEMBERS), case))
        )
        assert by_members[0] == by_nodes[0]
        names = [f"round-0000/member-{n}" for n in range(1, len(case.shares) + 1)]
        assert [steps_in(by_nodes[1]), steps_in(by_members[1])] == [["agents"], names]


def steps_in(text: str) -> list[str]:
    """The steps that agents are told that they belong to."""
    words = text.split()
    return list(dict.fromkeys(words[at + 2] for at, word in enumerate(words) if word == "--step"))


def test_there_is_no_golden_script_of_nothing():
    wanted = {golden_file(site, case) for site, case in CASES}
    assert {path for path in GOLDEN.rglob("*") if path.is_file()} == wanted


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_bash_accepts_the_script_of_every_case(site, script_of):
    for case in cases_of(site):
        script = script_of(site.name, case)
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), case.name


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_only_a_site_of_one_node_lacks_a_case(site):
    names = [case.name for case in cases_of(site)]
    complete = ["one-member", "packed-members", "two-nodes", "resumed-round"]
    assert names == complete if site.nodes > 1 else [*complete[:2], complete[3]]


@pytest.mark.parametrize("site", [site for site in SITES if site.nodes > 1], ids=lambda site: site.name)
def test_packed_members_fill_a_node_and_share_no_gpu(site):
    from hetctl.app.doctor.sample_jobs import allocations_of

    packed = next(case for case in cases_of(site) if case.name == "packed-members")
    placements = [place for each in allocations_of(packed, site) for place in each.placement]
    assert {place.node for place in placements} == {"node-1"}
    gpus = [gpu for place in placements for gpu in place.gpus]
    assert sorted(gpus) == list(range(site.gpus_per_node))
