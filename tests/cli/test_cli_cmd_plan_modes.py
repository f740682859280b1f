"""`hetctl plan --mode auto`: which mode each network gets, what it is said to cost, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pipelined_run import task_started
from workbench import greedy_slurm, new_project

from hetctl.app.plan import planning
from hetctl.catalog.catalog import Catalog
from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.events import DRIVER
from hetctl.model.pipelines import WaveRecord
from hetctl.model.profile import INTER_NODE, INTRA_NODE, Hardware, LayerPoint, LinkPoint, MeasuredLayer
from hetctl.runtime.stages.pipeline_trainer import WaveRecorder
from hetctl.scheduling.planners.base import options_from
from hetctl.storage.event_files import EventWriter
from hetctl.storage.run_files import read_spec

SITE = """\
extends: slurm
nodes: 4
gpus_per_node: 2
gpu_type: null
gpu_memory: 16GB
memory_per_node: 64GB
node_types:
  - {gpu_type: V100, nodes: 2, hosts: ["a*"]}
  - {gpu_type: P100, nodes: 2, hosts: ["b*"]}
queues: [{name: gpu, max_nodes: 4, max_wall: 24h}]
queue: gpu
"""
LINKS = """\
links:
  intra_node: {bytes_per_s: 16.0e9, scaling: 0.7}
  inter_node: {latency_s: 1.0e-5, bytes_per_s: 10.0e9}
