"""Pipelines from the command line: plans with their simulation, and what is refused."""

from __future__ import annotations

import pytest
from workbench import new_project

LAYERS = "layer,forward_s,backward_s,activation_bytes,parameter_bytes\n" + "".join(
    f"l{i},{0.001 * (1 + i % 3)},{0.002 * (1 + i % 3)},{1_000_000 * (12 - i)},{500_000 * i}\n"
    for i in range(12)
)
CLUSTER = """\
gpu_types:
  fast: {memory: 4GiB, time_ratio: 1}
  slow: {memory: 2GiB, time_ratio: 2}
nodes: [{fast: 2}, {slow: 2}]
links:
  intra_node: {bytes_per_s: 1.0e+10, scaling: 0.8}
  inter_node: {latency_s: 1.0e-5, bytes_per_s: 5.0e+9}
"""
FILES = ("--layer-table", "layers.csv", "--cluster", "cluster.yaml")
POLICIES = ("np", "ed", "hd", "best")
STAGE_KEYS = {
    "first", "last", "first_layer", "last_layer", "node", "gpu", "gpu_type", "forward_s", "backward_s",
    "receive_s", "total_s", "bytes", "memory_bytes", "recomputes", "gpu_busy_fraction",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    project = new_project(tmp_path / "project")
    (project.path / "layers.csv").write_text(LAYERS)
    (project.path / "cluster.yaml").write_text(CLUSTER)
    return project


def succeeded(folder, *arguments):
    done = folder.here("simulate", *arguments, "--json")
    assert done.code == 0, done.stdout
    return done.json


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_places_every_layer_once(folder, policy):
    planned = succeeded(folder, *FILES, "--policy", policy)
    assert planned["schema_version"] == 1
    assert planned["policy"] == policy
    for worker in planned["virtual_workers"]:
        assert worker["in_flight"] == planned["in_flight"]
        assert worker["rate"] > 0
        layers = [layer for s in worker["stages"] for layer in range(s["first"], s["last"] + 1)]
        assert layers == list(range(12))
        for stage in worker["stages"]:
            assert stage.keys() == STAGE_KEYS
            assert 0 < stage["bytes"] <= stage["memory_bytes"]
            assert stage["total_s"] == pytest.approx(
                stage["forward_s"] + stage["backward_s"] + stage["receive_s"]
            )
    slowest = max(stage["total_s"] for worker in planned["virtual_workers"] for stage in worker["stages"])
    assert planned["bottleneck_s"] == pytest.approx(slowest)
    assert planned["ratio"] == pytest.approx(slowest / planned["lower_bound_s"])
    assert planned["ratio"] >= 1 - 1e-9
    assert planned["planned_throughput"] <= len(planned["virtual_workers"]) / slowest * (1 + 1e-9)


def test_a_simulation_comes_near_the_limit_of_its_slowest_stage(folder):
    result = succeeded(folder, *FILES, "--policy", "ed", "--ps-placement", "local")
    limit = len(result["virtual_workers"]) / result["bottleneck_s"]
    assert result["efficiency"] == pytest.approx(result["throughput"] / limit)
    assert 0.95 <= result["efficiency"] <= 1.01
    rates = [worker["rate"] for worker in result["virtual_workers"]]
    assert result["throughput"] == pytest.approx(len(rates) * min(rates))
    in_flight = result["in_flight"]
    assert (result["local_staleness"], result["global_staleness"]) == (in_flight - 1, 2 * in_flight - 2)
    assert all(0 < s["gpu_busy_fraction"] <= 1 for w in result["virtual_workers"] for s in w["stages"])


def test_one_in_flight_is_slower_and_completes_all_minibatches(folder):
    one = succeeded(folder, *FILES, "--policy", "ed", "--in-flight", "1", "--minibatches", "7")
    more = succeeded(folder, *FILES, "--policy", "ed", "--in-flight", "3")
    assert (one["in_flight"], more["in_flight"]) == (1, 3)
    assert one["throughput"] < more["throughput"]
    assert 14 <= one["minibatches"] <= 16


def test_best_is_the_fastest_in_the_simulation(folder):
    for placement in ("local", "round-robin"):
        found = {
            policy: succeeded(folder, *FILES, "--policy", policy, "--ps-placement", placement)
            for policy in POLICIES
        }
        others = max(found[policy]["throughput"] for policy in ("np", "ed", "hd"))
        assert found["best"]["throughput"] >= 0.99 * others


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_counts_waves_as_the_simulation_does(folder, policy):
    slow = CLUSTER.replace("bytes_per_s: 5.0e+9", "bytes_per_s: 5.0e+8")
    (folder.path / "cluster.yaml").write_text(slow)
    wishes = (*FILES, "--policy", policy, "--clock-distance", "1", "--ps-placement", "round-robin")
    simulated = succeeded(folder, *wishes)
    assert (simulated["clock_distance"], simulated["ps_placement"]) == (1, "round-robin")
    assert simulated["synchronisation_s"] > 0
    assert simulated["throughput"] == pytest.approx(simulated["planned_throughput"], rel=0.05)


def test_a_plan_shows_what_it_takes_of_the_nodes(folder):
    near, far = (succeeded(folder, *FILES, "--clock-distance", d)["node_bytes"] for d in ("0", "4"))
    assert len(near) == len(far) == 2
    assert 0 < max(near) < max(far)


def test_more_distance_leaves_less_waiting(folder):
    slow = CLUSTER.replace("bytes_per_s: 5.0e+9", "bytes_per_s: 5.0e+8")
    (folder.path / "cluster.yaml").write_text(slow)
    wishes = (*FILES, "--policy", "ed", "--in-flight", "4", "--ps-placement", "round-robin")
    near, far = (succeeded(folder, *wishes, "--clock-distance", d) for d in ("0", "4"))
    assert near["waiting_fraction"] > 2 * far["waiting_fraction"]
    assert near["waiting_fraction"] >= near["idle_fraction"] >= far["idle_fraction"]


def test_local_placement_with_policy_ed_sends_no_weights(folder):
    found = {
        placement: succeeded(folder, *FILES, "--policy", "ed", "--ps-placement", placement)
        for placement in ("round-robin", "local")
    }
    assert found["local"]["synchronisation_s"] < found["round-robin"]["synchronisation_s"]
    # Of numbers in flight within 1 % of the highest throughput, the least is taken.
    assert found["local"]["throughput"] >= 0.99 * found["round-robin"]["throughput"]


def test_table_and_page_show_virtual_workers_and_stages(folder):
    done = folder.here("simulate", *FILES, "--policy", "np", "--report", "page.html")
    assert (done.code, done.stdout.endswith("wrote page.html\n")) == (0, True)
    words = ("2 virtual workers", "minibatches/s", "busy", "l11")
    for shown in (done.stdout, (folder.path / "page.html").read_text()):
        assert [word for word in words if word not in shown] == []


HEADER, *ROWS = LAYERS.splitlines()
TYPED = "\n".join([f"{HEADER},gpu_type", *(f"{row},fast" for row in ROWS)])


@pytest.mark.parametrize(
    ("layers", "cluster", "options", "code", "named"),
    [
        (LAYERS, CLUSTER.replace(", time_ratio: 2", ""), FILES, 2, "cluster.yaml:3: gpu_types.slow"),
        (TYPED, CLUSTER, FILES, 2, "slow"),
        (LAYERS.replace("l2,0.003", "l2,-1"), CLUSTER, FILES, 2, "layers.csv:4: forward_s"),
        (LAYERS, CLUSTER, ("--layer-table", "none.csv", *FILES[2:]), 2, "none.csv"),
        (LAYERS, CLUSTER, FILES[:2], 2, "--cluster"),
        (LAYERS, CLUSTER, (*FILES, "--trace", "t.jsonl"), 2, "--trace"),
        (LAYERS, CLUSTER.replace("GiB", "MiB"), FILES, 3, "layers.csv:2"),
        (LAYERS, CLUSTER.replace("2GiB", "40MiB"), (*FILES, "--policy", "np"), 3, "cluster.yaml:4"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_place(folder, layers, cluster, options, code, named):
    (folder.path / "layers.csv").write_text(layers)
    (folder.path / "cluster.yaml").write_text(cluster)
    done = folder.here("simulate", *options, "--in-flight", "2", "--json")
    assert done.code == code, done.stdout
    assert named in done.error["message"]
