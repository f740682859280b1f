"""Rate tables as ensembles, simulations of them, and plans that say why."""

from __future__ import annotations

import json
import math
from collections import defaultdict

import pytest
from workbench import RATES, alive, new_project, pretending_project, wait_for

from hetctl.scheduling.planners import PLANNERS

LOCAL = {"HETCTL_SITE": "local"}
KEYS = {
    "schema_version", "planner", "makespan_s", "mean_jct_s", "lower_bound_s", "ratio", "rounds", "restarts",
    "gpu_busy_fraction", "plan_seconds",
}  # fmt: skip
CLOCKED = {"plan_seconds", "slowest_plan_s"}
ZOO = "member,gpus,rate,samples\n" + "".join(
    f"net-{i},{gpus},{(10 + i) * gpus**0.9:.3f},{1000 * (1 + i % 3)}\n"
    for i in range(6)
    for gpus in (1, 2, 4)
)


@pytest.fixture
def zoo(tmp_path):
    """A folder without an ensemble file, site or network, but for a catalog with a rate table."""
    project = new_project(tmp_path / "project")
    for name in ("ensemble.yaml", "nets.py"):
        (project.path / name).unlink()
    (project.path / "zoo.csv").write_text(ZOO)
    assert project.here("profile", "import", "zoo.csv", "--name", "zoo").code == 0
    return project


@pytest.fixture
def profiled(tmp_path):
    project = new_project(tmp_path / "project")
    assert project.here("profile", "import", "rates.csv", **LOCAL).code == 0
    return project


SEARCH = """\
name: searched
command: train {lr}
samples_per_epoch: 100
rate_keys: [width]
search:
  method: asha
  trials: 8
  epochs: 4
  space: {lr: {log_uniform: [0.001, 0.1]}, width: {choice: [1]}}
"""


def test_a_search_is_simulated_before_it_is_run(tmp_path):
    project = new_project(tmp_path / "project", SEARCH)
    table = "".join(f"trial-{number:03d},1,10,100\n" for number in range(8))
    (project.path / "measured.csv").write_text("member,gpus,rate,samples\n" + table)
    assert project.here("profile", "import", "measured.csv", **LOCAL).code == 0
    named = simulated(project, "--gpus", "2", "--search", "ensemble.yaml")
    assert named["search"] == {"method": "asha", "trials": 8, "epochs": 14, "finished": 2}
    assert {**named, **dict.fromkeys(CLOCKED)} == {
        **simulated(project, "--gpus", "2"),
        **dict.fromkeys(CLOCKED),
    }
    assert project.here("simulate", "--gpus", "2", "--report", "page.html").code == 0
    assert "asha" in (project.path / "page.html").read_text()


def test_members_share_gpus_as_the_ensemble_or_else_the_command_says(profiled):
    file = profiled.path / "ensemble.yaml"
    file.write_text(f"max_per_gpu: 2\n{file.read_text()}")
    plan = ("plan", "--gpus", "2", "--sharing", "lockstep")
    refused = profiled.here(*plan, **LOCAL)
    assert (refused.code, "--max-per-gpu" in refused.stderr) == (2, True)
    assert "--max-per-gpu" not in profiled.here(*plan, "--max-per-gpu", "1", **LOCAL).stderr


def test_what_does_not_go_with_a_search_is_refused(profiled):
    refused = profiled.here("simulate", "--gpus", "2", "--search", "ensemble.yaml")
    assert (refused.code, "has no search" in refused.stderr) == (2, True)
    (profiled.path / "search.yaml").write_text(SEARCH)
    twice = profiled.here("simulate", "--gpus", "2", "--search", "search.yaml", "--ensemble", "ensemble.yaml")
    assert (twice.code, "given twice" in twice.stderr) == (2, True)


def simulated(project, *arguments):
    done = project.here("simulate", *arguments, "--json")
    assert done.code == 0, done.stdout
    return done.json