"""
ENSEMBLE = """\
name: trio
framework: tensorflow
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
stop: {max_epochs: 4}
samples_per_epoch: 6400
members:
"""
LAYERS = "layer,gpu_type,forward_s,backward_s,activation_bytes,parameter_bytes\n" + "".join(
    f"l{i},{gpu_type},{seconds},{2 * seconds},4000000,600000000\n"
    for i in range(24)
    for gpu_type, seconds in (("V100", 0.004), ("P100", 0.008))
)
GIANT = "  - {name: giant, config: {blocks: 24}, layers: giant.csv}\n"
ON_8_GPUS = ("--site", "mini", "--gpus", "8", "--time", "24h", "--solver-time-limit", "0.2")


class Mini:
    """A project at a small machine with two types of GPU."""

    def __init__(self, folder, members, keys="", site=SITE + LINKS, scaling=0.9):
        folder.mkdir(exist_ok=True)
        self.project = new_project(
            folder / "project", ENSEMBLE.replace("members:", f"{keys}members:") + members
        )
        sites = self.project.path / "site-configs"
        sites.mkdir()
        (sites / "mini.yaml").write_text(site)
        (self.project.path / "giant.csv").write_text(LAYERS)
        names = [line.split("name: ")[1].split(",")[0].rstrip("}") for line in members.splitlines()]
        rows = [
            f"{name},{gpus},{rate * gpus**scaling},{gpu_type}\n"
            for name in names
            if name != "giant"
            for gpu_type, rate in (("V100", 200.0), ("P100", 100.0))
            for gpus in (1, 2, 4, 8)
        ]
        (self.project.path / "measured.csv").write_text("member,gpus,rate,gpu_type\n" + "".join(rows))
        if rows:
            assert self.project.here("profile", "import", "measured.csv", "--site", "mini").code == 0

    def plan(self, *arguments):
        return self.project.here("plan", *ON_8_GPUS, *arguments)

    def auto(self, *arguments):
        done = self.plan("--mode", "auto", "--json", *arguments)
        assert done.code == 0, done.stderr
        return done.json


def small(count, epochs=4):
    return "".join(f"  - {{name: m{i}, stop: {{max_epochs: {epochs}}}}}\n" for i in range(count))


def modes(plan):
    return {choice["member"]: choice["mode"] for choice in plan["choices"]}


ONE_TYPE = (SITE + LINKS).replace("gpu_type: P100", "gpu_type: V100")
"""All GPUs are alike, so that members that hop need not visit slow ones."""
UNKNOWN = "  - {name: giant, config: {blocks: 24}}\n"
"""A member of another shape than all others; its rates are imported by no test."""
LONG = "  - {name: long, stop: {max_epochs: 9}}\n"
ALL_GPUS = ("--planner", "fixed-8")
"""Data-parallel training on all GPUs at a time, which scale badly (0.5) where hops are to be cheaper."""


def test_modes_that_need_a_rate_are_not_considered_before_it_is_known(tmp_path):
    """Rates are imported of all members but `giant`."""
    mini = Mini(tmp_path, small(2) + UNKNOWN, "partitions: 4\n", ONE_TYPE, 0.5)
    plan = mini.auto()
    assert set(modes(plan).values()) == {"data-parallel"}
    reason = {choice["member"]: choice["reason"] for choice in plan["choices"]}
    assert "hopping was not considered, as no rate of giant is known yet" in reason["m0"]
    assert "no pipeline was considered, as its layers are not known" in reason["giant"]
    assert "no pipeline" not in reason["m0"]


def test_members_hop_without_a_profile(tmp_path):
    mini = Mini(tmp_path, small(2, epochs=1) + UNKNOWN, READ, ONE_TYPE)
    done = mini.plan("--mode", "hopper", "--time", "1m", "--json")
    assert done.code == 0, done.stderr
    reason = {choice["member"]: choice["reason"] for choice in done.json["choices"]}
    assert "visits count as equally long until the first have ended" in reason["giant"]
    assert "equally long" not in reason["m0"]


def test_each_network_gets_the_mode_that_suits_it(tmp_path):
    plan = Mini(tmp_path, small(6) + GIANT, "partitions: 4\n", ONE_TYPE, 0.5).auto(*ALL_GPUS)
    assert modes(plan) == {**dict.fromkeys([f"m{i}" for i in range(6)], "hopper"), "giant": "pipeline"}
    reason = {choice["member"]: choice["reason"] for choice in plan["choices"]}
    assert all(reason.values())
    assert [phase["mode"] for phase in plan["phases"]] == ["pipeline", "hopper"]
    (only,) = plan["rounds"]
    (giant,) = only["allocations"]
    assert (giant["member"], giant["mode"]) == ("giant", "pipeline")
    ranks = [stage["rank"] for stages in giant["pipeline"]["workers"] for stage in stages]
    assert sorted(ranks) == list(range(giant["gpus"]))


def test_a_member_that_needs_several_gpus_does_not_hop(tmp_path):
    members = small(6).replace("m0,", "m0, min_gpus: 2,")
    mini = Mini(tmp_path, members, "partitions: 4\n", ONE_TYPE, 0.5)
    plan = mini.auto(*ALL_GPUS)
    assert set(modes(plan).values()) == {"data-parallel"}
    assert all("hopper" not in phase["makespans_s"] for phase in plan["phases"])
    done = Mini(tmp_path / "located", members, READ, ONE_TYPE, 0.5).plan("--mode", "hopper")
    assert (done.code, "m0" in done.stderr) == (3, True)


def test_phases_follow_one_another_and_have_their_prices(tmp_path):
    mini = Mini(tmp_path, small(5) + LONG + GIANT, "partitions: 8\n", ONE_TYPE, 0.5)
    plan = mini.auto(*ALL_GPUS)
    first, second, third = plan["phases"]
    assert (first["members"], third["members"]) == (["giant"], ["long"])
    assert set(second["members"]) == {"m0", "m1", "m2", "m3", "m4", "long"}
    assert second["start_s"] >= first["start_s"] + first["predicted_s"]
    assert third["start_s"] >= second["start_s"] + second["predicted_s"]
    assert plan["predicted_makespan_s"] == pytest.approx(third["start_s"] + third["predicted_s"])
    for phase in plan["phases"]:
        assert phase["makespans_s"][phase["mode"]] == phase["predicted_s"]
    assert set(second["makespans_s"]) == set(third["makespans_s"]) == {"hopper", "data-parallel"}
    starts = {each["allocations"][0]["member"]: each["start_s"] for each in reversed(plan["rounds"])}
    assert (starts["giant"], starts["long"]) == (first["start_s"], third["start_s"])
    done = {forecast["member"]: forecast["done_s"] for forecast in plan["members"]}
    assert max(done.values()) == done["long"] == pytest.approx(plan["predicted_makespan_s"])
    assert plan["lower_bound_s"] <= plan["predicted_makespan_s"]
    assert plan["ratio"] == pytest.approx(plan["predicted_makespan_s"] / plan["lower_bound_s"])


def test_members_hop_only_if_that_is_estimated_to_be_faster(tmp_path):
    """On two types of GPU every member that hops visits the slow ones."""
    plan = Mini(tmp_path, small(6), "partitions: 4\n").auto()
    (phase,) = plan["phases"]
    assert phase["mode"] in ("data-parallel", "balanced")
    assert phase["makespans_s"][phase["mode"]] < phase["makespans_s"]["hopper"]


def test_few_members_or_unpartitioned_data_are_data_parallel(tmp_path):
    for folder, count, keys in ((tmp_path / "few", 4, "partitions: 4\n"), (tmp_path / "whole", 6, "")):
        plan = Mini(folder, small(count), keys).auto()
        assert set(modes(plan).values()) == {"data-parallel"}
        assert {a["member"] for one in plan["rounds"] for a in one["allocations"]} == set(modes(plan))


def test_a_group_on_several_gpu_types_has_balanced_batches(tmp_path):
    plan = Mini(tmp_path, small(1), scaling=1.0).auto()
    (phase,) = plan["phases"]
    assert phase["mode"] == "balanced"
    assert phase["makespans_s"]["balanced"] < phase["makespans_s"]["data-parallel"]
    (allocation,) = plan["rounds"][0]["allocations"]
    assert allocation["batch_sizes"] == [43, 43, 43, 43, 21, 21, 21, 21]
    assert sum(allocation["batch_sizes"]) == 8 * 32
    assert allocation["rate"] == pytest.approx(4 * 200 + 4 * 100)


def test_submit_mixes_types_where_the_plan_balances(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", greedy_slurm(tmp_path / "bin"))
    project = Mini(tmp_path, small(1), scaling=1.0).project
    for name, mode, mixed in (("trio-001", "auto", True), ("trio-002", "data-parallel", False)):
        done = project.here("submit", *ON_8_GPUS, "--mode", mode, "--new", "--json")
        assert done.code == 0, done.stderr
        spec = read_spec(project.home.run(name))
        assert (spec.mode, options_from(spec.options).mix_types) == (mode, mixed)


@pytest.fixture
def queued(tmp_path, monkeypatch):
    """Submit commands of a batch system that takes every job."""
    monkeypatch.setenv("PATH", greedy_slurm(tmp_path / "bin"))


READ = "partitions: {count: 4, path: '/p/{partition}.npz'}\n"


def submitted(project, *arguments):
    done = project.here("submit", *ON_8_GPUS, "--new", "--json", *arguments)
    assert done.code == 0, done.stderr
    return read_spec(project.home.run(done.json["run"]))


@pytest.mark.parametrize("count", [2, 6])
def test_all_members_hop_if_that_is_asked_for(tmp_path, count):
    plan = Mini(tmp_path, small(count), READ).plan("--mode", "hopper", "--json").json
    (phase,) = plan["phases"]
    assert (phase["mode"], set(phase["members"])) == ("hopper", {f"m{i}" for i in range(count)})
    assert set(modes(plan).values()) == {"hopper"}
    assert (plan["rounds"], plan["options"]["hop_scheduler"]) == ([], "best")
    assert phase["makespans_s"]["hopper"] == plan["predicted_makespan_s"]


def test_a_randomized_plan_takes_longer_than_the_best(tmp_path):
    mini = Mini(tmp_path, small(9), READ)
    times = [
        mini.plan("--mode", "hopper", "--hop-scheduler", name, "--json").json["predicted_makespan_s"]
        for name in ("best", "randomized")
    ]
    assert times[0] <= times[1]


@pytest.mark.usefixtures("queued")
def test_a_run_that_hops_has_its_mode_and_phases(tmp_path):
    project = Mini(tmp_path, small(6), READ).project
    spec = submitted(project, "--mode", "hopper", "--hop-scheduler", "randomized", "--planner", "auto")
    assert (spec.mode, spec.phases, spec.sharing, spec.replay) == ("hopper", ("hopper",), "none", "")
    assert (spec.planner, spec.options["hop_scheduler"]) == ("fluid", "randomized")
    assert submitted(project).phases == ("data-parallel",)


@pytest.mark.usefixtures("queued")
def test_auto_lets_hops_and_the_rest_through(tmp_path):
    project = Mini(tmp_path, small(5) + LONG, READ, ONE_TYPE, 0.5).project
    spec = submitted(project, "--mode", "auto", *ALL_GPUS)
    assert spec.mode == "auto"
    assert spec.phases[0] == "hopper"
    assert spec.phases[1] in ("data-parallel", "balanced")


def test_a_plan_goes_by_the_nodes_of_the_file(tmp_path):
    """With copies on a second node there is more to choose from; a node without any is refused."""
    mini = Mini(tmp_path, small(6))
    table, ensemble = (mini.project.path / name for name in ("parts.csv", "ensemble.yaml"))
    ensemble.write_text(ensemble.read_text().replace("members:", "partitions: {file: parts.csv}\nmembers:"))

    def plan(*nodes):
        rows = "".join(f"{i},/p/{i},{names}\n" for i, names in enumerate(nodes))
        table.write_text("partition,path,nodes\n" + rows)
        return mini.plan("--mode", "hopper", "--json")

    alone, copied = plan("a", "b", "c", "d"), plan("a;b", "a;b", "b;c", "a;d")
    assert alone.json["predicted_makespan_s"] > copied.json["predicted_makespan_s"]
    refused = plan("a", "b", "a", "b")
    assert (refused.code, "2 of the 4 nodes" in refused.error["message"]) == (2, True)


VISIT = {"config": "m0", "worker": "a1:0", "start": 0, "end": 1, "partition": "p0", "epoch": 0, "lost": False}


def trace_line(**other):
    return json.dumps({**VISIT, **other}) + "\n"


@pytest.mark.usefixtures("queued")
def test_a_trace_is_copied_into_the_folder_of_its_run(tmp_path):
    project = Mini(tmp_path, small(6), READ).project
    trace = tmp_path / "hops.jsonl"
    trace.write_text(trace_line() + trace_line(epoch=1, start=2, end=3))
    spec = submitted(project, "--mode", "hopper", "--replay", str(trace))
    assert spec.replay == str(project.home.run(spec.run).path / "replay.jsonl")
    assert Path(spec.replay).read_text() == trace.read_text()
    again = project.here("submit", "--replay", str(trace), "--dry-run", "--json")
    assert (again.code, again.json["changed"]) == (0, [])
    trace.write_text(trace_line())
    other = project.here("submit", "--replay", str(trace), "--dry-run")
    assert (other.code, "--replay" in other.stderr) == (2, True)


@pytest.mark.usefixtures("queued")
def test_a_run_keeps_its_mode_and_scheduler_of_hops(tmp_path):
    project = Mini(tmp_path, small(6), READ).project
    submitted(project, "--mode", "hopper")
    for option, value in (
        ("--mode", "auto"),
        ("--hop-scheduler", "randomized"),
        ("--launch", "members"),
        ("--replay", "none.jsonl"),
    ):
        done = project.here("submit", "--dry-run", option, value)
        assert (done.code, option in done.stderr) == (2, True), done.stderr


def test_all_are_pipelines_only_if_their_layers_are_known(tmp_path):
    project = Mini(tmp_path, small(1) + GIANT).project
    done = project.here("plan", *ON_8_GPUS, "--mode", "pipeline", "--json")
    assert done.code == 2
    assert "m0" in done.error["message"]
    alone = Mini(tmp_path / "alone", GIANT).project
    plan = alone.here("plan", *ON_8_GPUS, "--mode", "pipeline", "--policy", "ed", "--json").json
    assert [phase["mode"] for phase in plan["phases"]] == ["pipeline"]
    assert modes(plan) == {"giant": "pipeline"}


def test_a_site_without_memory_gets_a_file_of_its_own(tmp_path):
    mini = Mini(tmp_path, GIANT, site=(SITE + LINKS).replace("gpu_memory: 16GB\n", ""))
    done = mini.plan("--mode", "pipeline")
    assert (done.code, "site mini has no gpu_memory" in done.stderr) == (2, True)
    own = mini.project.path / "site-configs" / "mini.yaml"
    own.rename(own.with_name("shipped.yaml"))
    hint = done.stderr.partition("hint: ")[2].splitlines()
    assert hint[0].startswith("write site-configs/mini.yaml")
    own.write_text("\n".join(line.strip() for line in hint[1:]).replace("extends: mini", "extends: shipped"))
    assert mini.plan("--mode", "pipeline").code == 0


def test_a_network_larger_than_the_gpus_needs_a_layer_profile(tmp_path):
    mini = Mini(tmp_path, small(2), site=SITE.replace("16GB", "1GB"))
    with Catalog.open(mini.project.home.catalog) as catalog:
        catalog.save_points("trio", "mini", large(catalog.points("trio", "mini"), "m1"))
    done = mini.plan("--mode", "auto")
    assert done.code == 3
    assert "--layers m1" in done.stderr


def large(points, member):
    """Return a member's points as if it took 3 GB."""
    return [replace(p, peak_memory_bytes=3 * 10**9) for p in points if p.member == member]


