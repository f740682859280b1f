"""Real training by ranks that stay from member to member, and the loss of ranks."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
from driven_job import Job
from tiny_networks import ENSEMBLES, functions_of
from workbench import ranks_of, wait_for

from hetctl.model.ensemble import Ensemble, Member, StopRule
from hetctl.model.site import MEMBERS, NODES, Queue, Site
from hetctl.model.training_settings import STEPS, CheckpointInterval
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.storage.kept_modules import keep_modules, modules_of
from hetctl.storage.run_files import checkpoint_folder, write_spec

pytestmark = pytest.mark.training
STOP = StopRule("val_accuracy", "max", 3, max_epochs=2)
SITE = Site("l", "local", "local", 1, 2, 2, 2**30, (Queue("local"),), device="slot")


def real_job(folder, framework, members, *, slots=1, train_fn=None, **how):
    """Return a job with real training; each member has its largest number of GPUs."""
    folder.mkdir()
    ensemble = Ensemble("e", framework, functions_of(framework, train_fn), members, str(ENSEMBLES))
    rates = {member.name: {k: 1000.0 * k for k in range(1, member.max_gpus + 1)} for member in members}
    job = Job(
        folder, {m.name: {} for m in members}, slots=slots, rates=rates, ensemble=ensemble,
        options={"alpha": 0.0}, **how,
    )  # fmt: skip
    job.python = sys.executable
    return job


def member(name, seed=3, max_gpus=1, **config):
    return Member(name, config, 32, seed, STOP, max_gpus=max_gpus)


def startup_s(job, name):
    """Return the seconds to a member's first step."""
    (first,) = job.events("first_step", name)
    return first.data["startup_s"]


def restart_s(job, name):
    """Return the same from the start of the member's task, on ranks that trained before; None on others."""
    (first,) = job.events("first_step", name)
    return first.data["restart_s"]


def weights(job, name):
    return CheckpointFolder(checkpoint_folder(job.spec, name)).load().arrays


@pytest.mark.parametrize(("framework", "launch"), [("tensorflow", NODES), ("pytorch", MEMBERS)])
def test_whom_a_rank_trained_before_makes_no_difference(tmp_path, framework, launch):
    """Ranks stay, but for those in a member's own step, each of whose starts counts in full."""
    last = member("last", seed=4, units=24, dropout=0.2)
    long = real_job(tmp_path / "long", framework, (member("first"), member("second", batch_norm=True), last))
    short = real_job(tmp_path / "short", framework, (last,), site=replace(SITE, launch=launch))
    for job in (long, short):
        assert "ended: finished" in job.drive()
    assert len(long.rounds()) == 3
    started = [startup_s(long, name) for name in ("first", "second", "last")]
    assert max(started[1:]) < started[0]
    restarted = [restart_s(long, name) for name in ("first", "second", "last")]
    assert restarted[0] is None
    assert all(0 < again <= whole for again, whole in zip(restarted[1:], started[1:], strict=True))
    ours, theirs = weights(long, "last"), weights(short, "last")
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert np.array_equal(array, theirs[name]), name
    assert restart_s(short, "last") == (startup_s(short, "last") if launch == MEMBERS else None)


def on_both(each):
    """Return a member that trains on two slots alone."""
    return replace(each, min_gpus=2, max_gpus=2)


