from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetctl.catalog.catalog import Catalog
from hetctl.catalog.stored_runs import RunRecord
from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.errors import BadInputError
from hetctl.model.job import Job, JobState
from hetctl.model.plan import Allocation, Forecast, Placement, Plan, Round
from hetctl.model.profile import (
    INTER_NODE,
    INTRA_NODE,
    Hardware,
    LayerPoint,
    LinkPoint,
    MeasuredLayer,
    MemberProfile,
    PreprocessPoint,
    ProfilePoint,
)
from hetctl.model.run import Budget, RunSpec
from hetctl.model.serialization import decode
from hetctl.model.site import Queue, Site

ENSEMBLE = Ensemble(
    "digits",
    "tensorflow",
    Functions("digits:input_fn", "digits:model_fn"),
    (
        Member("mlp", {"layers": [64, 32], "dropout": 0.5, "name": "é"}, 16, 7),
        Member("cnn", stop=StopRule("val_accuracy", "max", target=0.97), max_gpus=4),
    ),
    "/project",
    "digits.npz",
)
SITE = Site(
    *("docker", "slurm", "srun", 2, 4, 8, 2**36),
    queues=(Queue("short", 2, 3600), Queue("long")),
    environment={"OMP_NUM_THREADS": "1"},
    setup=("module load cuda",),
)
ALLOCATION = Allocation("mlp", 2, "data-parallel", 123.25, (Placement("n0", (0, 1)),))
PLAN = Plan(
    *("flotilla", "makespan", 8, 4, 90.0, 60.0, 1.5),
    rounds=(Round(0, 90.0, (ALLOCATION,)),),
    members=(Forecast("mlp", 90.0, 80.0),),
    options={"alpha": 0.8, "delta": None},
)
KEPT = replace(PLAN, rounds=())
"""What a run keeps of its plan."""
JOB = Job(0, "hetctl-digits-1-0-a", "", JobState.SUBMITTING, 2, 3600, 12.5)
SPEC = RunSpec(
    *("digits-1", ENSEMBLE, SITE, "flotilla", 8, "batch", 3600, 60),
    profiles=(MemberProfile("mlp", {1: 100.0, 2: 180.5}, samples=1e6),),
    checkpoints="/project/.hetctl/checkpoints",
    budget=Budget(max_jobs=3),
)
V100 = Hardware("V100", "535.1", "tensorflow 2.18.1")
POINT = ProfilePoint("mlp", 1, 100.5, "f0", 16, 1000.0, V100, samples_per_epoch=1437, peak_memory_bytes=2**40)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog.open(tmp_path / "catalog.db") as opened:
        yield opened


def test_a_run_is_stored_with_its_first_job(catalog: Catalog) -> None:
    catalog.add_run(SPEC, PLAN, 1.0, JOB)
    assert catalog.jobs("digits-1") == [JOB]
    catalog.remove_job("digits-1", 0)
    assert catalog.jobs("digits-1") == []
    catalog.save_job("digits-1", JOB)
    catalog.remove_run("digits-1")
    assert catalog.runs() == catalog.jobs("digits-1") == []


def test_every_catalog_has_an_identity_of_its_own(tmp_path: Path) -> None:
    identities = []
    for name in ("a", "b", "a"):
        with Catalog.open(tmp_path / name) as catalog:
            identities.append(catalog.identity)
    assert identities[0] == identities[2] != identities[1]


def test_values_are_equal_in_a_catalog_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    job = replace(JOB, batch_id="4711", state=JobState.FAILED, exit_code=137, failed_nodes=("n1", "n2"))
    with Catalog.open(path) as catalog:
        catalog.save_ensemble(ENSEMBLE)
        catalog.save_site(SITE)
        catalog.save_points("digits", "docker", [POINT])
        catalog.save_points("digits", "docker", [PreprocessPoint(1, 900.0)])
        catalog.save_plan("digits", "docker", PLAN, 1.0)
        catalog.add_run(SPEC, PLAN, 2.0, JOB)
        catalog.save_job("digits-1", job)
    with Catalog.open(path) as catalog:
        assert catalog.ensemble("digits") == ENSEMBLE
        assert catalog.site("docker") == SITE
        assert catalog.points("digits", "docker") == [POINT]
        assert catalog.preprocess("digits", "docker") == [PreprocessPoint(1, 900.0)]
        assert catalog.run("digits-1") == RunRecord(SPEC, KEPT, 2.0, "queued", "")
        assert catalog.jobs("digits-1") == [job]
    assert plans_in(path) == [("digits", "docker", PLAN)]


