"""A golden script for every shipped site, to be read beside its documentation, and how other cases differ.

After a wanted change, write them anew with ``HETCTL_REGENERATE=1 pytest tests/cluster/render``
and read the difference line by line.
"""

from __future__ import annotations

import difflib
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.app.doctor.sample_jobs import case_text, cases_of
from hetctl.inputs.site_file import find_site, list_sites
from hetctl.model.site import MEMBERS

GOLDEN = Path(__file__).parent / "golden"
SITES = [find_site(name, project=None, home=None) for name, _ in list_sites(project=None, home=None)]
CASES = [(site, case) for site in SITES for case in cases_of(site)]
CHANGED = "changed on purpose? HETCTL_REGENERATE=1 pytest tests/cluster/render writes it anew"


def golden_of(site, case):
    """The file of a case, and its text: the script of the first case of a site, else the changes to that."""
    first, text = cases_of(site)[0], case_text(site, case)
    if case == first:
        return GOLDEN / site.name / f"{case.name}.sh", text
    scripts = (case_text(site, first).splitlines(), text.splitlines())
    lines = difflib.unified_diff(*scripts, f"{first.name}.sh", f"{case.name}.sh", n=0, lineterm="")
    return GOLDEN / site.name / f"{case.name}.diff", "\n".join([*lines, ""])


@pytest.mark.parametrize(("site", "case"), CASES, ids=[f"{site.name}-{case.name}" for site, case in CASES])
def test_scripts_are_equal_to_their_golden_files(site, case):
    golden, text = golden_of(site, case)
    if os.environ.get("HETCTL_REGENERATE") == "1":
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), f"{golden}: {CHANGED}"


CONFINES = [site for site in SITES if site.requests_gpus or site.device == "slot"]
"""Sites that can confine each member to its GPUs, of which there is an option or no need."""


@pytest.mark.parametrize("site", CONFINES, ids=lambda site: site.name)
def test_launch_members_keeps_the_script_with_a_step_per_member(site):
    for case in cases_of(site):
        by_nodes, by_members = (
            case_text(each, case).split("\n# The driver starts ")
            for each in (site, replace(site, launch=MEMBERS))
        )
        assert by_members[0] == by_nodes[0]
        names = [f"round-0000/member-{n}" for n in range(1, len(case.shares) + 1)]
        assert [steps_in(by_nodes[1]), steps_in(by_members[1])] == [["agents"], names]


def steps_in(text: str) -> list[str]:
    """The steps that agents are told that they belong to."""
    words = text.split()
    return list(dict.fromkeys(words[at + 2] for at, word in enumerate(words) if word == "--step"))


def test_there_is_no_golden_script_of_nothing():
    wanted = {golden_of(site, case)[0] for site, case in CASES}
    assert {path for path in GOLDEN.rglob("*") if path.is_file()} == wanted


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_bash_accepts_the_script_of_every_case(site):
    for case in cases_of(site):
        done = subprocess.run(["bash", "-n"], input=case_text(site, case), capture_output=True, text=True)
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