def refused(project, *arguments, code=2, **environment):
    before = project.tree()
    done = project.here(*arguments, "--json", **environment)
    assert done.code == code, done.stdout
    assert project.here(*arguments, **environment).stdout == ""
    assert project.tree() == before
    return f"{done.error['message']} {done.error['hint']}"


def test_a_rate_table_becomes_an_ensemble_that_can_be_simulated(zoo):
    again = zoo.here("profile", "import", "zoo.csv", "--name", "zoo", "--json").json
    assert (again["ensemble"], again["site"]) == ("zoo", "imported")
    assert (again["imported"], again["members"]) == (18, 6)
    result = simulated(zoo, "zoo", "--gpus", "8", "--gpus-per-node", "4")
    assert result.keys() >= KEYS
    assert "intervals" not in result
    assert (result["planner"], result["gpus"], result["gpus_per_node"]) == ("fluid", 8, 4)
    assert result["makespan_s"] >= result["lower_bound_s"] > 0
    assert result["ratio"] == pytest.approx(result["makespan_s"] / result["lower_bound_s"])
    assert 0 < result["gpu_busy_fraction"] <= 1
    for reference in ([], ["-e", "zoo"]):
        again = simulated(zoo, *reference, "--gpus", "8")
        assert {key: again[key] for key in again.keys() - CLOCKED} == {
            key: result[key] for key in result.keys() - CLOCKED
        }


def test_importing_again_replaces_members_rates_and_work(zoo):
    before = simulated(zoo, "zoo", "--gpus", "4")
    (zoo.path / "zoo.csv").write_text("member,gpus,rate,samples\nnet-0,1,10,100\nonly,1,5,100\n")
    assert zoo.here("profile", "import", "zoo.csv", "--name", "zoo").code == 0
    after = simulated(zoo, "zoo", "--gpus", "1", "--planner", "independent")
    assert {member["member"] for member in after["members"]} == {"net-0", "only"}
    assert after["makespan_s"] == pytest.approx(30)
    assert len(before["members"]) == 6


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("member,gpus,rate\na,1,5\n", "zoo.csv:2: samples"),
        ("member,gpus,rate,samples\na,1,5,10\nb,1,5,\nb,2,9,\n", "zoo.csv:3: samples"),
        ("member,gpus,rate,samples\na,1,5,10\na,2,9,20\n", "zoo.csv:3: samples"),
        ("member,gpus,rate,sample\na,1,5,10\n", "'samples'"),
    ],
)
def test_a_table_that_does_not_tell_all_is_refused_whole(zoo, table, said):
    (zoo.path / "zoo.csv").write_text(table)
    assert said in refused(zoo, "profile", "import", "zoo.csv", "--name", "zoo")
    assert len(simulated(zoo, "zoo", "--gpus", "1")["members"]) == 6


def test_an_ensemble_with_networks_is_not_replaced(profiled):
    for name in ("trio", "", "../x", "x" * 65):
        assert name in refused(profiled, "profile", "import", "rates.csv", f"--name={name}")


def test_what_goes_without_a_site_is_given_none(zoo):
    said = refused(zoo, "profile", "import", "zoo.csv", "--name", "zoo", "--site", "local")
    assert "--site" in said
    assert zoo.here("profile", "import", "zoo.csv", "--name", "zoo", **LOCAL).code == 0


@pytest.mark.parametrize("command", [["plan"], ["submit"], ["render"], ["profile"], ["profile", "show"]])
def test_a_rate_table_has_nothing_to_run(zoo, command):
    assert "zoo" in refused(zoo, *command, **LOCAL)


def test_options_before_a_sub_command_are_not_lost_silently(profiled):
    said = refused(profiled, "profile", "--site", "local", "show")
    assert "hetctl profile show" in said
    assert profiled.here("profile", "show", **LOCAL).code == 0


