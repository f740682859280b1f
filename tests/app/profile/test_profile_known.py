"""Which measurements a plan is made from, and which of them are doubted."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.app.profile.known import OLD_S, member_profiles, predictions_in, stale_points, warnings_of
from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.events import Event
from hetctl.model.job import Job, JobState
from hetctl.model.plan import Plan
from hetctl.model.profile import Hardware, ProfilePoint
from hetctl.model.rate_shapes import shape_digest
from hetctl.model.run import RunSpec
from hetctl.model.site import NodeType, Queue, Site
from hetctl.storage.paths import Home

SITE = Site("here", "local", "local", 1, 2, 2, 2**30, (Queue("local"),), device="slot")
A, B = Member("a", {"units": 1}), Member("b", {"units": 2})
ENSEMBLE = Ensemble("e", "tensorflow", Functions("m:i", "m:m"), (A, B), "/nowhere")
MACHINE = Hardware("V100", "535", "tensorflow 2.18")


def point(member: Member, gpus: int = 1, **values: object) -> ProfilePoint:
    new = ProfilePoint(member.name, gpus, 100.0 * gpus, member.fingerprint, 32, time.time(), MACHINE)
    return replace(new, samples_per_epoch=1000, **values)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path, Home(tmp_path / ".hetctl"))


def keep(project: Project, *points: ProfilePoint) -> None:
    with Catalog.open(project.home.catalog) as catalog:
        catalog.save_points("e", "here", points)


def test_a_fresh_profile_of_one_machine_is_not_doubted(project: Project) -> None:
    keep(project, point(A), point(A, 2), point(B))
    assert warnings_of(project, ENSEMBLE, SITE) == []


def test_points_of_other_software_are_warned_of(project: Project) -> None:
    before = replace(MACHINE, framework="tensorflow 2.15")
    keep(project, point(A, measured_at=time.time() - 60, machine=before), point(B))
    (warning,) = warnings_of(project, ENSEMBLE, SITE)
    assert warning.startswith("the profile of a was measured with other hardware or software")


def test_types_of_gpu_that_a_site_has_go_together(project: Project) -> None:
    types = tuple(NodeType(name, 1, (f"{name}*",)) for name in ("V100", "P100"))
    site = replace(SITE, nodes=2, node_types=types)
    other = replace(MACHINE, gpu_type="P100")
    keep(project, point(A, measured_at=time.time() - 60, machine=other), point(A))
    assert warnings_of(project, ENSEMBLE, site) == []
    (warning,) = warnings_of(project, ENSEMBLE, SITE)
    assert warning.startswith("the profile of a was measured with other hardware")


def test_old_points_are_warned_of(project: Project) -> None:
    keep(project, point(A, measured_at=time.time() - OLD_S - 60), point(B))
    (warning,) = warnings_of(project, ENSEMBLE, SITE)
    assert warning.startswith("the profile of a is older than 90 days")


def test_points_from_before_an_edit_of_the_member_do_not_count(project: Project) -> None:
    edited = replace(A, config={"units": 9})
    ensemble = replace(ENSEMBLE, members=(edited, B))
    keep(project, point(A), point(B))
    with Catalog.open(project.home.catalog) as catalog:
        assert [profile.member for profile in member_profiles(catalog, ensemble, SITE)] == ["b"]
        assert stale_points(catalog.points("e", "here"), ensemble, SITE) == {("a", 1)}


def test_the_newest_of_several_measurements_counts(project: Project) -> None:
    other = replace(MACHINE, gpu_type="A100")
    keep(project, point(A, measured_at=1.0), replace(point(A, machine=other), rate=250.0))
    with Catalog.open(project.home.catalog) as catalog:
        (profile,) = member_profiles(catalog, ENSEMBLE, SITE)
    assert (profile.rates, profile.gpu_type) == ({1: 250.0}, "A100")


PLAN = Plan("fluid", "makespan", 2, 2, 1.0, 1.0, 1.0, (), ())


def trained(catalog: Catalog, run: str, site: Site, member: Member, rate: float, at: float) -> None:
    """Enter a run of one epoch of a member, on one GPU, into the catalog."""
    ensemble = replace(ENSEMBLE, members=(member,))
    spec = RunSpec(run, ensemble, site, "fluid", 2, "local", 600, 10, (), "/checkpoints")
    catalog.add_run(spec, PLAN, at, Job(0, f"hetctl-{run}-0", "1", JobState.FINISHED, 1, 600, at))
    epoch = {"epoch": 1, "metrics": {}, "duration_s": 1.0, "gpus": 1, "finished_at": at, "batch_size": 32}
    report = Event(member.name, 0, "epoch", at, epoch | {"rate": rate, "overhead_s": 0.5})
    catalog.ingest(run, [report])


def test_rates_that_runs_have_seen_since_the_profile_are_known(project: Project) -> None:
    keep(project, point(A, measured_at=1000.0), point(B, measured_at=1000.0))
    with Catalog.open(project.home.catalog) as catalog:
        trained(catalog, "before", SITE, A, 40.0, at=900.0)
        trained(catalog, "after", SITE, A, 80.0, at=1100.0)
        trained(catalog, "elsewhere", replace(SITE, name="there"), A, 10.0, at=1200.0)
        trained(catalog, "edited", SITE, replace(A, config={"units": 9}), 20.0, at=1300.0)
        a, b = member_profiles(catalog, ENSEMBLE, SITE)
    assert (a.rates, a.seen_rates, a.seen_overhead_s) == ({1: 100.0}, {"": {1: 80.0}}, 0.5)
    assert (b.seen_rates, b.seen_overhead_s) == ({}, None)


def test_seen_rates_outlive_edits_of_the_learning_rate(project: Project) -> None:
    keep(project, point(A, measured_at=1000.0, shape=shape_digest(A, ())))
    with Catalog.open(project.home.catalog) as catalog:
        trained(catalog, "run", SITE, A, 80.0, at=1100.0)
        edited = replace(ENSEMBLE, members=(replace(A, config={"units": 1, "lr": 0.5}), B))
        (a,) = member_profiles(catalog, edited, SITE)
    assert a.seen_rates == {"": {1: 80.0}}


def test_shapes_without_points_are_predicted_if_asked(project: Project) -> None:
    near, far = Member("near", {"units": 3, "lr": 1}), Member("far", {"units": 3, "lr": 2})
    strange = Member("strange", {"kind": "cnn"})
    ensemble = replace(ENSEMBLE, members=(near, A, strange, B, far))
    keep(project, point(A), replace(point(B), rate=70.0))
    with Catalog.open(project.home.catalog) as catalog:
        assert [profile.member for profile in member_profiles(catalog, ensemble, SITE)] == ["a", "b"]
        trained(catalog, "run", SITE, near, 60.0, at=1100.0)
        found = member_profiles(catalog, ensemble, SITE, predict=True)
    assert [(profile.member, profile.predicted_from) for profile in found] == [
        ("near", "b"), ("a", ""), ("b", ""), ("far", "b"),
    ]  # fmt: skip
    assert [profile.rates for profile in found] == [{1: 70.0}, {1: 100.0}, {1: 70.0}, {1: 70.0}]
    # What one member of a predicted shape has seen counts for the others.
    assert [profile.seen_rates for profile in found] == [{"": {1: 60.0}}, {}, {}, {"": {1: 60.0}}]
    (warning,) = predictions_in(found)
    assert warning.startswith("the rates of near, far are predicted from those of b;")


def test_a_newer_point_counts_more_than_earlier_seen_rates(project: Project) -> None:
    keep(project, point(A, measured_at=1000.0))
    with Catalog.open(project.home.catalog) as catalog:
        trained(catalog, "run", SITE, A, 80.0, at=1100.0)
        catalog.save_points("e", "here", [point(A, measured_at=1200.0)])
        (a,) = member_profiles(catalog, ENSEMBLE, SITE)
    assert a.seen_rates == {}
