"""Real training of members of one shape in one process."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from driven_job import Job
from tiny_networks import ENSEMBLES, functions_of

from hetctl.model.ensemble import Ensemble, Member, StopRule
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.runtime.worker.member_trainer import own_arrays
from hetctl.storage.run_files import checkpoint_folder

pytestmark = pytest.mark.training


def member(name, seed, epochs=3, **config):
    return Member(name, config, 32, seed, StopRule("val_accuracy", "max", 99, max_epochs=epochs), max_gpus=1)


def real_job(folder, members, *, fuse=True):
    """Return a job on one slot."""
    folder.mkdir()
    ensemble = Ensemble("e", "pytorch", functions_of("pytorch"), members, str(ENSEMBLES))
    configs = {one.name: {} for one in members}
    job = Job(folder, configs, slots=1, ensemble=ensemble, planner="fluid", options={"fuse": fuse})
    job.python = sys.executable
    return job


def tasks(job):
    """Return mode and end of each task, in the order of their ends."""
    modes = {(e.round, e.data["member"]): e.data["mode"] for e in job.events("task_started")}
    ends = job.events("task_ended")
    return [
        (e.data["member"], modes[e.round, e.data["member"]], e.data["reason"], e.data["fault"]) for e in ends
    ]


def state(job, name):
    return CheckpointFolder(checkpoint_folder(job.spec, name)).load()


def assert_same(job, other, name):
    ours, theirs = state(job, name), state(other, name)
    assert ours.state.random_state == theirs.state.random_state
    for epoch, expected in zip(ours.state.epochs, theirs.state.epochs, strict=True):
        assert epoch.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=6e-3)
    arrays, others = own_arrays(ours.arrays), own_arrays(theirs.arrays)
    assert arrays.keys() == others.keys()
    for key, array in arrays.items():
        np.testing.assert_allclose(array, others[key], rtol=1e-2, atol=2e-3, err_msg=key)


def test_members_of_one_shape_train_together_and_each_as_alone(tmp_path):
    """One of them diverges, one stops earlier, and one of another shape waits for the slot."""
    members = (
        member("first", 3, dropout=0.2),
        member("short", 4, epochs=2, dropout=0.3, learning_rate=0.002),
        member("wild", 5, dropout=0.2, learning_rate=1e30),
        member("wide", 6, units=40, dropout=0.2),
        member("last", 7, dropout=0.1, learning_rate=0.005),
    )
    fused = real_job(tmp_path / "fused", members)
    alone = real_job(tmp_path / "alone", members, fuse=False)
    for job in (fused, alone):
        assert "ended: finished" in job.drive()
    began, ended = {}, {}
    for name, mode, reason, fault in tasks(fused):
        began.setdefault(name, mode)
        # A machine with other work may find members alone faster: then some leave, and come again.
        ended[name] = reason, fault
    assert began == {**dict.fromkeys(("first", "short", "wild", "last"), "fused"), "wide": "data-parallel"}
    assert ended.pop("wild") == ("bad-input", True)
    assert set(ended.values()) == {("finished", False)}
    assert [error.data["error"] for error in fused.events("failed", "wild")] == [
        error.data["error"] for error in alone.events("failed", "wild")
    ]
    for name in ("first", "short", "last", "wide"):
        assert_same(fused, alone, name)
    used = sum(e.data["gpu_seconds"] or 0.0 for e in fused.events("task_ended") if "gpu_seconds" in e.data)
    spans = [e.time for kind in ("task_started", "task_ended") for e in fused.events(kind)]
    assert 0 < used < max(spans) - min(spans)