def test_the_trace_adds_up_to_the_result(zoo):
    arguments = ("zoo", "--gpus", "4", "--restart-seconds", "10", "--planner", "flotilla", "--alpha", "1")
    result = simulated(zoo, *arguments, "--trace", "t.jsonl")
    lines = [json.loads(line) for line in (zoo.path / "t.jsonl").read_text().splitlines()]
    assert {tuple(line) for line in lines} == {("member", "gpus", "start_s", "end_s", "restart_s", "samples")}
    assert max(line["end_s"] for line in lines) == result["makespan_s"]
    samples = defaultdict(float)
    for line in lines:
        samples[line["member"]] += line["samples"]
    assert samples == pytest.approx({f"net-{i}": 1000.0 * (1 + i % 3) for i in range(6)})
    assert result["restarts"] == len(lines) - 6 > 0
    assert sum(line["restart_s"] for line in lines) == pytest.approx(10 * result["restarts"])
    busy = math.fsum(line["gpus"] * (line["end_s"] - line["start_s"] - line["restart_s"]) for line in lines)
    assert result["gpu_busy_fraction"] == pytest.approx(busy / (4 * result["makespan_s"]))


def test_jobs_are_drawn_and_arrive_by_the_seed_alone(zoo):
    drawn = ("--sample-members", "12", "--arrival-mean", "500")
    arguments = ("zoo", "--gpus", "8", *drawn, "--planner", "independent")
    first = simulated(zoo, *arguments, "--seed", "1")
    names = [member["member"] for member in first["members"]]
    assert [name[-5:] for name in names] == [f"-{number:04d}" for number in range(1, 13)]
    assert {name[:-5] for name in names} <= {f"net-{i}" for i in range(6)}
    assert simulated(zoo, *arguments, "--seed", "1")["mean_jct_s"] == first["mean_jct_s"]
    assert simulated(zoo, *arguments, "--seed", "2")["mean_jct_s"] != first["mean_jct_s"]
    assert first["mean_jct_s"] < first["makespan_s"] / 2
    in_minutes = tuple("500s" if word == "500" else word for word in arguments)
    assert simulated(zoo, *in_minutes, "--seed", "1")["makespan_s"] == first["makespan_s"]


@pytest.mark.parametrize("path", ["nowhere/x", "."])
@pytest.mark.parametrize("option", ["--report", "--trace"])
def test_what_could_not_be_written_is_refused_first(zoo, option, path):
    assert path.partition("/")[0] in refused(zoo, "simulate", "zoo", "--gpus", "8", option, path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "0"], "--gpus"),
        (["--sample-members", "0"], "--sample-members"),
        (["--arrival-mean", "0"], "--arrival-mean"),
        (["--arrival-mean", "nan"], "--arrival-mean"),
        (["--arrival-mean", "soon"], "soon"),
        (["--restart-seconds", "-1"], "--restart-seconds"),
        (["--restart-seconds", "inf"], "--restart-seconds"),
        (["--node-mtbf", "5m"], "--node-mtbf"),
        (["--round-limit", "2"], "write 2s, 2m or 2h"),
        (["--gpus-per-node", "0"], "--gpus-per-node"),
        (["--sharing", "all"], "lockstep"),
        (["--work", "known"], "clairvoyant"),
        (["--objective", "jct"], "mean-jct"),
        (["--planner", "fluidd"], "fluid"),
        (["--solver-time-limit", "0"], "--solver-time-limit"),
        (["-e", "zoo"], "given twice"),
        (["--rates-of", "local"], "imported"),
    ],
)
def test_parameters_out_of_range_are_usage_errors(zoo, arguments, said):
    assert said in refused(zoo, "simulate", "zoo", "--gpus", "4", *arguments)


def test_a_limit_too_short_for_an_epoch_is_infeasible(tmp_path):
    project = new_project(tmp_path / "project")
    (project.path / "rates.csv").write_text(RATES.replace("b,1,100,400", "b,1,1e-6,400"))
    assert project.here("profile", "import", "rates.csv", "--name", "slow").code == 0
    arguments = ("simulate", "slow", "--gpus", "1", "--round-limit", "1s", "--restart-seconds", "2")
    assert simulated(project, "slow", "--gpus", "1", "--restart-seconds", "2")["rounds"] > 0
    assert "round limit" in refused(project, *arguments, code=3)


