"""Which measurements a plan is made from, which are doubted, and which members a measured point holds for."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from workbench import TINY, new_project, python_without_training

from hetctl.app.profile.catalog_profiles import (
    OLD_S,
    RatePoints,
    beyond_measured,
    member_profiles,
    profiles_at,
    stale_points,
    warnings_of,
)
from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.events import DRIVER
from hetctl.model.job import Job, JobState
from hetctl.model.plan import DATA_PARALLEL, Allocation, Plan, Round
from hetctl.model.profile import Hardware, MemberProfile, ProfilePoint, shape_digest
from hetctl.model.run import LOCKSTEP, RunSpec
from hetctl.model.site import NodeType, Queue, Site
from hetctl.perf.rate_prediction import known_rates
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import Home, RunFolder
from hetctl.storage.run_files import read_spec

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
    warning, hint = warnings_of(project, ENSEMBLE, SITE)
    assert warning.startswith("the profile of a was measured with other hardware")
    assert "2 types were measured at here (P100, V100)" in hint


def test_old_points_are_warned_of(project: Project) -> None:
    keep(project, point(A, measured_at=time.time() - OLD_S - 60), point(B))
    (warning,) = warnings_of(project, ENSEMBLE, SITE)
    assert warning.startswith("the profile of a is older than 90 days")


def test_points_from_before_an_edit_of_the_member_do_not_count(project: Project) -> None:
    edited = replace(A, config={"units": 9})
    ensemble = replace(ENSEMBLE, members=(edited, B))
    keep(project, point(A), point(B))
    with Catalog.open(project.home.catalog) as catalog:
        a, b = member_profiles(catalog, ensemble, SITE)
        assert (a.has_rates, b.has_rates) == (False, True)
        assert stale_points(catalog.points("e", "here"), ensemble, SITE) == {("a", 1)}


def test_the_newest_of_several_measurements_counts(project: Project) -> None:
    other = replace(MACHINE, gpu_type="A100")
    keep(project, point(A, measured_at=1.0), replace(point(A, machine=other), rate=250.0))
    with Catalog.open(project.home.catalog) as catalog:
        profile, _ = member_profiles(catalog, ENSEMBLE, SITE)
    assert (profile.rates, profile.gpu_type) == ({1: 250.0}, "A100")


PLAN = Plan("fluid", "makespan", 2, 2, 1.0, 1.0, 1.0, (), ())


def trained(
    catalog: Catalog, run: str, site: Site, member: Member, rate: float, at: float, **of_run: Any
) -> None:
    """Make a run of one epoch of a member, on one GPU."""
    folder = begun(catalog, run, site, member, at, **of_run)
    epoch = {"epoch": 1, "metrics": {}, "duration_s": 1.0, "gpus": 1, "finished_at": at, "batch_size": 32}
    EventWriter(folder.events, member.name, 0).write("epoch", **epoch, rate=rate, overhead_s=0.5, samples=500)


def begun(catalog: Catalog, run: str, site: Site, member: Member, at: float, **of_run: Any) -> RunFolder:
    """Make a run of a member without any event."""
    ensemble = replace(ENSEMBLE, members=(member,))
    spec = RunSpec(run, ensemble, site, "fluid", 2, "local", 600, 10, (), "/checkpoints", **of_run)
    catalog.add_run(spec, PLAN, at, Job(0, f"hetctl-{run}-0", "1", JobState.FINISHED, 1, 600, at))
    return catalog.home.run(run).create()


def test_seen_rates_count_at_a_site_that_names_no_types(project: Project) -> None:
    other = replace(MACHINE, gpu_type="A100")
    keep(project, point(A, measured_at=1000.0), point(A, 2, measured_at=1001.0, machine=other))
    with Catalog.open(project.home.catalog) as catalog:
        trained(catalog, "after", SITE, A, 80.0, at=1100.0)
        profile, _ = member_profiles(catalog, ENSEMBLE, SITE)
        (by_type,) = profiles_at(catalog, ENSEMBLE, "here")
    assert (profile.rates, profile.rates_by_type) == ({2: 200.0}, {})
    assert known_rates(profile).rates == {1: 80.0, 2: 200.0}
    assert by_type.rates_by_type == {"A100": {2: 200.0}, "V100": {1: 100.0}}


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


@pytest.mark.parametrize("of_run", [{"sharing": LOCKSTEP}, {"pipelines": {A.name: {}}}])
def test_rates_of_pipelines_and_of_others_are_not_a_members_own(
    project: Project, of_run: dict[str, Any]
) -> None:
    keep(project, point(A, measured_at=1000.0))
    with Catalog.open(project.home.catalog) as catalog:
        trained(catalog, "r", SITE, A, 40.0, at=1100.0, **of_run)
        a, *_ = member_profiles(catalog, ENSEMBLE, SITE)
    assert (a.rates, a.seen_rates) == ({1: 100.0}, {})


def test_seen_rates_outlive_edits_of_the_learning_rate(project: Project) -> None:
    keep(project, point(A, measured_at=1000.0, shape=shape_digest(A, ())))
    with Catalog.open(project.home.catalog) as catalog:
        trained(catalog, "run", SITE, A, 80.0, at=1100.0)
        edited = replace(ENSEMBLE, members=(replace(A, config={"units": 1, "lr": 0.5}), B))
        a, _ = member_profiles(catalog, edited, SITE)
    assert a.seen_rates == {"": {1: 80.0}}


def test_a_member_that_was_not_measured_has_the_rates_of_earlier_runs(project: Project) -> None:
    new = Member("new", {"units": 3})
    ensemble = replace(ENSEMBLE, members=(new, A), samples_per_epoch=640)
    with Catalog.open(project.home.catalog) as catalog:
        assert not any(profile.has_rates for profile in member_profiles(catalog, ensemble, SITE))
        trained(catalog, "run", SITE, new, 60.0, at=1100.0)
        found, other = member_profiles(catalog, ensemble, SITE)
        by_epochs, _ = member_profiles(catalog, replace(ensemble, samples_per_epoch=None), SITE)
    # Of a command nothing else may be known.
    assert by_epochs.samples_per_epoch == 500
    assert (found.rates, found.seen_rates, found.seen_overhead_s) == ({}, {"": {1: 60.0}}, 0.5)
    assert (found.samples_per_epoch, other.has_rates) == (640, False)
    assert known_rates(found).rates == {1: 60.0}


def test_an_unfinished_first_epoch_leaves_its_rate_and_times_to_later_runs(project: Project) -> None:
    keep(project, point(A, measured_at=1200.0))
    timed = {"rate": 90.0, "gpus": 1, "batch_size": 32, "gpu_type": None, "error": 0.04}
    with Catalog.open(project.home.catalog) as catalog:
        for member, at in ((B, 1100.0), (A, 1100.0), (A, 1300.0)):
            folder = begun(catalog, f"{member.name}{at:.0f}", SITE, member, at)
            events = EventWriter(folder.events, member.name, 0)
            events.write("started", epochs=0, part_samples=0, samples=640)
            events.write("first_step", startup_s=3.0, peak_memory_bytes=7)
            events.write("rate", **{**timed, "rate": at / 10}, finished_at=at)
            events.write("checkpoint", epoch=0, part_samples=64, duration_s=0.5)
            events.write("preprocess", cores=1, rate=at)
            events.write("fused", rates=[[1, at], [4, 2 * at]])
            events.write("fused", rates=[[1, 9]], gpu_type=f"type-{at:.0f}")
        a, b = member_profiles(catalog, ENSEMBLE, SITE)
    # A measurement counts more than rates seen before it.
    assert a.seen_rates == {"": {1: 130.0}}
    assert b.seen_rates == {"": {1: 110.0}}
    assert (b.samples_per_epoch, b.startup_s, b.checkpoint_s, b.peak_memory_bytes) == (640, 3.0, 0.5, 7)
    assert (a.preparation_rate, b.preparation_rate) == (1300.0, 1100.0)
    # What each type of GPU has shown last.
    assert {*a.fused_rates} == {("", 1, 1300), ("", 4, 2600), ("type-1100", 1, 9), ("type-1300", 1, 9)}
    assert b.fused_rates == (("", 1, 1100), ("", 4, 2200), ("type-1100", 1, 9))


def test_the_start_of_processes_counts_once_for_members_that_earlier_runs_have_trained(
    project: Project,
) -> None:
    others = tuple(Member(name, {"units": units}) for units, name in enumerate(("first", "second"), start=7))
    with Catalog.open(project.home.catalog) as catalog:
        for member, restart_s in zip(others, (None, 0.5), strict=True):
            folder = begun(catalog, member.name, SITE, member, 1100.0)
            start = {"startup_s": 6.0, "restart_s": restart_s}
            EventWriter(folder.events, member.name, 0).write("first_step", **start)
        found = member_profiles(catalog, replace(ENSEMBLE, members=others), SITE)
    assert [(one.startup_s, one.job_start_s) for one in found] == [(0.5, 5.5), (0.5, 0.0)]


def test_numbers_of_gpus_without_enough_memory_are_known_to_later_runs(project: Project) -> None:
    keep(project, point(A, measured_at=1000.0))
    end = {"exit_code": 71, "reason": "out-of-memory", "description": "out of memory", "fault": False}
    runs = (
        ("first", A, [{"unfit_gpus": 4}, {"unfit_gpus": 2, "gpu_type": "V100"}]),
        ("second", B, [{"unfit_gpus": 1}]),
        # Neither has tried a number of GPUs; a smaller batch tells nothing of the one in the file.
        ("idle", A, []),
        ("smaller", replace(B, min_batch_size=1), [{"unfit_gpus": 1}, {}, {"unfit_gpus": 8}]),
    )
    with Catalog.open(project.home.catalog) as catalog:
        for at, (run, member, ends) in enumerate(runs, start=1100):
            events = EventWriter(begun(catalog, run, SITE, member, at).events, DRIVER, 0)
            for one in ends:
                events.write("task_ended", member=member.name, **end, **one)
        a, b = member_profiles(catalog, ENSEMBLE, SITE)
    assert (a.unfit, b.unfit) == ((("", 4), ("V100", 2)), (("", 1),))


def test_a_plan_on_more_gpus_than_were_measured_says_so() -> None:
    a = MemberProfile("a", {1: 100.0, 2: 190.0}, None, 1000)
    b = MemberProfile("b", {1: 100.0}, None, 1000, seen_rates={"": {4: 300.0}})

    def plan(**gpus: int) -> Plan:
        given = tuple(Allocation(name, count, DATA_PARALLEL, 1.0, ()) for name, count in gpus.items())
        return Plan("fluid", "makespan", 8, 4, 1.0, 1.0, 1.0, (Round(0, 1.0, given),))

    assert beyond_measured(plan(a=2, b=4), [a, b]) == []
    (warning,) = beyond_measured(plan(a=4, b=4), [a, b])
    assert warning == (
        "a: on more GPUs than were measured, up to 4, the rates are predicted;"
        " `hetctl profile --beyond --gpus 4` measures them"
    )


def test_a_newer_point_counts_more_than_earlier_seen_rates(project: Project) -> None:
    keep(project, point(A, measured_at=1000.0))
    with Catalog.open(project.home.catalog) as catalog:
        trained(catalog, "run", SITE, A, 80.0, at=1100.0)
        catalog.save_points("e", "here", [point(A, measured_at=1200.0)])
        a, _ = member_profiles(catalog, ENSEMBLE, SITE)
    assert a.seen_rates == {}


TWIN_A, TWIN_B = Member("a", {"units": 1, "lr": 0.1}), Member("b", {"units": 1, "lr": 0.2})
TWINS = Ensemble("e", "pytorch", Functions("m:i", "m:m"), (TWIN_A, TWIN_B), "/nowhere")


def of_member(member: Member, rate: float, at: float = 1.0, gpus: int = 1) -> ProfilePoint:
    """A point of an imported table, or from before there were shapes."""
    return ProfilePoint(member.name, gpus, rate, member.fingerprint, 32, at, MACHINE)


def of_shape(member: Member, rate: float, at: float = 1.0, *rate_keys: str) -> ProfilePoint:
    return replace(of_member(member, rate, at), shape=shape_digest(member, rate_keys))


def rates(member: Member, *points: ProfilePoint, ensemble: Ensemble = TWINS) -> list[float]:
    return [point.rate for point in RatePoints(points, ensemble).of(member.name)]


def test_a_point_of_a_shape_holds_for_all_its_members() -> None:
    assert rates(TWIN_A, of_shape(TWIN_A, 10.0)) == rates(TWIN_B, of_shape(TWIN_A, 10.0)) == [10.0]


def test_a_point_of_a_shape_outlives_edits_and_its_member() -> None:
    edited = replace(TWIN_A, name="c", config={"units": 1, "lr": 0.3})
    assert rates(edited, of_shape(TWIN_A, 10.0), ensemble=replace(TWINS, members=(edited,))) == [10.0]
    larger = replace(TWIN_A, config={"units": 2, "lr": 0.1})
    assert rates(larger, of_shape(TWIN_A, 10.0), ensemble=replace(TWINS, members=(larger,))) == []


def test_a_point_without_a_shape_is_own_and_lent_to_alike_ones() -> None:
    assert rates(TWIN_B, of_member(TWIN_A, 10.0)) == [10.0]
    assert rates(TWIN_B, of_member(TWIN_A, 10.0, at=2.0), of_member(TWIN_B, 20.0, at=1.0)) == [20.0]
    assert rates(TWIN_B, of_member(TWIN_A, 10.0, gpus=2), of_member(TWIN_B, 20.0)) == [20.0]


def test_of_the_shapes_points_and_own_ones_the_newest_count() -> None:
    own = of_member(TWIN_B, 20.0, at=1.0)
    assert rates(TWIN_B, own, of_shape(TWIN_A, 10.0, at=2.0)) == [10.0]
    assert rates(TWIN_B, own, of_shape(TWIN_A, 10.0, at=0.5)) == [20.0]
    assert rates(TWIN_A, own, of_shape(TWIN_A, 10.0, at=0.5)) == [10.0]


def test_other_rate_keys_lose_no_points_of_unchanged_members() -> None:
    keyed = replace(TWINS, rate_keys=("units",))
    assert (
        rates(TWIN_A, of_shape(TWIN_A, 10.0), ensemble=keyed)
        == rates(TWIN_B, of_shape(TWIN_A, 10.0), ensemble=keyed)
        == [10.0]
    )


def test_a_member_profiled_as_another_has_its_points_only() -> None:
    other = Member("c", {"units": 9}, profile_as="a")
    ensemble = replace(TWINS, members=(TWIN_A, TWIN_B, other))
    assert rates(other, of_member(other, 30.0, at=2.0), of_shape(TWIN_A, 10.0), ensemble=ensemble) == [10.0]


def test_each_point_that_holds_is_named_once() -> None:
    stale = replace(of_member(TWIN_A, 5.0), fingerprint="other")
    used = of_shape(TWIN_A, 10.0)
    points = RatePoints([stale, used], TWINS)
    assert points.every() == [used]
    assert (points.is_current(used), points.is_current(stale)) == (True, False)


MEMBERS = """\
name: dozen
framework: pytorch
functions: {input_fn: tiny_torch:input_fn, model_fn: tiny_torch:model_fn}
max_gpus: 1
stop: {metric: val_accuracy, patience: 5, max_epochs: 3}
members:
  - grid:
      name: net
      over: {units: [16, 64], learning_rate: [0.001, 0.002, 0.004, 0.008, 0.016, 0.032]}
