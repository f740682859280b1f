"""Members in parts: equal to data-parallel training, in new processes and on other numbers of ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import sharded_ranks

from hetctl.model.ensemble import Member, StopRule
from hetctl.model.training_settings import STEPS, CheckpointInterval
from hetctl.runtime.worker.checkpoint import CheckpointFolder

pytestmark = pytest.mark.training
STOP = StopRule("val_accuracy", "max", 9, max_epochs=2)
EVERY_4 = CheckpointInterval(4, STEPS)
UNEVEN = Member("m", {}, 16, 5, STOP, global_batch_size=33, shard=True)
"""Shares of 17 and 16 samples, in batches of at most 16: alone, the second rank would make one."""


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=1e-6, atol=1e-9, err_msg=name)


def results(told):
    return [data["metrics"] for kind, data in told["events"] if kind == "epoch"]


@pytest.mark.parametrize(
    ("member", "train_fn"),
    [
        (UNEVEN, None),
        (
            replace(UNEVEN, config={"optimizer": "adagrad"}, batch_size=8, stop=replace(STOP, max_epochs=1)),
            None,
        ),
        (replace(UNEVEN, config={"batch_norm": True}, batch_size=23, global_batch_size=None), None),
        (
            replace(UNEVEN, config={"optimizer": "momentum"}, batch_size=23, global_batch_size=None),
            "summing_train_fn",
        ),
    ],
    ids=["uneven", "adagrad", "batch norm", "own loop"],
)
def test_parts_train_as_whole_networks_do(tmp_path, member, train_fn):
    how = {"train_fn": train_fn}
    seen, told = sharded_ranks.train(tmp_path / "parts", member, 2, **how)
    (whole, _), (plain, _) = sharded_ranks.train(tmp_path / "whole", replace(member, shard=False), 2, **how)
    assert_equal(seen[0], whole)
    assert_equal(seen[1], whole)
    assert [each["divides"] for each in told] == [True, True]
    assert not plain["divides"]
    for ours, theirs in zip(results(told[0]), results(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    if member.global_batch_size:
        (alone,), _ = sharded_ranks.train(tmp_path / "alone", member, 1, **how)
        assert_equal(alone, whole)


def test_a_rank_of_two_holds_half_of_the_numbers(tmp_path):
    _, told = sharded_ranks.train(tmp_path, replace(UNEVEN, config={"units": 64}), 2, stop=3)
    parameters = 64 * 64 + 3 * (2 * 3 * 64 * 64 + 4 * 64) + 2 * 64 + 3 + 64 * 10 + 10
    for each in told:
        held, of_optimizer = each["held"]
        assert held == pytest.approx(parameters / 2, rel=0.01)
        assert of_optimizer == 2 * held


def test_killed_ranks_go_on_as_two_then_one_then_two(tmp_path):
    member = replace(UNEVEN, checkpoint=EVERY_4)
    (whole, _), (plain, _) = sharded_ranks.train(tmp_path / "whole", replace(member, shard=False), 2)
    parts = tmp_path / "parts"
    for gpus, steps in ((2, 6), (1, 5)):
        codes, _ = sharded_ranks.train(parts, member, gpus, kill=steps)
        assert codes == [-9] * gpus
    (seen, _), (told, _) = sharded_ranks.train(parts, member, 2)
    assert dict(told["events"])["started"]["part_samples"] == 8 * 33
    assert_equal(seen, whole)
    assert results(told)[-1] == pytest.approx(results(plain)[-1], rel=1e-6)
    folders = [path.name for path in (parts / "checkpoints").glob("*.shards*")]
    assert len(folders) == 2


def test_gradients_that_await_a_step_survive_a_kill(tmp_path):
    """The optimizer takes every third batch; the checkpoint comes after the fourth."""
    member = replace(UNEVEN, batch_size=23, global_batch_size=None, checkpoint=EVERY_4)
    how = {"train_fn": "summing_train_fn"}
    (whole, _), _ = sharded_ranks.train(tmp_path / "whole", replace(member, shard=False), 2, **how)
    sharded_ranks.train(tmp_path / "parts", member, 2, kill=6, **how)
    (seen, _), (told, _) = sharded_ranks.train(tmp_path / "parts", member, 2, **how)
    assert dict(told["events"])["started"]["part_samples"] == 4 * 46
    assert_equal(seen, whole)


def test_what_is_damaged_or_half_written_is_not_used(tmp_path):
    every = replace(UNEVEN, checkpoint=EVERY_4)
    sharded_ranks.train(tmp_path, every, 2, stop=7)
    folder = tmp_path / "checkpoints"
    newest, before = sorted(folder.glob("*.shards"), reverse=True)
    (newest / "__1_0.distcp").write_bytes(b"half")
    half = folder / "epoch-00001-000000000033.shards"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    _, (told, _) = sharded_ranks.train(tmp_path, every, 2, stop=3)
    kinds = [kind for kind, _ in told["events"]]
    assert "checkpoint_invalid" in kinds
    started = dict(told["events"])["started"]["part_samples"]
    assert before.name == f"epoch-00000-{started:012d}.shards"
    assert not half.exists()
    manifests = sorted(path.stem for path in folder.glob("epoch-*.json"))
    assert sorted(path.stem for path in folder.glob("*.shards*")) == manifests


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path):
    member = replace(UNEVEN, config={"units": 64}, checkpoint=EVERY_4)
    codes, logs = sharded_ranks.train(tmp_path, member, 2, full=6)
    assert codes == [1, 1]
    assert all("OSError: [Errno 27] File too large" in log for log in logs)
    state = CheckpointFolder(tmp_path / "checkpoints").newest_state()
    assert state.part_samples == 4 * 33
    assert len([*(tmp_path / "checkpoints").glob("*.shards*")]) == 1
    _, (told, _) = sharded_ranks.train(tmp_path, member, 2, stop=1)
    assert dict(told["events"])["started"]["part_samples"] == 4 * 33


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("compiled", "a compiled module"),
        ("scale", "a loss_scale"),
        ("others", "1 parameters that are not the model's"),
        ("scalar", "the scalar parameter factor"),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path, wrong, said):
    codes, (log,) = sharded_ranks.train(
        tmp_path, replace(UNEVEN, config={"wrong": wrong}), 1, kill=1, train_fn="summing_train_fn"
    )
    assert codes == [1]
    assert f"{said}" in log
    assert "does not go with `shard: true`" in log


def test_the_manifest_names_the_files_of_all_ranks(tmp_path):
    sharded_ranks.train(tmp_path, UNEVEN, 2, stop=3)
    (path,) = (tmp_path / "checkpoints").glob("*.json")
    manifest = json.loads(path.read_text())
    files = [shard["file"] for shard in manifest["shards"]]
    assert files == [f"{path.stem}.shards/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")]
    sizes = [file.stat().st_size for file in (path.parent / f"{path.stem}.shards").iterdir()]
    assert manifest["bytes"] == sum(sizes) + path.with_suffix(".npz").stat().st_size
