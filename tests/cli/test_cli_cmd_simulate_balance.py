"""Balanced batches from the command line."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from workbench import ProjectFolder

from hetctl.methods.balance.manager import Observation
from hetctl.methods.balance.managers import make_manager
from hetctl.methods.balance.observation_log import ManagerStart, json_line, logged
from hetctl.model.training_settings import MANAGERS, ON, BalanceSettings

WORKERS = """\
worker,batch,seconds,max_batch
v100,16,0.44,128
v100,128,1.42,128
k80,8,0.95,64
k80,64,2.81,64
"""
SLOWER = "worker,batch,seconds\nk80,8,1.9\nk80,64,5.6\n"
KEYS = {
    "schema_version", "algorithm", "predictor", "batch", "workers", "total_s", "t_star_s", "ratio",
    "reached_at", "phases", "iterations", "warnings",
}  # fmt: skip
PHASE = {
    "first", "last", "t_star_s", "best_s", "best_batches", "equal_s", "steady_s", "ratio", "reached_at",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "workers.csv").write_text(WORKERS)
    (tmp_path / "slower.csv").write_text(SLOWER)
    return ProjectFolder(tmp_path)


def simulated(folder, *arguments, batch=64, iterations=60):
    wishes = ("--workers", "workers.csv", "--batch", str(batch), "--iterations", str(iterations))
    return partial(folder.here, "simulate", *wishes, *arguments)


def refused(folder, code, *arguments, **wishes):
    before = folder.tree()
    run = simulated(folder, *arguments, **wishes)
    done = run("--json")
    assert (done.code, run().stdout) == (code, "")
    assert folder.tree() == before
    return done.error["message"]


@pytest.mark.parametrize("algorithm", MANAGERS)
def test_the_result_has_the_keys_that_were_promised(folder, algorithm):
    done = simulated(folder, "--algorithm", algorithm, "--json")()
    result = done.json
    assert (done.code, set(result), set(result["phases"][0])) == (0, KEYS, PHASE)
    assert (result["algorithm"], result["workers"]) == (algorithm, ["v100", "k80"])
    assert result["predictor"] == ("narx" if algorithm == "cpu" else None)
    assert len(result["iterations"]) == 60
    assert result["iterations"][0]["batches"] == [32, 32]
    assert {sum(one["batches"]) for one in result["iterations"]} == {64}
    last = result["iterations"][-1]
    assert result["total_s"] == pytest.approx(last["start_s"] + last["duration_s"])
    assert [max(one["worker_s"]) for one in result["iterations"]] == [
        one["duration_s"] for one in result["iterations"]
    ]
    (phase,) = result["phases"]
    assert all(phase[name] == result[name] for name in ("t_star_s", "ratio", "reached_at"))


def test_a_change_begins_a_phase_of_its_own(folder):
    before, after = simulated(folder, "--change", "30:slower.csv", "--json")().json["phases"]
    assert (before["first"], before["last"], after["first"], after["last"]) == (0, 29, 30, 59)
    assert after["t_star_s"] > before["t_star_s"]
    assert after["best_batches"][0] > before["best_batches"][0]


def test_people_see_phases_and_batches(folder):
    done = simulated(folder, "--algorithm", "cpu", "--predictor", "memoryless", "--change", "30:slower.csv")()
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert done.code == 0
    assert [line[:3] for line in lines if line[1:2] == ["to"]] == [["0", "to", "29"], ["30", "to", "59"]]
    assert [line[:2] for line in lines if line[0] in ("v100", "k80")] == [["v100", "32"], ["k80", "32"]]
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_a_straggler_is_warned_of_by_its_name(folder):
    (folder.path / "late.csv").write_text(
        "worker,batch,seconds\nfast,1,0.01\nalso,1,0.01\nold-one,1,3.0\nold-one,64,9.0\n"
    )
    late = ("--workers", "late.csv", "--batch", "96", "--iterations", "40", "--json")
    (warning,) = folder.here("simulate", *late).json["warnings"]
    assert "old-one" in warning


def test_the_same_seed_gives_the_same_result(folder):
    once, again, other = (
        simulated(folder, "--jitter", "0.05", "--seed", seed, "--json")().stdout for seed in ("1", "1", "2")
    )
    assert once == again != other


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--batch", "1"], 2, "--batch is 1"),
        (["--batch", "193"], 3, "workers.csv: max_batch"),
        (["--workers", "none.csv"], 2, "none.csv"),
        (["--change", "60:slower.csv"], 2, "--change 60"),
        (["--change", "0:slower.csv"], 2, "--change 0"),
        (["--change", "5:slower.csv", "--change", "5:slower.csv"], 2, "--change 5"),
        (["--change", "slower.csv"], 2, "--change"),
        (["--jitter", "nan"], 2, "--jitter"),
        (["--predictor", "narx"], 2, "--predictor"),
        (["--seed", "-1"], 2, "--seed"),
        (["--outage", "w@1"], 2, "--outage"),
        (["--algorithm", "best"], 2, "--algorithm"),
    ],
)
def test_wrong_options_are_refused(folder, arguments, code, said):
    assert said in refused(folder, code, *arguments)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("workers.csv", WORKERS + "k80,64,3,64\n", "workers.csv:6: batch"),
        ("workers.csv", "worker,batch,time\na,1,1\n", "workers.csv:1"),
        ("slower.csv", SLOWER.replace("k80", "k8"), "slower.csv:2: worker"),
        ("slower.csv", WORKERS.replace(",64\n", ",99\n"), "slower.csv:4: max_batch"),
    ],
)
def test_wrong_files_are_refused_by_file_line_and_rule(folder, name, text, said):
    (folder.path / name).write_text(text)
    assert said in refused(folder, 2, "--change", "30:slower.csv")


def log_of_a_run(folder):
    settings, batches = BalanceSettings(ON, "curve"), (32, 32)
    manager = make_manager(settings, batches)
    records = [ManagerStart(settings, ("a:0", "[b]:0"), batches, 0)]
    for number in range(30):
        seen = [Observation(own, s * own) for own, s in zip(manager.batches, (0.01, 0.03), strict=True)]
        records.append(logged(float(number), number, seen, manager.update(seen)))
    (folder.path / "m.jsonl").write_text("".join(map(json_line, records)))
    return records


def test_a_real_runs_log_is_repeated(folder):
    log_of_a_run(folder)
    done = folder.here("simulate", "--replay", "m.jsonl", "--json")
    assert (done.code, done.json["equal"], done.json["iterations"]) == (0, True, 30)
    assert (done.json["first_batches"], done.json["last_batches"]) == ([32, 32], [48, 16])
    assert done.json["gain"] > 1.5
    shown = folder.here("simulate", "--replay", "m.jsonl", "--report", "m.html").stdout
    assert "[b]:0" in (folder.path / "m.html").read_text()
    assert "[b]:0      32    16" in shown


def test_a_log_with_another_answer_has_exit_code_1(folder):
    records = log_of_a_run(folder)
    records[5] = replace(records[5], answer=(1, 63))
    (folder.path / "m.jsonl").write_text("".join(map(json_line, records)))
    done = folder.here("simulate", "--replay", "m.jsonl")
    assert done.code == 1
    assert "[1, 63]" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--replay", "none.jsonl"), "none.jsonl"),
        (("--replay", "workers.csv"), "workers.csv: line 1"),
        (("--replay", "m.jsonl", "--batch", "3"), "--batch"),
        (("--workers", "workers.csv"), "--batch"),
    ],
)
def test_a_wrong_replay_is_refused(folder, arguments, message):
    done = folder.here("simulate", *arguments, "--json")
    assert done.code == 2
    assert message in done.error["message"]
