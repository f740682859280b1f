"""Which members a measured point holds for, and a real profile of a dozen members of two shapes."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from workbench import TINY, new_project

from hetctl.app.profile.rate_points import RatePoints
from hetctl.catalog.catalog import Catalog
from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.profile import Hardware, ProfilePoint
from hetctl.model.rate_shapes import shape_digest
from hetctl.storage.run_files import read_spec

A, B = Member("a", {"units": 1, "lr": 0.1}), Member("b", {"units": 1, "lr": 0.2})
ENSEMBLE = Ensemble("e", "pytorch", Functions("m:i", "m:m"), (A, B), "/nowhere")
MACHINE = Hardware("V100", "535", "torch 2")


def of_member(member: Member, rate: float, at: float = 1.0, gpus: int = 1) -> ProfilePoint:
    """A point of an imported table, or from before there were shapes."""
    return ProfilePoint(member.name, gpus, rate, member.fingerprint, 32, at, MACHINE)


def of_shape(member: Member, rate: float, at: float = 1.0, *rate_keys: str) -> ProfilePoint:
    return replace(of_member(member, rate, at), shape=shape_digest(member, rate_keys))


def rates(member: Member, *points: ProfilePoint, ensemble: Ensemble = ENSEMBLE) -> list[float]:
    return [point.rate for point in RatePoints(points, ensemble).of(member.name)]


def test_a_point_of_a_shape_holds_for_all_its_members() -> None:
    assert rates(A, of_shape(A, 10.0)) == rates(B, of_shape(A, 10.0)) == [10.0]


def test_a_point_of_a_shape_outlives_edits_and_its_member() -> None:
    edited = replace(A, name="c", config={"units": 1, "lr": 0.3})
    assert rates(edited, of_shape(A, 10.0), ensemble=replace(ENSEMBLE, members=(edited,))) == [10.0]
    larger = replace(A, config={"units": 2, "lr": 0.1})
    assert rates(larger, of_shape(A, 10.0), ensemble=replace(ENSEMBLE, members=(larger,))) == []


def test_a_point_without_a_shape_is_own_and_lent_to_alike_ones() -> None:
    assert rates(B, of_member(A, 10.0)) == [10.0]
    assert rates(B, of_member(A, 10.0, at=2.0), of_member(B, 20.0, at=1.0)) == [20.0]
    assert rates(B, of_member(A, 10.0, gpus=2), of_member(B, 20.0)) == [20.0]


def test_of_the_shapes_points_and_own_ones_the_newest_count() -> None:
    own = of_member(B, 20.0, at=1.0)
    assert rates(B, own, of_shape(A, 10.0, at=2.0)) == [10.0]
    assert rates(B, own, of_shape(A, 10.0, at=0.5)) == [20.0]
    assert rates(A, own, of_shape(A, 10.0, at=0.5)) == [10.0]


def test_other_rate_keys_lose_no_points_of_unchanged_members() -> None:
    keyed = replace(ENSEMBLE, rate_keys=("units",))
    assert (
        rates(A, of_shape(A, 10.0), ensemble=keyed) == rates(B, of_shape(A, 10.0), ensemble=keyed) == [10.0]
    )


def test_a_member_profiled_as_another_has_its_points_only() -> None:
    other = Member("c", {"units": 9}, profile_as="a")
    ensemble = replace(ENSEMBLE, members=(A, B, other))
    assert rates(other, of_member(other, 30.0, at=2.0), of_shape(A, 10.0), ensemble=ensemble) == [10.0]


def test_each_point_that_holds_is_named_once() -> None:
    stale = replace(of_member(A, 5.0), fingerprint="other")
    used = of_shape(A, 10.0)
    points = RatePoints([stale, used], ENSEMBLE)
    assert points.every() == [used]
    assert (points.is_current(used), points.is_current(stale)) == (True, False)


MEMBERS = """\
name: dozen
framework: pytorch
functions: {input_fn: tiny_torch:input_fn, model_fn: tiny_torch:model_fn}
max_gpus: 1
stop: {metric: val_accuracy, patience: 5, max_epochs: 1}
members:
  - grid:
      name: net
      over: {units: [16, 64], learning_rate: [0.001, 0.002, 0.004, 0.008, 0.016, 0.032]}
"""
NEW = "  - {name: new, config: {units: 48, learning_rate: 0.004}}\n"


@pytest.mark.training
def test_a_dozen_members_of_two_shapes_need_two_points(tmp_path) -> None:
    project = new_project(tmp_path / "project", MEMBERS, environment={"HETCTL_SITE": "local"})
    for module in ("tiny_torch.py", "handwriting.py"):
        shutil.copy(TINY / module, project.path)
    names = [member.name for member in read_ensemble(project.path / "ensemble.yaml").members]
    done = project.hetctl("profile", "--json")
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
    refused = project.here("submit", "--json")
    assert (refused.code, refused.error["message"]) == (2, "no profile of new")
    planned = project.here("plan", "--explain", "--predict-rates")
    assert "rates predicted from those of" in " ".join(planned.stdout.split())
    assert f"the rates of new are predicted from those of {names[6]}" in planned.stderr
    run = project.hetctl("submit", "--predict-rates", "--wait", "--json")
    assert (run.code, run.json["state"]) == (0, "finished")
    assert project.epochs("dozen-001") == {name: [1] for name in (*names, "new")}

    spec = read_spec(project.home.run("dozen-001"))
    predicted = {profile.member: profile.predicted_from for profile in spec.profiles}
    assert predicted == {**dict.fromkeys(names, ""), "new": names[6]}
    with Catalog.open_to_read(project.home.catalog) as catalog:
        (seen,) = [epoch.rate for epoch in catalog.epochs("dozen-001")["new"]]
    again = project.here("plan", "--explain", "--predict-rates", "--json").json
    (given,) = [a for planned in again["rounds"] for a in planned["allocations"] if a["member"] == "new"]
    assert given["rate"] == seen