def save_measured(mini, *gpu_types):
    """Store what `hetctl profile --layers giant` would: 24 layers of 600 MB of weights, on these types."""
    ensemble = read_ensemble(mini.project.path / "ensemble.yaml")
    layer = MeasuredLayer("l", 0.004, 0.008, 4_000_000, 600_000_000, 4_000_000, 0)
    layers = tuple(replace(layer, name=f"l{number}") for number in range(24))
    giant = ensemble.member("giant")
    points = [
        LayerPoint(
            *("giant", giant.fingerprint, giant.batch_size, 1.0, Hardware(name, "1", "fake")),
            6400,
            10**9,
            layers,
        )
        for name in gpu_types
    ]
    between = ((1e6, 2e-4), (1e8, 1.1e-2))
    links = [LinkPoint(kind, ("a0", "a1"), 1.0, between) for kind in (INTRA_NODE, INTER_NODE)]
    with Catalog.open(mini.project.home.catalog) as catalog:
        catalog.save_points("trio", "mini", points)
        catalog.save_points("trio", "mini", links)


def test_measured_layers_and_links_stand_for_files(tmp_path):
    mini = Mini(tmp_path, small(2) + GIANT.replace(", layers: giant.csv", ""), site=SITE)
    save_measured(mini, "V100", "P100")
    plan = mini.auto()
    assert modes(plan)["giant"] == "pipeline"
    # With the gigabyte that the framework takes.
    assert "58.7 GB" in {c["member"]: c["reason"] for c in plan["choices"]}["giant"]


