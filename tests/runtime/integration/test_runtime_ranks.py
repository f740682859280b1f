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
from tiny_networks import ENSEMBLES, MODULES, functions_of
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
    others = (member("other", max_gpus=2),) if launch == MEMBERS else ()
    site = replace(SITE, launch=launch)
    short = real_job(tmp_path / "short", framework, (last, *others), slots=1 + len(others), site=site)
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
    for name in ("last", "other") if others else ():
        assert restart_s(short, name) == startup_s(short, name)


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


@pytest.mark.parametrize(("framework", "to_raise", "to_die"), [("tensorflow", 1, 0), ("pytorch", 0, 1)])
def test_a_group_is_formed_again_after_the_loss_of_a_rank(tmp_path, framework, to_raise, to_die):
    members = [
        on_both(member(how, how=how, rank=rank, done=str(tmp_path / how)))
        for how, rank in (("raise", to_raise), ("kill", to_die))
    ]
    job = real_job(tmp_path / "job", framework, tuple(members), slots=2, train_fn="fragile_train_fn")
    assert "ended: finished" in job.drive()
    ends = [(event.data["member"], event.data["reason"]) for event in job.events("task_ended")]
    assert [reason for name, reason in ends if name == "raise"] == ["program-error", "finished"]
    assert [reason for name, reason in ends if name == "kill"] == ["killed", "finished"]
    errors = [[event.data["error"] for event in job.events("failed", one.name)] for one in members]
    assert errors == [["ValueError: this rank has had enough"], []]


@pytest.mark.parametrize("framework", MODULES)
def test_a_killed_group_goes_on_within_its_epoch(tmp_path, framework):
    """Another member like the killed one trains in the same job without a fault."""
    long, whole = (
        replace(on_both(member(name, pause_s=0.1)), checkpoint=CheckpointInterval(3, STEPS))
        for name in ("long", "whole")
    )
    job = real_job(tmp_path / "job", framework, (long, whole), slots=2, train_fn="fit_train_fn")
    process = job.start()
    wait_for(lambda: len(job.events("checkpoint", "long")) >= 2, 90)
    os.kill(ranks_of(job.run.path)[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=90)
    assert "ended: finished" in output
    first, second = (event.data for event in job.events("started", "long"))
    assert (first["epochs"], first["part_samples"]) == (0, 0)
    assert second["epochs"] == 0
    assert second["part_samples"] >= 2 * 3 * 64
    assert second["part_samples"] % (3 * 64) == 0
    assert job.trained("long") == job.trained("whole") == [1, 2]
    ours, theirs = weights(job, "long"), weights(job, "whole")
    assert all(np.array_equal(array, theirs[name]) for name, array in ours.items())


@pytest.mark.parametrize(
    ("framework", "gpus", "rank"), [("pytorch", 1, 0), ("pytorch", 2, 1), ("tensorflow", 2, 0)]
)
def test_sigterm_writes_a_checkpoint_within_an_epoch(tmp_path, framework, gpus, rank):
    slow = member("slow", max_gpus=gpus, pause_s=0.4)
    job = real_job(tmp_path / "job", framework, (slow,), slots=gpus, train_fn="fit_train_fn", retries=0)
    process = job.start()
    wait_for(lambda: job.events("first_step", "slow"), 90)
    ranks = ranks_of(job.run.path)
    os.kill(ranks[rank], signal.SIGTERM)
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
