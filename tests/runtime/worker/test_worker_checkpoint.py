"""Checkpoints are complete or do not exist."""

from __future__ import annotations

import errno
import io
import os
import stat
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.ensemble import Member, StopRule
from hetctl.model.training_progress import EpochResult
from hetctl.model.training_settings import KeepSettings
from hetctl.runtime.worker.checkpoint import CheckpointFolder, Loaded, TrainingState
from hetctl.storage.patience import Patience


def epoch(number):
    return EpochResult(number, {"loss": 1.0 / number, "val_loss": 0.5}, 2.0, 1, 1000.0 + number)


def state(epochs, part=0):
    return TrainingState(tuple(epoch(n) for n in range(1, epochs + 1)), gpus=2, part_samples=part)


def arrays(seed):
    return {"model/0000": np.random.default_rng(seed).normal(size=(5, 3)), "optimizer/0000": np.array(seed)}


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "member" / "run")


def test_what_was_saved_is_loaded_and_the_last_two_are_kept(folder):
    assert folder.load() == Loaded(None, TrainingState(), ())
    for number, part in ((1, 0), (2, 64), (2, 128), (3, 0), (4, 0)):
        folder.save(arrays(number), state(number, part))
        loaded = folder.load()
        assert (loaded.state, loaded.invalid) == (state(number, part), ())
        assert {name: value.tolist() for name, value in loaded.arrays.items()} == {
            name: value.tolist() for name, value in arrays(number).items()
        }
    assert sorted(path.name for path in folder.path.iterdir()) == [
        f"epoch-0000{n}-000000000000.{ending}" for n in (3, 4) for ending in ("json", "npz")
    ]


def judged(*losses, part=0):
    """Return the state after epochs with these losses, and a part of the next one."""
    epochs = [replace(epoch(n), metrics={"val_loss": loss}) for n, loss in enumerate(losses, start=1)]
    return TrainingState(tuple(epochs), part_samples=part)


def of_epochs(folder):
    return [int(path.name[6:11]) for path in sorted(folder.path.glob("epoch-*-000000000000.json"))]


def test_the_best_epoch_alone_is_kept_and_trained_on_from(tmp_path):
    member = Member("m", stop=StopRule("val_loss", "min"))
    folder = CheckpointFolder(tmp_path / "m", member=member)
    losses = [0.3, 0.1, 0.2, 0.4]
    for number in range(1, 5):
        folder.save(arrays(number), judged(*losses[:number]))
    assert of_epochs(folder) == [2, 3, 4]
    again = CheckpointFolder(tmp_path / "m", member=member)
    assert again.keep_best_alone()
    assert sorted(path.name for path in folder.path.iterdir()) == [
        f"epoch-00002-000000000000.{ending}" for ending in ("json", "npz")
    ]
    loaded = folder.load()
    assert loaded.state == judged(0.3, 0.1)
    assert loaded.arrays["optimizer/0000"] == 2


def test_without_a_best_epoch_nothing_is_deleted(tmp_path):
    folder = CheckpointFolder(tmp_path / "m", member=Member("m", keep=KeepSettings(best=0)))
    folder.save(arrays(1), judged(0.3))
    assert not folder.keep_best_alone()
    assert of_epochs(folder) == [1]


@given(
    losses=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4]), min_size=1, max_size=8),
    keep=st.builds(KeepSettings, best=st.integers(0, 3), last=st.integers(1, 4)),
    mode=st.sampled_from(["min", "max"]),
)
def test_the_best_epochs_are_kept_and_other_old_ones_are_not(tmp_path_factory, losses, keep, mode):
    member = Member("m", stop=StopRule("val_loss", mode), keep=keep)
    folder = CheckpointFolder(tmp_path_factory.mktemp("kept") / "m", member=member)
    sign = 1 if mode == "min" else -1
    for done in range(1, len(losses) + 1):
        folder.save(arrays(done), judged(*losses[:done], part=32))
        folder.save(arrays(done), judged(*losses[:done]))
        ranked = sorted(range(1, done + 1), key=lambda n: (sign * losses[n - 1], n))
        kept = {*ranked[: keep.best], *range(max(1, done - keep.last + 1), done + 1)}
        # The newest two are an epoch and the part before it.
        assert of_epochs(folder) == sorted(kept)
        assert folder.best.epoch == (ranked[0] if keep.best else None)
        again = CheckpointFolder(folder.path, member=member)
        again.look_for_best(judged(*losses[:done]))
        assert again.best == folder.best
        if keep.best:
            best = folder.load(lambda found, best=folder.best: len(found.epochs) == best.epoch)
            assert best.arrays["optimizer/0000"] == folder.best.epoch
            assert (folder.path / folder.best.path).is_file()