@pytest.mark.usefixtures("queued")
def test_a_run_by_measured_layers_goes_on_in_shorter_jobs(tmp_path):
    mini = Mini(tmp_path, GIANT.replace(", layers: giant.csv", ""), site=SITE)
    save_measured(mini, "V100", "P100")
    first = mini.project.here("submit", *ON_8_GPUS, "--mode", "pipeline", "--dry-run", "--json").json
    assert submitted(mini.project, "--mode", "pipeline").site.links is None
    done = mini.project.here("submit", "--time", "20h", "--dry-run", "--json")
    assert done.code == 0, done.stderr
    assert done.json["packing"] == first["packing"] != []


@pytest.mark.usefixtures("queued")
def test_a_dry_run_of_hops_shows_the_partitions_of_each_node(tmp_path):
    project = Mini(tmp_path, small(6), READ).project
    done = project.here("submit", *ON_8_GPUS, "--mode", "hopper", "--dry-run", "--json")
    assert done.json["packing"] == [
        f"{node}: 6 members in turn on 0, 1, with the partitions {partition}"
        for partition, node in enumerate(("node-0", "node-1", "node-2", "node-3"))
    ]


def test_measured_layers_hold_for_all_members_of_a_shape(tmp_path):
    alike = "  - {name: twin, config: {blocks: 24, learning_rate: 0.1}}\n"
    others = alike + "  - {name: short, config: {blocks: 12}}\n"
    mini = Mini(tmp_path, GIANT.replace(", layers: giant.csv", "") + others, site=SITE)
    save_measured(mini, "V100", "P100")
    found = modes(mini.auto())
    assert (found["giant"], found["twin"], found["short"]) == ("pipeline", "pipeline", "data-parallel")


