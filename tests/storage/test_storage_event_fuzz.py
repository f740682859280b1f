"""10,000 corrupted event files: no reader fails, and no member converges by mistake."""

from __future__ import annotations

import json
import random

import pytest
from whole_folds import progress_of, usage_of

from hetctl.app.run.job_states import reasons_of_jobs
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.storage.event_files import read_events

INPUTS = 10_000
ENSEMBLE = Ensemble("e", "tensorflow", Functions("nets:f", "nets:g"), (Member("a"),), "/project")
PLACE = [{"node": "n1", "gpus": [0]}]
DRIVER = [
    {"kind": "job_started", "time": 1.0, "job": 0, "batch_id": "7", "nodes": [], "deadline": 9e9},
    {"kind": "round_started", "time": 2.0, "index": 0, "job": 0, "predicted_s": 3.5, "members": ["a"]},
    {"kind": "task_started", "time": 2.1, "member": "a", "gpus": 1, "placement": PLACE, "batch_size": 32},
    {
        "kind": "task_ended",
        "time": 9.0,
        "member": "a",
        "exit_code": 137,
        "reason": "killed",
        "description": "SIGKILL",
    },
    {"kind": "node_failed", "time": 9.1, "job": 0, "member": "a", "nodes": ["n1"]},
    {"kind": "round_ended", "time": 9.2, "ended_by": "failed"},
    {"kind": "job_ended", "time": 9.3, "job": 0, "reason": "signal"},
]
MEMBER = [
    {"kind": "started", "time": 2.5, "epochs": 0, "part_samples": 0},
    {"kind": "epoch", "time": 4.0, "epoch": 1, "metrics": {"loss": 0.5}, "duration_s": 1.0, "gpus": 1,
     "finished_at": 4.0, "evaluate_s": 0.1},
    {"kind": "checkpoint", "time": 4.1, "epoch": 1, "part_samples": 0, "bytes": 10, "sha256": "ab"},
    {"kind": "stopped", "time": 5.0, "reason": "deadline", "part_samples": 64},
    {"kind": "failed", "time": 6.0, "error": "no such layer"},
]  # fmt: skip


def garbled(text: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat or replace a part of the bytes, as disks and crashes do."""
    data = bytearray(text)
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randint(1, 30)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 30)]
            case 3:
                data[at:at] = rng.choice(
                    [b"NaN", b"1e999", b"null", b"[", b"{}", b"-", b'"', b"\0", b"9" * 400]
                )
            case _:
                data[at : at + 1] = bytes([rng.randrange(256)])
        data = data or bytearray(b"\n")
    return bytes(data)


@pytest.mark.parametrize("lines", [DRIVER, MEMBER], ids=["driver", "member"])
def test_no_garbled_file_trips_its_readers(lines, tmp_path):
    source = "driver" if lines is DRIVER else "a"
    path = tmp_path / f"{source}.jsonl"
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    rng = random.Random(7)
    for _ in range(INPUTS // 2):
        path.write_bytes(garbled(text, rng))
        events = sorted(read_events(path), key=lambda event: event.time)
        progress = progress_of(ENSEMBLE, events, retries=2)["a"]
        assert not progress.converged
        usage_of(events, 10.0)
        reasons_of_jobs(events)


def test_a_whole_file_is_read_whole(tmp_path):
    for name, lines in (("driver", DRIVER), ("a", MEMBER)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert [event.kind for event in read_events(path)] == [line["kind"] for line in lines]