@pytest.mark.parametrize("ending", ["json", "npz"])
def test_a_damaged_best_epoch_is_told_and_the_next_best_is_kept(tmp_path, ending):
    folder = CheckpointFolder(tmp_path / "m", member=Member("m"))
    losses = (0.3, 0.1, 0.2, 0.4, 0.5, 0.6)
    for done in (1, 2, 3):
        folder.save(arrays(done), judged(*losses[:done]))
    assert folder.best.epoch == 2
    (folder.path / f"epoch-00002-000000000000.{ending}").write_bytes(b"?")
    folder.save(arrays(4), judged(*losses[:4]))
    assert folder.take_damaged() == ["epoch-00002-000000000000"]
    assert folder.take_damaged() == []
    assert folder.best.epoch == 3
    for done in (5, 6):
        folder.save(arrays(done), judged(*losses[:done]))
    assert of_epochs(folder) == [3, 5, 6]


def test_the_checkpoint_of_an_undone_visit_is_not_the_best(tmp_path):
    """A node that was given up ends epoch 2 with visit 6, better than others that end it with visit 8."""
    folder = CheckpointFolder(tmp_path / "m", member=Member("m"))
    folder.save(arrays(1), replace(judged(0.3), visit=3), since=2)
    folder.save(arrays(8), replace(judged(0.3, 0.2), visit=8), since=3)
    given_up = CheckpointFolder(tmp_path / "m", member=Member("m"))
    given_up.save(arrays(6), replace(judged(0.3, 0.1), visit=6), since=3)
    folder.save(arrays(9), replace(judged(0.3, 0.2, 0.4), visit=9), since=8)
    assert folder.best.epoch == 2
    assert folder.load(lambda found: found.visit == 8).arrays["optimizer/0000"] == 8


def test_what_killed_processes_left_goes_with_old_checkpoints(folder):
    folder.save(arrays(1), state(1))
    left = [folder.path / f"epoch-00001-{samples:012d}" for samples in (100, 200)]
    left[0].with_suffix(".tmp").write_bytes(b"x")
    left[1].with_suffix(".npz").write_bytes(b"x")
    folder.save_part(arrays(1), state(1, 300), 0)
    newer = folder.save_part(arrays(1), state(4, 64), 0)
    for number in (2, 3):
        folder.save(arrays(number), state(number))
    assert sorted(path.name for path in folder.path.iterdir()) == [
        *(f"epoch-0000{n}-000000000000.{ending}" for n in (2, 3) for ending in ("json", "npz")),
        newer.file,
    ]


def test_visits_and_evaluations_are_in_their_order(folder):
    """Also if the ranks of two nodes finish their checkpoints in the other order."""
    states = [
        replace(state(2, 64), visited=(3,), visit=5),
        replace(state(2, 128), visited=(3, 0), visit=7),
        replace(state(2, 128), visited=(1,), evaluating=True, visit=8),
        replace(state(2, 128), visited=(1, 0), evaluating=True, visit=11),
        replace(state(3), visit=12),
    ]
    for older, newer in pairwise(states):
        folder.save(arrays(1), newer)
        folder.save(arrays(2), older)
        assert folder.load().state == newer
        assert folder.newest_state() == newer


def test_a_state_of_an_undone_visit_costs_no_other(folder):
    """A node that was given up writes states 6 and 7, while others continue from 5 with 8."""
    five, six, seven = (replace(state(2, 64 * n), visited=(0,) * n, visit=n + 4) for n in (1, 2, 3))
    eight = replace(six, visit=8)
    folder.save(arrays(4), replace(state(2), visit=4), since=3)
    for number, each in ((5, five), (8, eight), (6, six), (7, seven)):
        folder.save(arrays(number), each, since=5)
    for number, each in ((5, five), (8, eight)):
        loaded = folder.load(lambda found, number=number: found.visit == number)
        assert (loaded.state, loaded.arrays["optimizer/0000"], loaded.invalid) == (each, number, ())
    assert folder.newest_state() == seven
    assert folder.newest_state(lambda found: found.visit not in (6, 7)) == eight
    assert not list(folder.path.glob("*-000000004.*"))