@pytest.mark.usefixtures("queued")
def test_a_check_says_which_weights_were_too_old(tmp_path):
    project = Mini(tmp_path, small(1) + GIANT).project
    folder = project.home.run(submitted(project, "--mode", "auto").run)
    refused = project.here("pipeline", "check")
    assert refused.code == 2
    EventWriter(folder.events, DRIVER, 0).write("task_started", **task_started(member="giant"))
    log = WaveRecorder(folder.waves / "giant-000.jsonl", 0)
    log.write(WaveRecord(1, 0, 0, 0, 1, (0, 0, 1), (0, 0, 0)))
    (check,) = project.here("pipeline", "check", "--json").json["checks"]
    assert (check["local"], check["local_bound"], check["overall_bound"]) == (1, 2, 7)
    assert project.here("report").code == 0
    page = (project.path / "report.html").read_text()
    assert "Staleness in pipelines" in page
    assert "minibatch 4" not in page
    log.write(WaveRecord(1, 0, 0, 0, 4, (0,), (0,)))
    done = project.here("pipeline", "check")
    assert (done.code, "minibatch 4" in done.stdout) == (1, True)
    assert project.here("pipeline", "check", "--json").json["error"]["kind"] == "internal"
    assert project.here("report").code == 0
    assert "minibatch 4" in (project.path / "report.html").read_text()


