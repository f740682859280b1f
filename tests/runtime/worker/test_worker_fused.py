"""Members that a rank trains together: who stays, who has to leave, and what the driver hears."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack

import pytest
from tiny_networks import ENSEMBLES, functions_of

from hetctl.model.ensemble import Ensemble, Member, StopRule
from hetctl.model.plan import FUSED, Allocation, Placement
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data.round_inputs import InputShare
from hetctl.runtime.frameworks import torch_fused
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.fused import train_fused
from hetctl.runtime.worker.group import RankInfo
from hetctl.runtime.worker.messages import Assignment, TaskMessage, TrainingSpec
from hetctl.storage.event_files import read_events

pytestmark = pytest.mark.training


def assignment(folder, name, seed, **config):
    member = Member(name, config, 32, seed, StopRule("val_accuracy", "max", 9, max_epochs=2))
    ensemble = Ensemble("e", "pytorch", functions_of("pytorch"), (member,), str(ENSEMBLES))
    allocation = Allocation(name, 1, FUSED, 1.0, (Placement("localhost", (0,), seed),), rate_known=False)
    spec = TrainingSpec(
        *("r", f"r-{folder}", 0, ensemble, allocation, f"{folder}/checkpoints/{name}"),
        *(time.time() + 3600, (InputShare(),)),
    )
    return Assignment(TaskMessage(FUSED, str(folder), name, spec), RankInfo(0, 1, name), time.time())


def test_who_cannot_train_fused_or_fails_leaves_the_others(tmp_path, monkeypatch):
    # Whatever else this machine does.
    monkeypatch.setattr(torch_fused.Widths, "best", lambda *_: 4)
    for part in ("events", "logs"):
        (tmp_path / part).mkdir()
    first, *others = (
        assignment(tmp_path, "first", 1),
        assignment(tmp_path, "wide", 2, units=40),
        assignment(tmp_path, "broken", 3, broken=True),
        assignment(tmp_path, "wild", 4, learning_rate=1e30),
        assignment(tmp_path, "last", 5),
    )
    arriving, sent = deque(others), []
    with ExitStack() as keep:
        context = WorkerContext(
            *(Binding("localhost", 0, None, (0,)), keep),
            send=lambda **message: sent.append(message),
            arrived=lambda: arriving.popleft() if arriving else None,
        )
        train_fused(first, context)
    ends = {message["member"]: message["code"] for message in sent if "done" in message}
    assert ends == {"first": 0, "wide": 0, "broken": 1, "wild": 65, "last": 0}
    lasts = {name: [*read_events(tmp_path / "events" / f"{name}.jsonl")][-1] for name in ends}
    assert {name: event.kind for name, event in lasts.items()} == {
        **dict.fromkeys(("first", "last"), "converged"),
        **dict.fromkeys(("broken", "wild"), "failed"),
        "wide": "stopped",
    }
    assert (lasts["wide"].data["reason"], lasts["wide"].data["part_samples"]) == ("alone", 32)
    said = (tmp_path / "logs" / "wide.log").read_text()
    assert "wide has to train alone: its modules differ from those of the others" in said
    # Each message about a member names it, or all would have written its events.
    assert all("member" in message for message in sent if "written" in message)
    for name, error in (("broken", "ValueError: no such network"), ("wild", "training diverged")):
        assert error in (tmp_path / "logs" / f"{name}.log").read_text()
