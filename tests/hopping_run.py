"""Events of a run whose members hop, as its driver would write them, from a simulation of its visits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hetctl.methods.hopper.hop_plans import planned_visits
from hetctl.methods.hopper.schedule import SearchOptions, UnitTimes
from hetctl.methods.hopper.simulate import Outage, simulate_hops
from hetctl.model.hops import Visit

BEGAN_AT = 1_000_000.0


def trace_of(members, partitions=2, epochs=2, lost=False):
    """Return the trace of members that hop over two nodes of two GPUs; with `lost`, one GPU fails."""
    has = np.array([[j % 2 == k // 2 for k in range(4)] for j in range(partitions)])
    shape = (len(members), partitions, 4)
    times = [np.where(has[None], np.full(shape, seconds), np.inf) for seconds in (10.0, 1.0)]
    names = (tuple(f"p{j}" for j in range(partitions)), ("a:0", "a:1", "b:0", "b:1"))
    train, evaluate = (UnitTimes(tuple(members), *names, seconds) for seconds in times)
    count = dict.fromkeys(members, epochs)
    return simulate_hops(
        train,
        plan=planned_visits(train, evaluate, count, SearchOptions(seconds=0.02)),
        epochs=dict.fromkeys(members, 2 * epochs),
        evaluate=evaluate,
        outages=[Outage("a:0", 5.0, 8.0)] if lost else [],
    )


def described(visit: Visit) -> dict:
    return {
        "number": visit.number,
        "epoch": visit.epoch // 2 + 1,
        "evaluates": visit.epoch % 2 == 1,
        "partition": int(visit.partition[1:]),
        "worker": visit.worker,
    }


def visit_events(records) -> dict[str, list[dict]]:
    """Return the events about visits by member."""
    found: dict[str, list[dict]] = {}
    at: dict[str, str] = {}
    for record in records:
        visit, node = record.visit, record.visit.worker[0]
        times = {"began_at": BEGAN_AT + record.start_s, "ended_at": BEGAN_AT + record.end_s}
        hops = at.get(visit.config, node) != node
        more = {
            "waited_s": 0.5 * hops,
            "hop_s": 0.25 * hops,
            "bytes": 1000 * hops,
            "samples": 50,
            "loss": None if visit.epoch % 2 else 0.5,
        }
        kind = "visit_lost" if record.lost else "visit"
        event = {"kind": kind, "time": times["ended_at"], "round": 0, **described(visit), **times}
        found.setdefault(visit.config, []).append(event | ({"reason": "killed"} if record.lost else more))
        at[visit.config] = at.get(visit.config, node) if record.lost else node
    return found


def plan_event(**other) -> dict:
    workers = {"a:0": ["p0"], "a:1": ["p0"], "b:0": ["p1"], "b:1": ["p1"]}
    plan = {"scheduler": "best", "predicted_s": 50.0, "lower_bound_s": 40.0, "workers": workers}
    return {"kind": "hop_plan", "time": BEGAN_AT, "round": 0, **plan, "reason": "start", **other}


def write_events(folder: Path, name: str, events: list[dict]) -> None:
    """Append events to the file of a member, or of the driver."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def write_run(folder: Path, records) -> None:
    """Write the events of a job that has ended: the driver's, and those of all members."""
    end_s = BEGAN_AT + max(record.end_s for record in records)
    members = sorted({record.visit.config for record in records})
    started = {"job": 0, "batch_id": "17", "nodes": [], "deadline": 9e9}
    opened = {"job": 0, "predicted_s": 50.0, "members": members}
    driver = [
        {"kind": "job_started", "time": BEGAN_AT - 1, "round": 0, **started},
        {"kind": "round_started", "time": BEGAN_AT - 1, "round": 0, **opened},
        plan_event(),
        {"kind": "round_ended", "time": end_s, "round": 0, "ended_by": "converged"},
        {"kind": "job_ended", "time": end_s, "round": 0, "job": 0, "reason": "finished"},
    ]
    write_events(folder, "driver", driver)
    for member, events in visit_events(records).items():
        write_events(folder, member, events)
