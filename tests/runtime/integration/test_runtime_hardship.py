"""Real training with a full disk, checkpoints that are damaged or cannot be read, and too little memory."""

from __future__ import annotations

import errno
import resource
import threading
from pathlib import Path

import pytest
from disk_faults import Faults
from driven_job import Job
from tiny_networks import ENSEMBLES, functions_of
from workbench import wait_for

from hetctl.model.ensemble import Ensemble, Member, StopRule
from hetctl.model.profile import MemberProfile
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.scheduling.planners import PLANNERS
from hetctl.storage.run_files import checkpoint_folder

pytestmark = pytest.mark.training
FLOTILLA = PLANNERS["flotilla"]
EPOCHS = 6
SMALLER_THAN_A_CHECKPOINT = 16 * 1024


def real_job(folder: Path, train_fn: str, config: dict, framework: str = "pytorch", **member) -> Job:
    stop = StopRule("val_accuracy", "max", 99, max_epochs=EPOCHS)
    members = (Member("m", config, **{"batch_size": 32, "seed": 5, "stop": stop, "max_gpus": 1} | member),)
    functions = functions_of(framework, train_fn)
    return Job(
        folder, {}, slots=1, grace_s=60, profiles=(MemberProfile("m", {1: 1000.0}, None, 640),),
        ensemble=Ensemble("tiny", framework, functions, members, str(ENSEMBLES)),
    )  # fmt: skip


def test_a_full_silent_or_damaging_disk_costs_no_epoch(tmp_path, monkeypatch):
    job = real_job(tmp_path, "fit_train_fn", {"pause_s": 0.02})
    checkpoints = CheckpointFolder(checkpoint_folder(job.spec, "m"))

    def stop_after_two_epochs():
        wait_for(lambda: len(job.trained("m")) >= 2)
        job.run.job(0).stop.write_text("signal\n")

    stopper = threading.Thread(target=stop_after_two_epochs)
    stopper.start()
    job.drive_by(FLOTILLA, monkeypatch, real=True)
    stopper.join()
    assert (job.reason, job.reasons("m")) == ("signal", ["signal"])
    before = checkpoints.load().state

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALLER_THAN_A_CHECKPOINT, limits[1]))
    try:
        job.drive_by(FLOTILLA, monkeypatch, number=1, real=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    end = job.events("task_ended")[-1].data
    assert (job.reason, end["reason"], end["description"], end["fault"]) == (
        "disk-full",
        "disk-full",
        "disk full",
        False,
    )
    assert checkpoints.load().state == before
    assert not list(checkpoints.path.glob("*.tmp"))
    assert job.progress()["m"].active

    newest = sorted(checkpoints.path.glob("*.npz"))[-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    faults = Faults(tmp_path)
    for name, value in faults.environment.items():
        monkeypatch.setenv(name, value)
    faults.begin(600, (errno.ESTALE, "open", ".npz"))
    healer = threading.Thread(
        target=lambda: wait_for(faults.hits) and faults.begin(2.0, (errno.EIO, "read", ".npz"))
    )
    healer.start()
    job.drive_by(FLOTILLA, monkeypatch, number=2, real=True)
    healer.join()
    assert faults.hits()
    assert [event.data["name"] for event in job.events("checkpoint_invalid", "m")] == [newest.stem]
    assert f"checkpoint {newest.stem} is damaged" in job.run.log_of("m").read_text()
    assert job.progress()["m"].converged == f"{EPOCHS} epochs done"
    assert job.trained("m") == list(range(1, EPOCHS + 1))


@pytest.mark.parametrize(
    ("framework", "error"),
    [
        ("tensorflow", "MemoryError: Unable to allocate"),
        ("pytorch", "RuntimeError: [enforce fail at alloc_cpu.cpp"),
    ],
    ids=["tensorflow", "pytorch"],
)
def test_a_member_out_of_memory_continues_with_a_smaller_batch(tmp_path, monkeypatch, framework, error):
    job = real_job(tmp_path, "hungry_train_fn", {"most": 40}, framework, batch_size=64, min_batch_size=16)
    job.drive_by(FLOTILLA, monkeypatch, real=True)
    assert [event.data["reason"] for event in job.events("task_ended")] == ["out-of-memory", "finished"]
    assert [event.data["batch_size"] for event in job.events("task_started")] == [64, 32]
    (failed,) = job.events("failed", "m")
    assert failed.data["error"].startswith(error)
    assert failed.data["peak_memory_bytes"] > 2**26
    assert "GiB at its peak" in job.events("task_ended")[0].data["description"]
    assert job.progress()["m"].converged
