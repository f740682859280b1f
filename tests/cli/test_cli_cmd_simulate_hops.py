"""Hops from the command line: simulated, with failures, and refused."""

from __future__ import annotations

import json

import pytest
from workbench import ProjectFolder

TIMES = "config,w0,w1,w2\na,3,5,4\nb,6,2,4\nc,1,7,5\nd,2,2,2\n"
FIGURES = {"schema_version", "makespan_s", "lower_bound_s", "ratio", "plan_seconds"}
COPIES = """\
config,partition,worker,seconds
a,p,w0,4
a,p,w1,4
a,q,w1,4
b,p,w0,4
b,p,w1,4
b,q,w1,4
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "times.csv").write_text(TIMES)
    (tmp_path / "copies.csv").write_text(COPIES)
    (tmp_path / "sized.txt").write_text("1 4\n10 10 10 10\n")
    return ProjectFolder(tmp_path)


def figures(folder, *arguments):
    done = folder.here("simulate", *arguments, "--json")
    assert done.code == 0, done.stdout + done.stderr
    return done.json


def refused(folder, *arguments, code=2):
    done = folder.here("simulate", *arguments, "--json")
    assert done.code == code, done.stdout + done.stderr
    return f"{done.error['message']} {done.error['hint']}"


def hops(folder, name):
    return [json.loads(line) for line in (folder.path / name).read_text().splitlines()]


@pytest.mark.parametrize("scheduler", ["randomized", "milp", "approximate", "best"])
def test_an_epoch_has_its_figures_and_its_trace(folder, scheduler):
    wishes = ("--unit-times", "times.csv", "--scheduler", scheduler, "--solver-time-limit", "0.2")
    plan = figures(folder, *wishes, "--trace", "hops.jsonl")
    assert plan.keys() >= FIGURES
    assert plan["lower_bound_s"] == 16
    assert plan["ratio"] == pytest.approx(plan["makespan_s"] / 16)
    assert plan["ratio"] >= 1
    found = hops(folder, "hops.jsonl")
    assert all(list(hop)[:4] == ["config", "worker", "start", "end"] for hop in found)
    assert {(hop["config"], hop["worker"]) for hop in found} == {
        (config, worker) for config in "abcd" for worker in ("w0", "w1", "w2")
    }
    assert len(found) == 12
    assert max(hop["end"] for hop in found) == plan["makespan_s"]


def test_a_simulation_without_failures_is_the_plan(folder):
    wishes = ("--unit-times", "times.csv", "--scheduler", "approximate")
    one = figures(folder, *wishes)
    assert one["makespan_s"] <= one["makespans_s"]["hopper"]
    five = figures(folder, *wishes, "--epochs", "5")
    assert (five["epochs"], five["lower_bound_s"]) == (5, 80)


@pytest.mark.parametrize("scheduler", ["randomized", "best"])
def test_workers_fail_and_return(folder, scheduler):
    wishes = ("--unit-times", "times.csv", "--scheduler", scheduler, "--solver-time-limit", "0.1")
    result = figures(folder, *wishes, "--outage", "w1@1-1m", "--outage", "w0@0-5", "--trace", "hops.jsonl")
    assert result["makespan_s"] > 60
    assert result["lost_s"] == 1
    found = hops(folder, "hops.jsonl")
    assert sum(hop["lost"] for hop in found) == 1
    assert all(hop["start"] >= 5 for hop in found if hop["worker"] == "w0")
    assert len(found) == 13


def test_a_plan_is_made_anew_where_a_replay_keeps_it(folder):
    """In so little time the first plan is taken on any machine."""
    times, away = ("--unit-times", "times.csv"), ("--outage", "w2@10-40")
    wishes = (*times, "--scheduler", "approximate", "--solver-time-limit", "0.000001", "--epochs", "4")
    figures(folder, *wishes, "--trace", "whole.jsonl")
    kept = figures(folder, *times, "--replay", "whole.jsonl", *away)
    assert figures(folder, *wishes, *away)["makespan_s"] < kept["makespan_s"]


def order(found, of):
    """Return what each configuration, or worker, did, in its order."""
    orders = {}
    for hop in sorted(found, key=lambda hop: (hop["start"], hop["end"])):
        if not hop["lost"]:
            unit = hop["config"], hop["epoch"], hop["partition"], hop["worker"]
            orders.setdefault(hop[of], []).append(unit)
    return orders


def replayed(folder, *recording):
    """Record with workers that fail, replay with other times and no failures; return both traces."""
    wishes = ("--scheduler", "randomized", "--outage", "w1@1-9", "--outage", "w0@0-5")
    figures(folder, "--unit-times", "times.csv", *wishes, *recording, "--trace", "first.jsonl")
    (folder.path / "other.csv").write_text("config,w0,w1,w2\na,9,0,1\nb,1,8,0\nc,5,5,9\nd,7,1,3\n")
    replay = ("--unit-times", "other.csv", "--replay", "first.jsonl", "--seed", "7")
    result = figures(folder, *replay, "--trace", "second.jsonl")
    assert (result["scheduler"], result["lost_s"], result["makespans_s"]) == ("replay", 0, {})
    first, second = hops(folder, "first.jsonl"), hops(folder, "second.jsonl")
    assert any(hop["lost"] for hop in first)
    assert [hop["end"] for hop in first] != [hop["end"] for hop in second]
    return first, second, result


@pytest.mark.parametrize("seed", ["0", "1", "2", "3"])
def test_a_replay_keeps_the_order_of_configurations_and_workers(folder, seed):
    first, second, _ = replayed(folder, "--seed", seed)
    for of in ("config", "worker"):
        assert order(first, of) == order(second, of)


def test_a_replay_has_the_epochs_of_its_log(folder):
    first, second, result = replayed(folder, "--epochs", "3")
    assert (result["epochs"], result["lower_bound_s"]) == (3, 66)
    for of in ("config", "worker"):
        assert order(first, of) == order(second, of)


def test_a_replay_draws_what_its_log_lacks(folder):
    figures(folder, "--unit-times", "times.csv", "--scheduler", "randomized", "--trace", "a.jsonl")
    wishes = ("--unit-times", "times.csv", "--replay", "a.jsonl", "--trace", "b.jsonl")
    assert figures(folder, *wishes, "--epochs", "2")["epochs"] == 2
    assert len(hops(folder, "b.jsonl")) == 24
    again = order((hop for hop in hops(folder, "b.jsonl") if hop["epoch"] == 0), "config")
    assert again == order(hops(folder, "a.jsonl"), "config")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--scheduler", "best"), "--scheduler"),
        (("--solver-time-limit", "1"), "--solver-time-limit"),
        (("--parallelism", "auto"), "--parallelism"),
        (("--efficiency", "1"), "--efficiency"),
        ((), "log.jsonl:2"),
        (("--replay", "none.jsonl"), "none.jsonl"),
    ],
)
def test_wrong_replays_are_refused(folder, arguments, said):
    hop = {"config": "a", "worker": "w0", "start": 0, "end": 3, "partition": "p0", "epoch": 0, "lost": False}
    text = "".join(json.dumps(hop | {"worker": worker}) + "\n" for worker in ("w0", "w9"))
    (folder.path / "log.jsonl").write_text(text)
    before = set(folder.path.iterdir())
    replay = ("--unit-times", "times.csv", "--replay", "log.jsonl", "--trace", "new.jsonl")
    assert said in refused(folder, *replay, *arguments)
    assert set(folder.path.iterdir()) == before


def test_copies_of_partitions_are_used_until_the_last_is_lost(folder):
    wishes = ("--unit-times", "copies.csv", "--scheduler", "randomized")
    assert figures(folder, *wishes)["lower_bound_s"] == pytest.approx(8)
    assert figures(folder, *wishes, "--outage", "w0@1")["makespan_s"] >= 16
    assert "q" in refused(folder, *wishes, "--outage", "w1@1", code=3)
    assert refused(folder, *wishes, "--parallelism", "data-parallel")


def test_few_configurations_train_on_groups(folder):
    wishes = ("--unit-times", "sized.txt", "--scheduler", "randomized", "--parallelism")
    auto = figures(folder, *wishes, "auto", "--efficiency", "0.5")
    assert (auto["mode"], auto["makespan_s"], auto["workers"]) == ("data-parallel", 20, 1)
    assert auto["makespans_s"] == {"data-parallel": 20, "hybrid": 20}
    assert figures(folder, *wishes, "hopper")["makespan_s"] == 40
    away = figures(folder, *wishes, "data-parallel", "--outage", "w3@5-10", "--trace", "hops.jsonl")
    assert away["makespan_s"] == 20
    assert hops(folder, "hops.jsonl")[0]["worker"] == "w0+w1+w2+w3"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--unit-times", "none.csv"), "none.csv"),
        (("--unit-times", "times.csv", "--scheduler", "bset"), "best"),
        (("--unit-times", "times.csv", "--solver-time-limit", "-1"), "-1"),
        (("--unit-times", "times.csv", "--efficiency", "0"), "efficiency"),
        (("--unit-times", "times.csv", "--trace", "no/hops"), "--trace"),
        (("--unit-times", "times.csv", "--jitter", "0.1"), "--jitter"),
        (("--gpus", "4", "--epochs", "3"), "--epochs"),
        (("--unit-times", "wide.csv"), "wide.csv"),
        (("--unit-times", "short.csv"), "short.csv:2"),
        *(
            (("--unit-times", "times.csv", "--scheduler", "randomized", "--outage", away), named)
            for away, named in (("w1", "'--outage'"), ("w1@5-3", "w1@5-3"), ("w1@x", "x"), ("w7@5", "w7"))
        ),
    ],
)
def test_wrong_options_are_refused(folder, arguments, said):
    (folder.path / "wide.csv").write_text(",".join(["1"] * 8000))
    (folder.path / "short.csv").write_text("1,2\n3\n")
    before = set(folder.path.iterdir())
    assert said in refused(folder, *arguments)
    assert set(folder.path.iterdir()) == before


@pytest.mark.parametrize("scheduler", ["randomized", "milp", "approximate", "best"])
@pytest.mark.parametrize("times", ["0,0\n0,0\n", "0,3\n0,0\n", "1e12,1e-300\n2,0\n", "5\n"])
def test_times_of_nothing_and_of_ages(folder, scheduler, times):
    (folder.path / "odd.csv").write_text(times)
    wishes = ("--unit-times", "odd.csv", "--scheduler", scheduler, "--solver-time-limit", "0.1")
    result = figures(folder, *wishes)
    assert result["ratio"] >= 1 - 1e-9
    assert 0 <= result["gpu_busy_fraction"] <= 1 + 1e-9