"""
NEW = "  - {name: new, config: {units: 48, learning_rate: 0.004, rate: 640.0}}\n"


def test_a_dozen_members_of_two_shapes_need_two_points(tmp_path) -> None:
    """With ranks that pretend to measure and to train."""
    python = python_without_training(tmp_path)
    project = new_project(tmp_path / "project", MEMBERS, python=python, environment={"HETCTL_SITE": "local"})
    for module in ("tiny_torch.py", "handwriting.py"):
        shutil.copy(TINY / module, project.path)
    names = [member.name for member in read_ensemble(project.path / "ensemble.yaml").members]
    done = project.here("profile", "--json")
    assert (done.code, done.json["measured"]) == (0, 2)
    assert [(point["member"], point["gpus"]) for point in done.json["points"]] == [
        ("net-units-16-learning_rate-0.001", 1),
        ("net-units-64-learning_rate-0.001", 1),
    ]
    assert [[shape["member"], *shape["shared_by"]] for shape in done.json["shapes"]] == [names[:6], names[6:]]
    shown = project.here("profile", "show").stdout
    assert "12 members of 2 shapes" in shown
    assert f"{names[0]} is measured for {', '.join(names[1:6])}" in " ".join(shown.split())

    (project.path / "ensemble.yaml").write_text(MEMBERS + NEW)
    planned = project.here("plan", "--explain", "--json")
    assert planned.code == 0
    run = project.here("submit", "--wait", "--json")
    assert (run.code, run.json["state"]) == (0, "finished")
    assert project.epochs("dozen-001") == {name: [1, 2, 3] for name in (*names, "new")}
    spec = read_spec(project.home.run("dozen-001"))
    assert {profile.member: profile.has_rates for profile in spec.profiles} == {
        **dict.fromkeys(names, True), "new": False,
    }  # fmt: skip
    again = project.here("plan", "--json").json
    (given,) = [a for planned in again["rounds"] for a in planned["allocations"] if a["member"] == "new"]
    assert given["rate"] == 640.0


def test_more_points_of_a_member_need_no_more_digests(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[str] = []
    really = Member.digest_with

    def counted(member: Member, config: Any) -> str:
        digests.append(member.name)
        return really(member, config)

    monkeypatch.setattr(Member, "digest_with", counted)

    def made(sizes: range) -> int:
        keep(project, *(point(member, gpus) for member in (A, B) for gpus in sizes))
        digests.clear()
        with Catalog.open(project.home.catalog) as catalog:
            assert [len(profile.rates) for profile in profiles_at(catalog, ENSEMBLE, "here")] == [
                len(sizes)
            ] * 2
        return len(digests)

    few = made(range(1, 3))
    assert made(range(1, 40)) <= few