@pytest.mark.parametrize("ending", ["npz", "json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_a_damaged_checkpoint_is_passed_over(folder, ending, damage):
    folder.save(arrays(1), state(1))
    folder.save(arrays(2), state(2))
    victim = folder.path / f"epoch-00002-000000000000.{ending}"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0xFF
    victim.write_bytes({"flip": content, "cut": content[:-9], "empty": b"", "gone": b""}[damage])
    if damage == "gone":
        victim.unlink()
    loaded = folder.load()
    assert loaded.state == state(1)
    assert loaded.arrays["optimizer/0000"] == 1
    assert loaded.invalid == (() if (ending, damage) == ("json", "gone") else ("epoch-00002-000000000000",))
    (folder.path / "epoch-00001-000000000000.npz").write_bytes(b"")
    assert folder.load() == Loaded(None, TrainingState(), (*loaded.invalid, "epoch-00001-000000000000"))


@pytest.mark.parametrize("knows", [True, False])
def test_damaged_checkpoints_do_not_displace_new_ones(folder, knows):
    for number in (5, 6):
        folder.save(arrays(number), state(number))
        (folder.path / f"epoch-0000{number}-000000000000.npz").write_bytes(b"damaged")
    assert len(folder.load().invalid) == 2
    for number in (1, 2, 3):
        writer = folder if knows else CheckpointFolder(folder.path)
        writer.save(arrays(number), state(number))
        assert CheckpointFolder(folder.path).load().state == state(number)
    valid = {path.stem for path in folder.path.glob("epoch-0000[123]-*.json")}
    assert len(valid) == (2 if knows else 1)
    folder.save(arrays(7), state(7))
    folder.save(arrays(8), state(8))
    assert {path.stem[:11] for path in folder.path.glob("*.json")} == {"epoch-00007", "epoch-00008"}


@pytest.mark.parametrize("victim", ["npz", "json", "folder"])
def test_a_checkpoint_that_cannot_be_read_is_not_damaged(folder, monkeypatch, victim):
    for number in (1, 2):
        folder.save(arrays(number), state(number))
    left = [errno.EIO, errno.ESTALE]

    def failing(really):
        def call(path, *how):
            if left and (victim == "folder" or str(path).endswith(victim)):
                raise OSError(left.pop(), "no answer")
            return really(path, *how)

        return call

    module, name = (os, "listdir") if victim == "folder" else (io, "open")
    monkeypatch.setattr(module, name, failing(getattr(module, name)))
    with pytest.raises(OSError, match="no answer"):
        folder.load()
    patient = CheckpointFolder(folder.path, Patience(sleep=lambda _: None)).load()
    assert (patient.state, patient.invalid, left) == (state(2), (), [])


def test_a_state_saved_again_leaves_no_file_behind(folder):
    for number in range(4):
        folder.save(arrays(number), state(1))
        assert folder.load().arrays["optimizer/0000"] == number
        assert len([*folder.path.iterdir()]) == 2


def test_a_full_disk_leaves_the_earlier_checkpoint(folder, monkeypatch):
    folder.save(arrays(1), state(1))

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        folder.save(arrays(2), state(2))
    monkeypatch.undo()
    assert folder.load().state == state(1)
    assert not list(folder.path.glob("*.tmp"))


def test_modes_do_not_depend_on_the_umask(folder):
    before = os.umask(0)
    try:
        folder.save(arrays(1), state(1))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_a_trial_shares_checkpoints_but_no_files_of_a_command(folder, tmp_path):
    """To copy large checkpoints would take minutes, in which the driver does nothing else."""
    folder.save(arrays(1), state(2))
    (folder.path / "model.pt").write_text("of a command, which may write into it")
    child = CheckpointFolder(tmp_path / "child" / "run")
    child.path.parent.mkdir()
    child.inherit(folder)
    shared = {path.name for path in folder.path.iterdir() if path.samefile(child.path / path.name)}
    assert shared == {f"epoch-00002-000000000000.{ending}" for ending in ("json", "npz")}
    # Each goes its own way.
    for seed in (3, 4, 5):
        folder.save(arrays(seed), state(seed))
        child.save(arrays(10 * seed), state(seed))
    assert child.load().arrays["optimizer/0000"] == 50
    assert folder.load().arrays["optimizer/0000"] == 5


def test_a_trial_inherits_what_its_parent_has_once(folder, tmp_path):
    child = CheckpointFolder(tmp_path / "child")
    child.inherit(folder)
    assert child.load().arrays is None
    folder.save(arrays(1), state(3))
    child.inherit(folder)
    folder.save(arrays(2), state(4))
    child.inherit(folder)
    assert child.load().state == state(3)
    assert child.is_of_parent(state(3))
    assert not child.is_of_parent(state(3, 64))
    assert not child.is_of_parent(state(4))
    assert not folder.is_of_parent(state(3))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
