"""A run whose members hop, as `status`, `report` and `hopper trace` show it."""

from __future__ import annotations

import json

import pytest
from hopping_run import trace_of, write_events, write_run
from workbench import greedy_slurm, new_project

ENSEMBLE = """\
name: hopping
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
stop: {max_epochs: 2}
samples_per_epoch: 100
partitions: {count: 2, path: '/p/{partition}.npz'}
members: [{name: m0}, {name: m1}, {name: m2}]
"""
SITE = """\
extends: slurm
nodes: 2
gpus_per_node: 2
queues: [{name: gpu, max_nodes: 2, max_wall: 24h}]
queue: gpu
"""
TRACE = trace_of(("m0", "m1", "m2"), lost=True)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A run that was submitted with --mode hopper, before its first job."""
    monkeypatch.setenv("PATH", greedy_slurm(tmp_path / "bin"))
    project = new_project(tmp_path / "project", ENSEMBLE)
    (project.path / "site-configs").mkdir()
    (project.path / "site-configs" / "mini.yaml").write_text(SITE)
    rates = "".join(f"m{i},{gpus},{100 * gpus}\n" for i in range(3) for gpus in (1, 2, 4))
    (project.path / "measured.csv").write_text("member,gpus,rate\n" + rates)
    for arguments in (
        ("profile", "import", "measured.csv", "--site", "mini"),
        ("submit", "--site", "mini", "--gpus", "4", "--time", "1h", "--mode", "hopper"),
    ):
        done = project.here(*arguments)
        assert done.code == 0, done.stderr
    return project


def test_status_shows_members_workers_and_the_plan(project):
    write_run(project.home.run("hopping-001").events, TRACE.records)
    hops = project.here("status", "--json").json["hops"]
    assert (hops["partitions"], hops["visits"], hops["lost"], hops["spans"]) == (2, 24, 1, [])
    assert [member["member"] for member in hops["members"]] == ["m0", "m1", "m2"]
    assert [worker["worker"] for worker in hops["workers"]] == ["a:0", "a:1", "b:0", "b:1"]
    text = project.here("status").stdout
    assert "that hop" in text
    assert "hops planned by best for 4 workers (start): predicted 50 s, bound 40 s, so far" in text
    tables = text[text.index("that hop") :]
    assert [line for line in tables.splitlines()[:-1] if len(line) > 80] == []


def test_hopping_members_get_other_stop_rules_but_stay_together(project):
    done = project.here("change", "--max-epochs", "5", "--json")
    assert [change["what"] for change in done.json["changed"]] == ["max_epochs of m0, m1, m2"]
    for refused in (("drop", "m0"), ("pause", "m0")):
        done = project.here(*refused, "--json")
        assert done.code == 2
    assert "visits of one depend on those of all others" in done.error["message"]


def test_visits_undone_after_their_epoch_are_counted_too(project):
    """The checkpoint of an epoch is lost: its visits were only counted in the run's state."""
    events = project.home.run("hopping-001").events
    write_run(events, TRACE.records)
    own = [record.visit.number for record in TRACE.records if record.visit.config == "m0"]
    epoch = {
        **{"kind": "epoch", "time": 3e6, "round": 0, "epoch": 2, "metrics": {"val_loss": 1.0}},
        **{"duration_s": 1.0, "gpus": 1, "finished_at": 3e6, "rate": 9.0, "evaluate_s": 0.0},
    }
    write_events(events, "m0", [epoch])
    before = project.here("status", "--json").json["hops"]
    undone = {"kind": "visits_undone", "time": 4e6, "round": 0, "numbers": own[-1:], "reason": "lost"}
    write_events(events, "m0", [undone])
    after = project.here("status", "--json").json["hops"]
    assert [(hops["visits"], hops["undone"]) for hops in (before, after)] == [(24, 0), (23, 1)]
    assert after["members"][0]["visited"] == 1


def test_a_run_before_its_first_visit_has_no_hops_yet(project):
    hops = project.here("status", "--json").json["hops"]
    assert (hops["visits"], hops["workers"], hops["plans"]) == (0, [], [])
    assert project.here("status").code == 0
    assert project.here("report").code == 0
    refused = project.here("hopper", "trace")
    assert (refused.code, "no visit of run hopping-001 has ended" in refused.stderr) == (2, True)
    assert not (project.path / "hops.jsonl").exists()


def test_the_report_has_a_chart_of_workers_and_the_prediction(project):
    write_run(project.home.run("hopping-001").events, TRACE.records)
    assert project.here("report").code == 0
    page = (project.path / "report.html").read_text()
    assert 'aria-label="workers over time, by configuration"' in page
    assert "worker b:1" in page
    assert "Hops, predicted and measured" in page
    assert "undone by a failure" in page


def test_a_trace_of_a_run_can_be_repeated(project):
    write_run(project.home.run("hopping-001").events, TRACE.records)
    done = project.here("hopper", "trace", "hopping-001", "-o", "own.jsonl", "--json").json
    assert (done["run"], done["visits"]) == ("hopping-001", 25)
    lines = [json.loads(line) for line in (project.path / "own.jsonl").read_text().splitlines()]
    assert [line["lost"] for line in lines].count(True) == 1
    again = project.here(
        "submit", "--site", "mini", "--gpus", "4", "--time", "1h", "--mode", "hopper",
        "--replay", "own.jsonl", "--new",
    )  # fmt: skip
    assert again.code == 0, again.stderr
    assert (project.home.run("hopping-002").path / "replay.jsonl").exists()


def test_a_run_without_hops_has_none(project):
    done = project.here("submit", "--site", "mini", "--gpus", "4", "--time", "1h", "--new", "--json")
    assert done.code == 0, done.stderr
    assert project.here("status", "--json").json["hops"] is None