def test_ranks_train_one_network_in_parts_after_another(tmp_path):
    whole, *parted = (on_both(member(name, seed=4, batch_norm=True)) for name in ("whole", "first", "last"))
    members = (*(replace(one, shard=True) for one in parted), whole)
    job = real_job(tmp_path / "job", "pytorch", members, slots=2)
    assert "ended: finished" in job.drive()
    first, last, whole = (
        [event.data["metrics"] for event in job.events("epoch", one.name)] for one in members
    )
    assert first == last
    for ours, theirs in zip(last, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    names = {path.name for path in checkpoint_folder(job.spec, "last").glob("*.shards")}
    assert len(names) == 2


def test_an_edit_does_not_change_the_members_that_train(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("tiny_torch", "handwriting"):
        shutil.copy(ENSEMBLES / f"{name}.py", mine)
    job = real_job(tmp_path / "job", "pytorch", (member("one"),))
    spec = replace(job.spec, ensemble=replace(job.spec.ensemble, folder=str(mine)))
    spec = replace(spec, modules=modules_of(spec.ensemble))
    keep_modules(spec, job.run)
    write_spec(job.run, spec)
    (mine / "tiny_torch.py").write_text("raise ValueError('edited')")
    assert "ended: finished" in job.drive()
    assert job.trained("one") == [1, 2]


@pytest.mark.parametrize(
    ("framework", "to_raise", "to_kill", "to_stop"), [("tensorflow", 1, [0], 0), ("pytorch", 0, [0, 1], 1)]
)
def test_a_group_loses_ranks_and_goes_on_within_its_epoch(tmp_path, framework, to_raise, to_kill, to_stop):
    """In the same job a rank of one member raises an error, and another member trains without a fault."""
    fragile = member("raise", how="raise", rank=to_raise, done=str(tmp_path / "raised"))
    long, whole = (
        replace(each, checkpoint=CheckpointInterval(3, STEPS))
        for each in (member("long", pause_s=0.4), member("whole"))
    )
    members = tuple(map(on_both, (long, whole, fragile)))
    job = real_job(tmp_path / "job", framework, members, slots=2, train_fn="fragile_train_fn")
    process = job.start()

    def started(times):
        wait_for(lambda: len(job.events("first_step", "long")) == times, 90)
        return job.events("started", "long")[-1].data

    for times, rank in enumerate(to_kill, 1):
        started(times)
        known = len(job.events("checkpoint", "long"))
        wait_for(lambda known=known: len(job.events("checkpoint", "long")) > known, 90)
        os.kill(ranks_of(job.run.path)[rank], signal.SIGKILL)
    kills = len(to_kill)
    again = started(kills + 1)
    assert again["epochs"] or again["part_samples"] >= kills * 3 * 64
    assert again["part_samples"] % (3 * 64) == 0
    ranks = ranks_of(job.run.path)
    os.kill(ranks[to_stop], signal.SIGTERM)
    last = wait_for(lambda: len(all_of := job.events("started", "long")) == kills + 2 and all_of[-1].data, 60)
    assert ranks_of(job.run.path) == ranks
    output, _ = process.communicate(timeout=120)
    assert "ended: finished" in output
    (stopped,) = job.events("stopped", "long")
    assert stopped.data["reason"] == "signal"
    assert 0 < stopped.data["part_samples"] == last["part_samples"] < 640
    ends = {each.name: [] for each in members}
    for event in job.events("task_ended"):
        ends[event.data["member"]].append((event.data["reason"], event.data["fault"]))
    assert ends == {
        "long": [("killed", True)] * kills + [("told", False), ("finished", False)],
        "whole": [("finished", False)],
        "raise": [("program-error", True), ("finished", False)],
    }
    errors = [[event.data["error"] for event in job.events("failed", each.name)] for each in members]
    assert errors == [[], [], ["ValueError: this rank has had enough"]]
    assert job.trained("long") == job.trained("whole") == [1, 2]
    ours, theirs = weights(job, "long"), weights(job, "whole")
    assert all(np.array_equal(array, theirs[name]) for name, array in ours.items())


def test_sigterm_writes_a_checkpoint_of_a_lone_rank_within_an_epoch(tmp_path):
    job = real_job(
        tmp_path / "job", "pytorch", (member("slow", pause_s=0.4),), train_fn="fit_train_fn", retries=0
    )
    process = job.start()
    wait_for(lambda: job.events("first_step", "slow"), 90)
    ranks = ranks_of(job.run.path)
    os.kill(ranks[0], signal.SIGTERM)
    first, second = wait_for(lambda: len(found := job.events("started", "slow")) == 2 and found, 60)
    assert ranks_of(job.run.path) == ranks
    output, _ = process.communicate(timeout=90)
    assert "ended: finished" in output
    (stopped,) = job.events("stopped", "slow")
    assert stopped.data["reason"] == "signal"
    assert 0 < stopped.data["part_samples"] < 640
    assert first.data["part_samples"] == 0
    assert second.data["part_samples"] == stopped.data["part_samples"]
    assert [(e.data["reason"], e.data["fault"]) for e in job.events("task_ended")] == [
        ("told", False),
        ("finished", False),
    ]
    assert job.trained("slow") == [1, 2]
