"""Plans of the catalog: what was planned is what is submitted, as long as nothing has changed."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest
from workbench import ENSEMBLE, RATES, greedy_slurm, new_project

from hetctl.app.plan import planning
from hetctl.catalog.catalog import Catalog
from hetctl.inputs.site_file import find_site
from hetctl.methods.parallelism import PhaseRun
from hetctl.model.ensemble import Ensemble, Functions
from hetctl.model.site import NodeType
from hetctl.storage.event_files import EventWriter

SIZE = ("--site", "slurm", "--gpus", "2", "--time", "1h")
TYPES = """\
extends: slurm
nodes: 2
gpus_per_node: 2
gpu_type: null
node_types:
  - {gpu_type: V100, nodes: 1, hosts: ["a*"]}
  - {gpu_type: P100, nodes: 1, hosts: ["b*"]}
queues: [{name: gpu, max_nodes: 2, max_wall: 24h}]
queue: gpu
"""
ON_TYPES = ("--site", "types", "--gpus", "4", "--time", "2h", "--planner", "fixed-4", "--json")


@pytest.fixture
def made(monkeypatch):
    """Plans that were made, in their order."""
    plans = []

    def plan_from(*arguments):
        plans.append(original(*arguments))
        return plans[-1]

    original = planning.plan_from
    monkeypatch.setattr(planning, "plan_from", plan_from)
    return plans


@pytest.fixture
def project(tmp_path, made):
    project = new_project(tmp_path / "project")
    assert project.here("profile", "import", "rates.csv", "--site", "slurm").code == 0
    assert project.here("plan", *SIZE, "--explain").code == 0
    assert len(made) == 1
    return project


def latest(project):
    with Catalog.open_to_read(project.home.catalog) as catalog:
        return catalog.latest_plan("trio", "slurm")


def test_the_saved_plan_is_submitted_if_nothing_has_changed(project, made):
    assert project.here("submit", *SIZE, "--dry-run").code == 0
    assert len(made) == 1
    assert latest(project).inputs


def test_two_plans_of_the_same_inputs_are_both_made(project, made):
    first = latest(project)
    assert project.here("plan", *SIZE).code == 0
    assert len(made) == 2
    assert latest(project).inputs == first.inputs


@pytest.mark.parametrize(
    "option", [("--time", "2h"), ("--planner", "doubling"), ("--alpha", "0.5"), ("--sharing", "none")]
)
def test_a_new_plan_is_made_if_an_option_has_changed(project, made, option):
    assert project.here("submit", *SIZE, *option, "--dry-run").code == 0
    assert len(made) == 2


def test_a_new_plan_is_made_if_a_rate_has_changed(project, made):
    rates = project.path / "rates.csv"
    rates.write_text(rates.read_text().replace("100", "140"))
    assert project.here("profile", "import", "rates.csv", "--site", "slurm").code == 0
    assert project.here("submit", *SIZE, "--dry-run").code == 0
    assert len(made) == 2


def test_a_new_plan_is_made_if_the_ensemble_has_changed(project, made):
    ensemble = project.path / "ensemble.yaml"
    ensemble.write_text(ensemble.read_text().replace("config: {}", "config: {}, seed: 7", 1))
    assert project.here("submit", *SIZE, "--dry-run").code == 0
    assert len(made) == 2


def test_all_commands_foresee_members_that_train_fused(tmp_path, monkeypatch):
    """Three members of one shape and 400 samples at 100 samples/s, which are three times as fast together."""
    monkeypatch.setenv("PATH", greedy_slurm(tmp_path / "bin"))
    project = new_project(tmp_path / "project", ENSEMBLE.replace("tensorflow", "pytorch") + "fuse: off\n")
    assert project.here("profile", "import", "rates.csv", "--site", "slurm").code == 0
    assert project.here("submit", *SIZE, "--json").code == 0
    fused = EventWriter(project.home.run("trio-001").events, "a", 0)
    fused.write("fused", rates=[[1, 100.0], [3, 300.0]])
    size = (*SIZE, "--gpus", "1", "--json")
    for command in (("plan", *size), ("plan", *size, "--mode", "auto")):
        apart, together = (project.here(*command, *option).json for option in ((), ("--fuse",)))
        assert together["predicted_makespan_s"] < 0.4 * apart["predicted_makespan_s"]
        assert {given["mode"] for given in together["rounds"][0]["allocations"]} == {"fused"}
        assert together["lower_bound_s"] == pytest.approx(4.0)
    simulated = ("simulate", "--gpus", "1", "--restart-seconds", "0", "--json")
    seconds = [project.here(*simulated, *option).json["makespan_s"] for option in ((), ("--fuse",))]
    assert seconds == pytest.approx([12.0, 4.0])
    file = project.path / "ensemble.yaml"
    file.write_text(file.read_text().replace("fuse: off", "fuse: auto"))
    seconds = [project.here(*simulated, *option).json["makespan_s"] for option in (("--no-fuse",), ())]
    assert seconds == pytest.approx([12.0, 4.0])
    # The time of a job, too.
    (project.path / "slow.csv").write_text(RATES.replace(",100,", ",0.1,"))
    assert project.here("profile", "import", "slow.csv", "--site", "slurm").code == 0
    for option, time in (("--no-fuse", "5:05"), ("--fuse", "1:45")):
        assert f"for {time} h in queue" in project.here("plan", *size[:2], "--gpus", "1", option).stdout


@pytest.fixture
def on_types(tmp_path):
    """A project at a site with a node of each of two types; `b` was measured on one of them only."""
    project = new_project(tmp_path / "project")
    (project.path / "site-configs").mkdir()
    (project.path / "site-configs" / "types.yaml").write_text(TYPES)
    known = (
        ("a", "V100", 300),
        ("a", "P100", 100),
        ("b", "V100", 300),
        ("c", "V100", 200),
        ("c", "P100", 100),
    )
    rows = [f"{name},{gpus},{rate * gpus},{kind},400\n" for name, kind, rate in known for gpus in (1, 2, 4)]
    (project.path / "typed.csv").write_text("member,gpus,rate,gpu_type,samples\n" + "".join(rows))
    assert project.here("profile", "import", "typed.csv", "--site", "types").code == 0
    return project


def gains(project, *arguments):
    done = project.here("plan", *ON_TYPES, *arguments)
    assert done.code == 0, done.stderr
    return done.json["balance_gains"]


@pytest.mark.parametrize("how", [("--mix-types",), ("--mix-types", "--balance", "on")])
def test_the_gain_of_balanced_batches_is_that_over_equal_ones(on_types, how):
    # Two GPUs at 300 and two at 100 samples/s, over four at 100.
    assert gains(on_types, *how) == {"a": pytest.approx(2.0), "c": pytest.approx(1.5)}


@pytest.mark.parametrize("how", [(), ("--mix-types", "--balance", "off")])
def test_without_balanced_batches_over_types_there_is_no_gain(on_types, how):
    assert gains(on_types, *how) == {}


def test_without_horovod_a_tensorflow_member_gets_one_gpu_and_the_plan_says_so(tmp_path, monkeypatch):
    project = new_project(tmp_path / "project")
    (project.path / "rates.csv").write_text(
        "member,gpus,rate,samples\n" + "".join(f"{name},1,100,400\n{name},2,190,400\n" for name in "abc")
    )
    assert project.here("profile", "import", "rates.csv", "--site", "slurm").code == 0
    command = ("plan", "--site", "slurm", "--gpus", "4", "--time", "1h", "--planner", "fixed-2", "--json")
    with_horovod = project.here(*command)
    monkeypatch.setitem(sys.modules, "horovod", None)
    without = project.here(*command)
    given = [
        {allocation["gpus"] for one in plan.json["rounds"] for allocation in one["allocations"]}
        for plan in (with_horovod, without)
    ]
    assert given == [{2}, {1}]
    assert "no package horovod; for more, install it as docs/install.md says" in without.stderr
    assert "horovod" not in with_horovod.stderr


SEARCH = """\
name: own
command: train {lr}
samples_per_epoch: 100
search:
  method: asha
  trials: 9
  epochs: 9
  eta: 3
  max_gpus: 1
  space: {lr: {log_uniform: [0.001, 0.1]}}