@pytest.mark.parametrize("mode", ["auto", "pipeline"])
def test_a_plan_that_made_the_catalog_is_the_one_submitted(tmp_path, monkeypatch, mode):
    mini = Mini(tmp_path, GIANT)
    assert not mini.project.home.catalog.exists()
    planned = mini.plan("--mode", mode, "--json")
    assert planned.code == 0, planned.stderr
    monkeypatch.setattr(planning, "plan_from", None)
    done = mini.project.here("submit", *ON_8_GPUS, "--mode", mode, "--dry-run")
    assert done.code == 0, done.stderr


@pytest.mark.parametrize(
    ("members", "keys", "site", "options", "code", "named"),
    [
        (small(6), "", SITE, ("--mode", "hopper"), 2, "partitions"),
        (small(6), "partitions: 4\n", SITE, ("--mode", "hopper"), 2, "partitions"),
        (small(6), READ.replace("4", "3"), SITE, ("--mode", "hopper"), 2, "3 partitions"),
        (small(6), READ, SITE, ("--mode", "hopper", "--launch", "members"), 2, "--launch"),
        (small(6), READ, SITE, ("--mode", "hopper", "--sharing", "cached"), 2, "--sharing"),
        (small(6), READ, SITE, ("--mode", "hopper", "--clock-distance", "1"), 2, "--clock-distance"),
        (small(8), READ, SITE, ("--mode", "hopper", "--hop-scheduler", "approximate"), 2, "several workers"),
        (small(6), "partitions: 3\n", SITE, (), 2, "3 partitions"),
        (small(6), READ, ONE_TYPE, ("--mode", "auto", "--launch", "members"), 2, "--launch"),
        (small(6) + GIANT, READ, ONE_TYPE, (), 2, "giant"),
        (small(1) + GIANT, "", SITE + LINKS, ("--mode", "auto", "--launch", "members"), 2, "giant"),
        (
            small(1) + GIANT.replace("}", ", global_batch_size: 64}"),
            "",
            SITE + LINKS,
            (),
            2,
            "global_batch_size",
        ),
        (small(1) + GIANT, "", SITE, (), 2, "mini has no links"),
        (small(1) + GIANT.replace("giant.csv", "none.csv"), "", SITE, (), 2, "none.csv"),
        (small(1) + GIANT, "", SITE.replace("V100", "K80"), (), 2, "K80"),
        (small(1) + GIANT, "", SITE.replace("16GB", "1GB") + LINKS, (), 3, "giant.csv:2"),
        (small(1) + GIANT, "", SITE.replace("16GB", "3GB") + LINKS, (), 3, "giant"),
    ],
)
def test_what_leaves_no_plan_is_refused_and_nothing_kept(tmp_path, members, keys, site, options, code, named):
    mini = Mini(tmp_path, members, keys, site, 0.5)
    before = mini.project.tree()
    done = mini.project.here("submit", *ON_8_GPUS, *ALL_GPUS, *(options or ("--mode", "auto")), "--json")
    assert done.code == code, done.stdout
    assert named in done.error["message"]
    assert mini.project.tree() == before


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (trace_line(config="m9"), "hops.jsonl:1"),
        (trace_line(partition="p4"), "hops.jsonl:1"),
        (trace_line(worker="w0"), "hops.jsonl:1"),
        (trace_line() * 2, "hops.jsonl:2"),
        (trace_line(lost=True), "hops.jsonl:1"),
        ("", "hops.jsonl"),
    ],
)
@pytest.mark.usefixtures("queued")
def test_a_trace_that_does_not_fit_is_refused_whole(tmp_path, line, named):
    project = Mini(tmp_path, small(6), READ).project
    (tmp_path / "hops.jsonl").write_text(line)
    before = project.tree()
    trace = ("--replay", str(tmp_path / "hops.jsonl"))
    done = project.here("submit", *ON_8_GPUS, "--mode", "hopper", *trace)
    assert (done.code, named in done.stderr) == (2, True), done.stderr
    assert project.tree() == before
