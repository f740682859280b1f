"""Stage-in: which node copies which partitions, and what lies on its disk afterwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hetctl.model.ensemble import Partitions
from hetctl.model.hops import PartitionManifest
from hetctl.runtime.agent.messages import PartitionToStage, StageOrder
from hetctl.runtime.data.partition_files import described, write_partition
from hetctl.runtime.data.partition_folder import (
    StagingStoppedError,
    mark_of,
    partition_path,
    stage,
    stage_orders,
    unstage,
    write_manifest,
)

COUNT = 3


@pytest.fixture
def shared(tmp_path):
    """Return a folder of partitions."""
    folder = tmp_path / "shared"
    folder.mkdir()
    arrays = [{n: np.full(9, i) for n in ("x", "y", "x_validation", "y_validation")} for i in range(COUNT)]
    manifest = PartitionManifest(0, tuple(map(described, arrays)))
    for number, own in enumerate(arrays):
        write_partition(folder, number, own, manifest.partitions[number])
    write_manifest(folder, manifest)
    return folder


@pytest.fixture
def order(shared, tmp_path, monkeypatch):
    monkeypatch.setenv("OWN_DISK", str(tmp_path / "disk"))
    copies = (PartitionToStage(n, f"{shared}/{n}.npz", f"$OWN_DISK/{n}.npz") for n in (0, 2))
    return StageOrder(COUNT, tuple(copies))


def staged(order):
    return stage("node-7", order, lambda _: None)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def partitions_of(count, replicas, nodes):
    partitions = Partitions(count, "/p/{partition}", "/s/{partition}", replicas)
    return [numbers_of(order) for order in stage_orders(partitions, list(nodes)).values()]


def numbers_of(order):
    return tuple(partition.number for partition in order.partitions)


def test_partitions_go_round_the_nodes():
    assert partitions_of(5, 1, "abc") == [(0, 3), (1, 4), (2,)]
    assert partitions_of(5, 2, "abc") == [(0, 2, 3), (0, 1, 3, 4), (1, 2, 4)]
    assert partitions_of(2, 9, "abc") == [(0, 1)] * 3
    assert partitions_of(1, 1, "ab") == [(0,), ()]


def test_without_a_source_nothing_is_copied():
    assert stage_orders(None, ["a"]) == stage_orders(Partitions(4, "/p/{partition}"), ["a"]) == {}


def test_listed_partitions_with_a_source_go_to_the_named_nodes():
    partitions = Partitions(
        *(3, "", "", 1, ("/d/x", "/d/y", "/d/z"), (("b", "c"), (), ("a",))), source_files=("/s/x", "/s/y", "")
    )
    orders = stage_orders(partitions, ["a", "b", "c"])
    assert {node: numbers_of(order) for node, order in orders.items()} == {"a": (), "b": (0, 1), "c": (0,)}
    assert orders["b"].partitions[1] == PartitionToStage(1, "/s/y", "/d/y")
    assert {order.count for order in orders.values()} == {3}
    assert stage_orders(replace(partitions, source_files=("", "", "")), ["a"]) == {}


def test_copies_are_whole_and_removed_in_the_end(order, shared, tmp_path):
    result = staged(order)
    disk, source = tmp_path / "disk", files(shared)
    assert (result.copied, result.kept, result.errors) == ((0, 2), (), ())
    assert result.bytes == len(source["0.npz"]) + len(source["2.npz"])
    assert {name: content for name, content in files(disk).items() if content} == {
        name: source[name] for name in ("0.npz", "2.npz")
    }
    unstage(order)
    assert files(disk) == {}
    assert files(shared) == source


def test_partitions_of_the_user_are_kept_for_ever(order, shared, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "0.npz").write_bytes((shared / "0.npz").read_bytes())
    result = staged(order)
    assert (result.copied, result.kept) == ((2,), (0,))
    unstage(order)
    assert list(files(disk)) == ["0.npz"]


def test_what_an_ended_job_left_is_kept_then_removed(order, tmp_path):
    staged(order)
    again = staged(order)
    assert (again.copied, again.kept, again.bytes) == ((), (0, 2), 0)
    unstage(order)
    assert files(tmp_path / "disk") == {}


def test_a_file_with_other_content_is_replaced(order, shared, tmp_path):
    (tmp_path / "disk").mkdir()
    whole = (shared / "0.npz").read_bytes()
    (tmp_path / "disk" / "0.npz").write_bytes(whole[:-1] + b"?")
    assert staged(order).copied == (0, 2)
    assert (tmp_path / "disk" / "0.npz").read_bytes() == whole


def test_a_damaged_source_is_named_and_others_copied(order, shared, tmp_path):
    partition_path(shared, 0).write_bytes(b"damaged")
    result = staged(order)
    (error,) = result.errors
    place = f"{tmp_path}/disk/0.npz of node-7"
    assert error.startswith(f"partition 0 cannot be copied to {place}: {shared}/0.npz has")
    assert error.endswith("make the partitions anew with `hetctl partition`")
    assert result.copied == (2,)
    assert {name for name, content in files(tmp_path / "disk").items() if content} == {"2.npz"}
    unstage(order)
    assert files(tmp_path / "disk") == {}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda here: (here / "shared/partitions.json").unlink(), "has no manifest"),
        (lambda here: (here / "shared/partitions.json").write_text("{"), "cannot be read"),
        (lambda here: (here / "shared/0.npz").unlink(), "No such file or directory"),
        (lambda here: (here / "disk").touch(), "Not a directory"),
    ],
)
def test_reasons_of_missing_partitions_are_told(order, tmp_path, spoil, reason):
    spoil(tmp_path)
    result = staged(order)
    assert 0 not in result.copied
    assert f"partition 0 cannot be copied to {tmp_path}/disk/0.npz of node-7: " in result.errors[0]
    assert reason in result.errors[0]
    unstage(order)


def test_another_number_of_partitions_is_refused(order):
    wrong = replace(order, count=COUNT + 1)
    assert f"has {COUNT} partitions, but `partitions` of the ensemble {COUNT + 1}" in staged(wrong).errors[0]


def test_a_stopped_copy_leaves_no_partial_partition(order, tmp_path):
    def stop(_):
        raise StagingStoppedError

    with pytest.raises(StagingStoppedError):
        stage("node-7", order, stop)
    target = tmp_path / "disk" / "0.npz"
    assert list(files(tmp_path / "disk")) == [mark_of(target).name]
    unstage(order)
    assert files(tmp_path / "disk") == {}
