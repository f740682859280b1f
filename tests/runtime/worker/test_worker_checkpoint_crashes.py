"""A crash of the node at any moment leaves what the events have promised."""

from __future__ import annotations

import shutil

import pytest
from crashes import Recorder, materialize
from test_worker_checkpoint import arrays, state

from hetctl.model.ensemble import Member, StopRule
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.event_files import EventWriter, read_events

STEPS = ((1, 0), (2, 0), (2, 64), (2, 64), (3, 0))
"""Epochs and samples of the checkpoints, one after another: one state is saved twice."""


@pytest.mark.parametrize("metric", ["loss", "val_loss"], ids=["falling", "constant"])
def test_no_crash_loses_what_an_event_has_promised(tmp_path, monkeypatch, metric):
    member = Member("m", stop=StopRule(metric))
    root = tmp_path / "disk"
    root.mkdir()
    recorder = Recorder(root)
    recorder.install(monkeypatch)
    others = {"path": "p", "bytes": 1, "sha256": "s", "duration_s": 1.0}
    folder = CheckpointFolder(make_private_folder(root / "checkpoints") / "m", member=member)
    events = EventWriter(make_private_folder(root / "events"), "m")
    for number, step in enumerate(STEPS):
        folder.save(arrays(number), state(*step))
        events.write("best_checkpoint", epoch=folder.best.epoch, path=folder.best.path)
        events.write("checkpoint", epoch=step[0], part_samples=step[1], **others)
        recorder.promise()
    monkeypatch.undo()
    recorder.close()
    promised = {}
    for crash in recorder.crashes:
        for tree in crash.trees():
            promised[tree] = max(promised.get(tree, 0), crash.promised)
    assert len(promised) > 50
    for number, (tree, least) in enumerate(promised.items()):
        left = tmp_path / f"left-{number}"
        materialize(tree, left)
        found = list(read_events(left / "events" / "m.jsonl"))
        told = [(e.data["epoch"], e.data["part_samples"]) for e in found if e.kind == "checkpoint"]
        best = [e.data["epoch"] for e in found if e.kind == "best_checkpoint"]
        assert told == list(STEPS[: len(told)])
        assert len(told) >= least
        loaded = CheckpointFolder(left / "checkpoints" / "m").load()
        if told:
            assert loaded.state.order[:2] >= told[-1], tree
        if best:
            after = CheckpointFolder(left / "checkpoints" / "m", member=member)
            after.look_for_best(loaded.state)
            assert after.best.epoch >= best[-1]
            kept = after.load(lambda state, best=after.best.epoch: state.order[:2] == (best, 0))
            assert len(kept.state.epochs) == after.best.epoch
        if loaded.arrays is not None:
            assert STEPS[int(loaded.arrays["optimizer/0000"])] == loaded.state.order[:2]
        shutil.rmtree(left)
