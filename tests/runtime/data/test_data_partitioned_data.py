"""Partitioned data: which rank holds what, and samples that migrate between ranks over real connections."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from thread_groups import on_each_rank

from hetctl.model.ensemble import Member, Partitions
from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.model.site import ANY_INTERFACES, USUAL_TIMEOUTS
from hetctl.runtime.data.partitioned_data import (
    HeldSamples,
    PartitionLoader,
    assign_partitions,
    load_partitions,
    partition_paths,
)
from hetctl.runtime.worker.group import Group, RankInfo

MEMBER = Member("m", batch_size=4, seed=7)
PART = 40
"""Training samples of a partition; as many tens are held out as its number plus one."""


def place(folder, numbers):
    """Write partitions; a sample's y is its number among all."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        y = np.arange(number * PART, (number + 1) * PART)
        np.savez(folder / f"{number}.npz", y=y, held_out=np.full(10 * (number + 1), number))


def input_fn(_data, path):
    arrays = np.load(path)
    y, held_out = arrays["y"], arrays["held_out"]
    return (np.stack([y, y], axis=1).astype(np.float32), y), (held_out[:, None], held_out)


def partitions_in(folder, count):
    return load_partitions(Partitions(count, str(folder / "{partition}.npz")), None, input_fn)


def opened(group, folder, count, **how):
    info = RankInfo(group.rank, group.size, "key")
    data = partitions_in(folder, count)
    return data.open(group, info, MEMBER, ANY_INTERFACES, USUAL_TIMEOUTS, **how)


def drawn(loader, epochs, sizes=None):
    """Return the targets of all batches."""
    if sizes:
        loader.split(sizes)
    targets = []
    for epoch in range(1, epochs + 1):
        for (x, y), chunk in loader.batches(epoch, 0):
            if len(chunk.numbers):
                assert (x == y[:, None]).all()
                assert y.tolist() == chunk.numbers.tolist()
                targets += y.tolist()
    return targets


def test_paths_have_variables_of_the_node(tmp_path, monkeypatch):
    monkeypatch.setenv("OWN_DISK", str(tmp_path))
    place(tmp_path, [1, 3])
    found = partition_paths(Partitions(4, "$OWN_DISK/{partition}.npz"))
    assert found == {1: f"{tmp_path}/1.npz", 3: f"{tmp_path}/3.npz"}


@pytest.mark.parametrize(
    ("found", "homes"),
    [
        ([{0, 1}, {2, 3}], (0, 0, 1, 1)),
        ([{0, 1, 2, 3}] * 2, (0, 1, 0, 1)),
        ([{0, 1, 2, 3}, {1}], (0, 1, 0, 0)),
    ],
)
def test_each_partition_has_one_home(found, homes):
    assert assign_partitions(found, range(4), "p") == homes


def test_missing_partitions_are_named():
    with pytest.raises(
        TransientInputError, match="partitions 1, 3 of /d are on none of the nodes of this group"
    ):
        assign_partitions([{0}, {2}], range(4), "/d")
    with pytest.raises(TransientInputError, match="rank 2 of 3 has no partition of /d"):
        assign_partitions([{0}, {1}, {1}], range(2), "/d")


def test_a_node_without_partitions_is_refused(tmp_path):
    with pytest.raises(TransientInputError, match=r"none of the 4 partitions .* is on "):
        partitions_in(tmp_path, 4)


def test_only_arrays_can_be_partitioned(tmp_path):
    place(tmp_path, [0])
    rows = [(np.zeros(2), 0), (np.ones(2), 1)]

    class Rows:
        def __len__(self):
            return len(rows)

        def __getitem__(self, number):
            return rows[number]

    settings = Partitions(1, str(tmp_path / "{partition}.npz"))
    with pytest.raises(BadInputError, match=r"other data than arrays for partition .*0\.npz"):
        load_partitions(settings, None, lambda *_: (Rows(), Rows()))


def test_nothing_migrates_where_all_ranks_read_everything(tmp_path):
    place(tmp_path, range(3))

    def train(group):
        training, validation = opened(group, tmp_path, 3)
        assert not isinstance(training, PartitionLoader)
        return drawn(training, 1), drawn_held_out(validation)

    (first, held_out), (second, also_held_out) = on_each_rank(train, 2)
    assert sorted(first + second) == list(range(3 * PART))
    assert len(held_out) + len(also_held_out) == 10 + 20 + 30