def test_the_ensemble_saved_last_is_last(catalog: Catalog) -> None:
    other = replace(ENSEMBLE, name="other")
    for ensemble in (ENSEMBLE, other, ENSEMBLE):
        catalog.save_ensemble(ensemble)
    assert catalog.ensembles() == ["other", "digits"]


def test_an_edited_ensemble_replaces_members_and_keeps_points(catalog: Catalog) -> None:
    catalog.save_ensemble(ENSEMBLE)
    catalog.save_points("digits", "docker", [POINT])
    edited = replace(ENSEMBLE, members=(ENSEMBLE.members[1], Member("resnet")))
    catalog.save_ensemble(edited)
    assert catalog.ensemble("digits") == edited
    assert catalog.points("digits", "docker") == [POINT]


def test_the_newest_point_wins_whatever_the_order(catalog: Catalog) -> None:
    newer = replace(POINT, rate=200.0, measured_at=2000.0)
    catalog.save_points("digits", "docker", [newer, POINT])
    catalog.save_points("digits", "docker", [POINT])
    assert catalog.points("digits", "docker") == [newer]
    again = replace(newer, rate=201.0)
    catalog.save_points("digits", "docker", [again])
    assert catalog.points("digits", "docker") == [again]


def test_points_differ_by_member_gpus_type_fingerprint_and_site(catalog: Catalog) -> None:
    others = [
        replace(POINT, fingerprint="f1", measured_at=1001.0),
        replace(POINT, machine=replace(V100, gpu_type="A100"), measured_at=1002.0),
        replace(POINT, gpus=2),
        replace(POINT, gpus=10),
        replace(POINT, member="zzz"),
    ]
    catalog.save_points("digits", "docker", [*reversed(others), POINT])
    catalog.save_points("digits", "summit", [replace(POINT, rate=1.0)])
    assert catalog.points("digits", "docker") == [POINT, *others]


def test_preprocess_points_replace_those_on_as_many_cores(catalog: Catalog) -> None:
    catalog.save_points("digits", "docker", [PreprocessPoint(4, 3.0), PreprocessPoint(1, 1.0)])
    catalog.save_points("digits", "docker", [PreprocessPoint(4, 3.5)])
    catalog.save_points("digits", "docker", [])
    assert catalog.preprocess("digits", "docker") == [PreprocessPoint(1, 1.0), PreprocessPoint(4, 3.5)]


def test_plans_are_kept_in_the_order_in_which_they_were_saved(tmp_path: Path) -> None:
    newer = replace(PLAN, gpus=4)
    with Catalog.open(tmp_path / "catalog.db") as catalog:
        catalog.save_plan("digits", "docker", PLAN, 1.0)
        catalog.save_plan("digits", "docker", newer, 1.0)
        catalog.save_plan("digits", "summit", PLAN, 9.0)
    assert plans_in(tmp_path / "catalog.db") == [
        ("digits", "docker", PLAN),
        ("digits", "docker", newer),
        ("digits", "summit", PLAN),
    ]


def plans_in(path: Path) -> list[tuple[str, str, Plan]]:
    """Return the stored plans by number, with ensemble and site."""
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT ensemble, site, value FROM plans ORDER BY id").fetchall()
    return [(ensemble, site, decode(Plan, json.loads(value))) for ensemble, site, value in rows]


def test_runs_are_listed_oldest_first_with_their_state(catalog: Catalog) -> None:
    other = replace(SPEC, run="other-1", ensemble=replace(ENSEMBLE, name="other"))
    catalog.add_run(SPEC, PLAN, 5.0, JOB)
    catalog.add_run(other, PLAN, 4.0, replace(JOB, name="other"))
    catalog.set_run_state("digits-1", "failed", "2 members failed")
    assert [record.spec.run for record in catalog.runs()] == ["other-1", "digits-1"]
    assert catalog.runs("digits") == [RunRecord(SPEC, KEPT, 5.0, "failed", "2 members failed")]


def test_a_run_may_be_granted_another_budget(catalog: Catalog) -> None:
    catalog.add_run(SPEC, PLAN, 1.0, JOB)
    more = replace(SPEC, budget=Budget(max_jobs=9))
    catalog.save_spec(more)
    assert catalog.runs() == [RunRecord(more, KEPT, 1.0, "queued", "")]


def test_a_second_run_of_the_same_name_is_refused(catalog: Catalog) -> None:
    catalog.add_run(SPEC, PLAN, 1.0, JOB)
    with pytest.raises(BadInputError, match="run 'digits-1' is in the catalog"):
        catalog.add_run(SPEC, replace(PLAN, gpus=1), 2.0, JOB)
    assert catalog.runs() == [RunRecord(SPEC, KEPT, 1.0, "queued", "")]