def test_the_project_s_ensemble_is_simulated_on_its_profile(profiled):
    result = simulated(profiled, "--gpus", "2")
    assert (result["ensemble"], result["site"], result["gpus_per_node"]) == ("trio", "local", 2)
    assert result["makespan_s"] == pytest.approx(6)


def test_of_several_sites_one_must_be_chosen(profiled):
    assert profiled.here("profile", "import", "rates.csv", HETCTL_SITE="summit").code == 0
    assert "local, summit" in refused(profiled, "simulate", "--gpus", "2")
    assert simulated(profiled, "--gpus", "12", "--rates-of", "summit")["gpus_per_node"] == 6


def test_auto_takes_the_best_and_says_why(zoo):
    result = simulated(zoo, "zoo", "--gpus", "8", "--planner", "auto", "--solver-time-limit", "0.2")
    assert result["planner"] in PLANNERS
    assert all(f" {name} " in result["reason"] for name in PLANNERS)


def test_auto_is_resolved_before_anything_is_kept_or_run(profiled):
    arguments = ("--planner", "auto", "--solver-time-limit", "0.2")
    plan = profiled.here("plan", *arguments, "--json", **LOCAL).json
    assert plan["planner"] in PLANNERS
    assert plan["reason"]
    assert profiled.here("render", *arguments, **LOCAL).code == 0
    assert profiled.here("submit", "--dry-run", *arguments, **LOCAL).code == 0


def test_auto_is_replaced_by_a_planner_before_a_run(tmp_path):
    project = pretending_project(tmp_path)
    assert project.here("profile", "import", "rates.csv").code == 0
    done = project.here("submit", "--planner", "auto", "--solver-time-limit", "0.2", "--wait", "--json")
    assert (done.code, done.json["state"]) == (0, "finished")
    assert done.json["planner"] in PLANNERS
    assert json.loads(project.home.run("trio-001").spec.read_text())["planner"] == done.json["planner"]
    wait_for(lambda: not alive(str(project.path)))


def test_a_plan_is_explained_only_if_asked(profiled):
    for planner in (*PLANNERS, "fixed-1"):
        arguments = ("plan", "--planner", planner, "--solver-time-limit", "0.1", "--json")
        assert not any(one["reasons"] for one in profiled.here(*arguments, **LOCAL).json["rounds"])
        first = profiled.here(*arguments, "--explain", **LOCAL).json["rounds"][0]
        assert {a["member"] for a in first["allocations"]} <= first["reasons"].keys() <= {"a", "b", "c"}
        assert all(first["reasons"].values())


def test_every_planner_is_named_in_the_help(profiled):
    for command in ("plan", "submit", "render", "simulate"):
        shown = " ".join(profiled.here(command, "--help").stdout.split())
        assert "--objective [makespan|mean-jct]" in shown
        assert [name for name in (*PLANNERS, "fixed-K", "auto") if name not in shown] == []


def test_members_may_be_measured_on_several_types_of_gpu(zoo):
    table = "member,gpus,rate,gpu_type,samples\n" + "".join(
        f"{member},1,{rate},{gpu_type},1000\n"
        for member in ("a", "b", "c")
        for gpu_type, rate in (("fast", 20), ("slow", 10))
    )
    (zoo.path / "typed.csv").write_text(table)
    assert zoo.here("profile", "import", "typed.csv", "--name", "typed").code == 0
    both = simulated(zoo, "typed", "--gpus", "fast:2,slow:1", "--planner", "fluid")
    assert (both["gpus"], both["makespan_s"]) == (3, 100)
    assert simulated(zoo, "typed", "--gpus", "slow:3")["makespan_s"] == 100
    assert simulated(zoo, "typed", "--gpus", "fast:3")["makespan_s"] == 50
    assert "--gpus fast:N,slow:N" in refused(zoo, "simulate", "typed", "--gpus", "3")
    assert "type 'old'" in refused(zoo, "simulate", "typed", "--gpus", "old:3")