def drawn_held_out(loader):
    return [target for (_, y), chunk in loader.batches(1, 0) if len(chunk.numbers) for target in y.tolist()]


def test_samples_migrate_to_the_rank_with_the_larger_batch(tmp_path):
    for rank in range(2):
        place(tmp_path / str(rank), [rank, rank + 2])

    def train(group):
        training, validation = opened(group, tmp_path / str(group.rank), 4)
        landed = []
        training.on_landed = landed.append
        targets = drawn(training, 8, (2, 6))
        training.close()
        return targets, training.accesses, landed, drawn_held_out(validation)

    ((slow, accesses, landed, held_out), (fast, others_accesses, others_landed, also)) = on_each_rank(
        train, 2
    )
    assert (len(slow), len(fast)) == (320, 960)
    counts = Counter(slow + fast)
    assert len(counts) == 4 * PART
    assert max(counts.values()) - min(counts.values()) <= 2
    assert accesses.held == others_accesses.held == [40, 120]
    assert [t.number for t in landed] == [t.number for t in others_landed] != []
    assert sorted(held_out + also) == sorted(10 * [0] + 20 * [1] + 30 * [2] + 40 * [3])


def test_samples_move_on_as_soon_as_they_have_arrived(tmp_path):
    for rank in range(3):
        place(tmp_path / str(rank), [rank])
    sizes = [(10, 1, 1), (1, 10, 1), (1, 1, 10), (4, 4, 4)]

    def train(group):
        loader = opened(group, tmp_path / str(group.rank), 3)[0]
        targets = [target for step in range(12) for target in drawn(loader, 1, sizes[step % 4])]
        loader.close()
        return targets, loader.accesses.extremes

    (first, extremes), (second, _), (third, _) = on_each_rank(train, 3)
    counts = Counter(first + second + third)
    assert extremes == (min(counts.values()), max(counts.values()))
    assert extremes[1] - extremes[0] <= 2


def test_a_stopped_group_goes_on_with_the_same_samples(tmp_path):
    for rank in range(2):
        place(tmp_path / str(rank), [rank])

    def train(loader, epochs, state=None):
        if state:
            loader.accesses.restore(state)
        targets = drawn(loader, epochs, (1, 7))
        loader.close()
        return targets, loader.accesses.save()

    def whole(group):
        return train(opened(group, tmp_path / str(group.rank), 2)[0], 7)[0]

    def first(group):
        return train(opened(group, tmp_path / str(group.rank), 2)[0], 4)

    begun = on_each_rank(first, 2)

    def rest(group):
        loader = opened(group, tmp_path / str(group.rank), 2)[0]
        return train(loader, 3, begun[0][1])[0]

    continued = on_each_rank(rest, 2)
    for rank, targets in enumerate(on_each_rank(whole, 2)):
        assert targets == begun[rank][0] + continued[rank]


def test_a_group_needs_all_partitions_unless_it_measures(tmp_path):
    place(tmp_path, [0, 2])
    with pytest.raises(TransientInputError, match="partitions 1 of "):
        opened(Group(), tmp_path, 3)
    training, validation = opened(Group(), tmp_path, 3, partial=True)
    targets = [y for (_, own), _ in training.batches(1, 0) for y in own.tolist()]
    assert sorted(targets) == [*range(PART), *range(2 * PART, 3 * PART)]
    assert len(drawn_held_out(validation)) == 40


def test_held_samples_come_and_go():
    held = HeldSamples(6)
    held.add(np.array([0, 1, 2]), (np.array([[0], [1], [2]]), np.array([0, 10, 20])))
    held.add(np.array([5]), (np.array([[5]]), np.array([50])))
    x, y = held.copy(np.array([5, 0, 2]))
    assert (x[:, 0].tolist(), y.tolist()) == ([5, 0, 2], [50, 0, 20])
    held.drop(np.array([5]))
    held.add(np.array([4]), (np.array([[4]]), np.array([40])))
    assert held.copy(np.array([4, 1]))[1].tolist() == [40, 10]


def test_a_file_of_partitions_gives_each_its_own_path(tmp_path, monkeypatch):
    monkeypatch.setenv("OWN_DISK", str(tmp_path))
    (tmp_path / "second.npz").touch()
    found = partition_paths(Partitions(2, files=("/nowhere/first.npz", "$OWN_DISK/second.npz")))
    assert found == {1: f"{tmp_path}/second.npz"}