def test_an_unknown_run_is_refused(catalog: Catalog) -> None:
    for change in (
        lambda: catalog.set_run_state("none", "running"),
        lambda: catalog.save_spec(replace(SPEC, run="none")),
        lambda: catalog.save_job("none", JOB),
    ):
        with pytest.raises(BadInputError, match="no run 'none'"):
            change()
    assert catalog.jobs("none") == []


def test_a_job_is_replaced_by_its_number(catalog: Catalog) -> None:
    catalog.add_run(SPEC, PLAN, 1.0, JOB)
    first = replace(JOB, batch_id="11", state=JobState.PENDING)
    second = Job(1, "hetctl-digits-1-1-b", "12", JobState.PENDING, 1, 60, 9.0)
    catalog.save_job("digits-1", second)
    catalog.save_job("digits-1", first)
    ended = replace(first, state=JobState.TIMEOUT, ended_at=60.5)
    catalog.save_job("digits-1", ended)
    assert catalog.jobs("digits-1") == [ended, second]


NUMBERS = st.floats(min_value=1e-6, max_value=1e12, allow_nan=False)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
MEMBERS = st.builds(
    Member,
    name=st.text(min_size=1, max_size=5),
    config=st.dictionaries(st.text(), JSON_VALUES, max_size=3),
    batch_size=st.integers(1, 4096),
    max_gpus=st.none() | st.integers(1, 8),
    global_batch_size=st.none() | st.integers(1, 4096),
    min_gpus=st.integers(1, 8),
    deterministic=st.booleans(),
    shard=st.booleans(),
)
NUMBERED = itertools.count()
POINTS = st.builds(
    ProfilePoint,
    member=st.sampled_from("abc"),
    gpus=st.integers(1, 4),
    rate=NUMBERS,
    fingerprint=st.sampled_from(["f0", "f1"]),
    batch_size=st.integers(1, 4096),
    measured_at=NUMBERS,
    machine=st.builds(Hardware, st.sampled_from(["V100", "A100"]), st.text(), st.text()),
    samples=st.none() | NUMBERS,
    samples_per_epoch=st.none() | st.integers(1, 2**40),
    peak_memory_bytes=st.integers(0, 2**50),
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(MEMBERS, max_size=4, unique_by=lambda member: member.name))
def test_any_ensemble_comes_back_as_it_was(catalog: Catalog, members: list[Member]) -> None:
    ensemble = replace(ENSEMBLE, members=tuple(members))
    catalog.save_ensemble(ensemble)
    assert catalog.ensemble("digits") == ensemble


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), points=st.lists(POINTS, max_size=12, unique_by=lambda point: point.measured_at))
def test_points_are_the_newest_in_any_order_of_saving(
    catalog: Catalog, data: st.DataObject, points: list[ProfilePoint]
) -> None:
    newest: dict[tuple[str, int, str, str], ProfilePoint] = {}
    for point in sorted(points, key=lambda point: point.measured_at):
        newest[point.member, point.gpus, point.machine.gpu_type, point.fingerprint] = point
    site = f"site-{next(NUMBERED)}"
    split = data.draw(st.integers(0, len(points)))
    catalog.save_points("digits", site, points[:split])
    catalog.save_points("digits", site, points[split:])
    found = catalog.points("digits", site)
    assert set(found) == set(newest.values())
    assert len(found) == len(newest)
    assert [(p.member, p.gpus) for p in found] == sorted((p.member, p.gpus) for p in found)


LAYERS = LayerPoint(
    *("mlp", "f0", 16, 1000.0, V100, 1437, 2**29), (MeasuredLayer("dense", 0.1, 0.2, 64, 128, 256, 2**33),)
)


def test_the_newest_layers_of_each_type_and_fingerprint_are_kept(catalog: Catalog) -> None:
    newer = replace(LAYERS, measured_at=2000.0)
    edited = replace(LAYERS, fingerprint="f1", measured_at=3000.0)
    other = replace(LAYERS, machine=replace(V100, gpu_type="P100"))
    catalog.save_points("digits", "docker", [newer, other, edited])
    catalog.save_points("digits", "docker", [LAYERS])
    assert catalog.layers("digits", "docker") == [other, newer, edited]
    assert catalog.layers("digits", "elsewhere") == []


def test_the_newest_links_of_each_kind_are_kept(catalog: Catalog) -> None:
    within = LinkPoint(INTRA_NODE, ("n0", "n0"), 1000.0, ((100.0, 0.5), (200.0, 0.75)))
    between = LinkPoint(INTER_NODE, ("n0", "n1"), 1000.0, ((100.0, 1.5),))
    catalog.save_points("digits", "docker", [replace(within, measured_at=2000.0), between])
    catalog.save_points("digits", "docker", [within])
    assert catalog.links("docker") == [between, replace(within, measured_at=2000.0)]
