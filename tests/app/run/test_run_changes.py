"""What of a run may change: tables that miss nothing, and words for every difference."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from hetctl.app.run import changes
from hetctl.app.run.changes import changes_among, differences, refuse_what_is_kept
from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.errors import BadInputError
from hetctl.model.run import Budget, RunSpec
from hetctl.model.site import NodeType, Queue, Site

SITE = Site("lab", "slurm", "srun", 4, 2, 8, 10**9, (Queue("gpu", 4, 3600),), account="ml-42")
MEMBERS = tuple(Member(name, {"lr": 0.01, "layers": 2}) for name in "abcde")
ENSEMBLE = Ensemble("e", "pytorch", Functions("m:i", "m:f"), MEMBERS, "/shared/e")
SPEC = RunSpec("e-001", ENSEMBLE, SITE, "fluid", 4, "gpu", 3600, 180, (), "/shared/c")

# Fields that are compared elsewhere, or that nobody can ask to be otherwise.
ELSEWHERE = {
    RunSpec: {"run", "ensemble", "site", "options", "budget", "wall_s", "modules"}
    | {"grace_s", "profiles", "checkpoints", "preprocess", "given", "schema_version", "phases", "pipelines"}
    | {"earlier_jobs", "revision", "edits", "edited", "predicted_s"},
    Ensemble: {"members"},
    Member: {"stop"},
}


def of_members(**edits):
    """The run if each of some members were otherwise."""
    members = tuple(replace(m, **edits.get(m.name, {})) for m in MEMBERS)
    return replace(SPEC, ensemble=replace(ENSEMBLE, members=members))


def said(now):
    """The refusal of a run that would be otherwise."""
    with pytest.raises(BadInputError) as caught:
        refuse_what_is_kept(differences(SPEC, now), "e-001")
    return caught.value


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        (changes.RUN, RunSpec),
        (changes.SITE, Site),
        (changes.ENSEMBLE, Ensemble),
        (changes.MEMBER, Member),
        (changes.STOP, StopRule),
    ],
)
def test_every_field_is_decided_on(table, kind):
    named = {field.name for field in fields(kind)} - ELSEWHERE.get(kind, set())
    extra = {"time"} | {field.name for field in fields(Budget)} - {"since"} if kind is RunSpec else set()
    assert set(table) == named | extra
    assert all(rule.reason for rule in table.values())


def test_without_any_difference_there_is_nothing_to_say():
    assert differences(SPEC, replace(SPEC, ensemble=replace(ENSEMBLE, members=MEMBERS[::-1]))) == []
    refuse_what_is_kept([], "e-001")


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (replace(SPEC, site=replace(SITE, account="ml-43")), "account: ml-43 (was ml-42)"),
        (replace(SPEC, site=replace(SITE, account=None)), "account: none (was ml-42)"),
        (replace(SPEC, wall_s=5400), "time: 1h30m (was 1h)"),
        (replace(SPEC, gpus=8), "gpus: 8 (was 4)"),
        (replace(SPEC, options={"fuse": True}), "fuse: true (was false)"),
        (replace(SPEC, retries=0), "retries: 0 (was 2)"),
        (replace(SPEC, chain=True), "chain: true (was false)"),
        (replace(SPEC, budget=Budget(max_jobs=3)), "max_jobs: 3 (was none)"),
        (replace(SPEC, site=replace(SITE, setup=("module load x",))), 'setup: ["module load x"] (was none)'),
        (replace(SPEC, site=replace(SITE, queue="gpu")), "the site's queue: gpu (was none)"),
        (of_members(b={"stop": StopRule(max_epochs=200)}), "max_epochs of b: 200 (was 100)"),
        (of_members(b={"max_gpus": 2}, d={"max_gpus": 2}), "max_gpus of b, d: 2 (was none)"),
        (
            of_members(**{name: {"stop": StopRule(patience=9)} for name in "abcde"}),
            "patience of a, b, c and 2 more: 9 (was 5)",
        ),
    ],
)
def test_what_may_change_is_said_with_what_it_was(now, words):
    found = differences(SPEC, now)
    refuse_what_is_kept(found, "e-001")
    assert [str(change) for change in changes_among(found)] == [words]


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (replace(SPEC, planner="doubling"), "--planner doubling"),
        (replace(SPEC, options={"relative_delta": 0.5}), "--relative-delta 0.5"),
        (replace(SPEC, options={"mix_types": True}), "--mix-types"),
        (replace(SPEC, mode="auto"), "--mode auto"),
        (replace(SPEC, sharing="cached"), "--sharing cached"),
        (replace(SPEC, site=replace(SITE, name="local", device="slot")), "--site local"),
        (replace(SPEC, site=replace(SITE, device="slot")), "device"),
        (of_members(b={"config": {"lr": 0.1, "layers": 2}}), "lr: 0.1, was 0.01"),
        (of_members(b={"config": {"lr": 0.01, "units": 8}}), "layers: not there, was 2; units: 8"),
        (of_members(b={"batch_size": 64}), "batch_size of b"),
        (of_members(b={"seed": 64}), "seed of b"),
        (of_members(b={"stop": StopRule(metric="loss")}), "metric of b"),
        (replace(SPEC, ensemble=replace(ENSEMBLE, members=(*MEMBERS[1:], Member("f")))), "member a"),
        (replace(SPEC, ensemble=replace(ENSEMBLE, framework="tensorflow")), "framework"),
        (replace(SPEC, ensemble=replace(ENSEMBLE, functions=Functions("m:i", "m:g"))), "model_fn: m:g"),
        (replace(SPEC, ensemble=replace(ENSEMBLE, data="/shared/d")), "data"),
    ],
)
def test_what_a_run_keeps_is_refused_by_name(now, named):
    error = said(now)
    assert named in error.message.splitlines()[0]
    assert "--new" in error.hint
    assert error.exit_code == 2


def test_everything_is_refused_at_once():
    error = said(replace(of_members(b={"seed": 1}, c={"batch_size": 1}), planner="doubling"))
    assert [line.partition(" ")[0] for line in error.message.splitlines()] == ["run", "seed", "batch_size"]


def test_equal_changes_of_many_members_are_one_line_with_a_count():
    members = tuple(replace(m, name=f"m{i}", seed=i) for i, m in enumerate(MEMBERS * 10))
    spec = replace(SPEC, ensemble=replace(ENSEMBLE, members=members))
    edited = tuple(replace(m, seed=m.seed + 1, batch_size=64) for m in members)
    found = differences(spec, replace(spec, ensemble=replace(ENSEMBLE, members=edited)))
    with pytest.raises(BadInputError) as caught:
        refuse_what_is_kept(found, "e-001")
    lines = caught.value.message.splitlines()
    assert sum("m0, m1, m2 and 47 more" in line for line in lines) == 1
    assert (len(lines), lines[-1]) == (changes.MOST_LINES + 1, "and 31 more")


def test_types_of_nodes_may_be_described_better():
    types = (NodeType("V100", 4, ("n*",)),)
    found = differences(SPEC, replace(SPEC, site=replace(SITE, node_types=types)))
    assert [change.what for change in changes_among(found)] == ["node_types"]