"""


POPULATION = """\
name: own
framework: pytorch
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
samples_per_epoch: 100
partitions: {count: 2, path: "/data/{partition}.npz"}
search:
  method: pbt
  trials: 4
  epochs: 6
  every: 2
  mutate: {lr: {multiply: [0.5, 2]}}
  max_gpus: 1
  space: {lr: {log_uniform: [0.001, 0.1]}}
"""


def searching(folder, ensemble, slots):
    """Make a project with a search, and with rates of all trials that it may begin."""
    project = new_project(folder, ensemble)
    rates = "".join(f"trial-{number:03d},1,10\n" for number in range(slots))
    (project.path / "rates.csv").write_text(f"member,gpus,rate\n{rates}")
    assert project.here("profile", "import", "rates.csv", "--site", "slurm").code == 0
    return project


def test_trials_of_a_planned_search_stop_at_rungs(tmp_path):
    project = searching(tmp_path / "project", SEARCH, 9)
    plan = project.here("plan", *SIZE, "--json").json
    starts = Counter(each["member"] for one in plan["rounds"] for each in one["allocations"])
    assert len(starts) == len(plan["members"]) == 9
    # At least three trials go on to 3 epochs, and one of them to 9.
    assert sum(starts.values()) >= 13
    assert max(starts.values()) == 3
    epochs = plan["lower_bound_s"] * 2 * 10 / 100
    assert epochs == pytest.approx(round(epochs))
    assert epochs >= 9 + 3 * 2 + 6
    assert plan["ratio"] >= 1


def test_thousands_of_trials_are_planned_with_the_epochs_and_the_waits_of_a_search(tmp_path, monkeypatch):
    project = searching(tmp_path / "project", SEARCH, 9)
    in_turn = project.here("plan", *SIZE, "--json").json
    monkeypatch.setattr(planning, "MOST_TRIALS", 8)
    monkeypatch.setattr(planning.PlanRequest, "waits", 2.0)
    at_once = project.here("plan", *SIZE, "--json").json
    assert at_once["lower_bound_s"] == pytest.approx(in_turn["lower_bound_s"], rel=0.3)
    assert at_once["predicted_makespan_s"] > 1.3 * in_turn["predicted_makespan_s"]
    assert at_once["ratio"] * at_once["lower_bound_s"] == pytest.approx(at_once["predicted_makespan_s"])


def test_trials_that_hop_are_planned_with_the_epochs_and_the_waits_of_a_search(tmp_path, monkeypatch):
    factors = []
    monkeypatch.setattr(PhaseRun, "stretched", lambda run, factor: factors.append(factor) or run)
    project = searching(tmp_path / "project", POPULATION, 4 + 2 * 3)
    plan = project.here("plan", *SIZE, "--gpus", "3", "--mode", "hopper", "--json").json
    # Each of three populations trains 8 epochs on 3 GPUs.
    assert factors == [pytest.approx(9 / 8)]
    assert {phase["mode"] for phase in plan["phases"]} == {"hopper"}
    assert sum(member["training_s"] for member in plan["members"]) == pytest.approx(4 * 6 * 100 / 10)
    # Mutants follow their parents: more GPUs than a population has trials are of no use.
    assert "(4 GPUs)" in project.here("plan", "--site", "slurm").stdout


GPUS = {"device": "gpu", "gpu_memory": 40 * 10**9}
FEW_BYTES = 4 * 600 * 2**20


@pytest.mark.parametrize(
    ("site", "request_", "most"),
    [
        (GPUS, {}, 15),
        (GPUS, {"planner": "auto"}, 15),
        ({**GPUS, "gpu_memory": 80 * 10**9}, {}, 16),
        ({**GPUS, "gpu_memory": 2 * FEW_BYTES}, {}, 2),
        ({**GPUS, "gpu_memory": FEW_BYTES}, {}, 1),
        ({**GPUS, "gpu_memory": None}, {}, 1),
        ({**GPUS, "device": "slot"}, {}, 1),
        ({**GPUS, "launch": "members"}, {}, 1),
        ({**GPUS, "node_types": (NodeType("V100", 2, ("a*",)),)}, {}, 1),
        (GPUS, {"sharing": "lockstep"}, 1),
        (GPUS, {"mode": "hopper"}, 1),
        (GPUS, {"planner": "doubling"}, 1),
        (GPUS, {"options": {"objective": "mean-jct"}}, 1),
        ({**GPUS, "device": "slot"}, {"options": {"max_per_gpu": 3}}, 3),
    ],
)
def test_members_share_gpus_as_memory_permits_where_nothing_speaks_against_it(site, request_, most):
    ensemble = Ensemble("e", "pytorch", Functions("m:i", "m:m"), (), "/nowhere")
    own = replace(find_site("slurm", project=None, home=None), **site)
    options = {"seed": 7, "max_per_gpu": "auto", **request_.pop("options", {})}
    found = planning.with_limit_of_shares(options, ensemble, own, **request_)
    assert (found["max_per_gpu"], found["seed"]) == (most, 7)


def test_a_plan_says_how_many_members_share_a_gpu_and_refuses_nothing_by_default(tmp_path):
    project = new_project(tmp_path / "project")
    (project.path / "site-configs").mkdir()
    (project.path / "site-configs" / "slurm.yaml").write_text("extends: slurm\ngpu_memory: 40GB\n")
    told = "up to 15 members share a GPU, if that is faster"

    def says(*words):
        done = project.here("plan", *SIZE, *words)
        assert (done.code, "max-per-gpu" in done.stderr) == (0, False), done.stderr
        return told in done.stdout

    assert [says(), says("--max-per-gpu", "auto"), says("--max-per-gpu", "1")] == [True, True, False]
    assert not says("--sharing", "lockstep", "--planner", "flotilla")
    (project.path / "ensemble.yaml").write_text(
        f"max_per_gpu: 1\n{(project.path / 'ensemble.yaml').read_text()}"
    )
    assert [says(), says("--max-per-gpu", "auto")] == [False, True]
    assert "neither" in project.here("plan", *SIZE, "--max-per-gpu", "many").stderr
