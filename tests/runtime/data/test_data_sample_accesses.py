import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.errors import BadInputError
from hetctl.runtime.data.sample_accesses import (
    MAX_ACCESS_GAP,
    STEPS_TO_SEND,
    Migration,
    SampleAccesses,
    next_migration,
)

PAPER = (64, 96, 128, 160, 192)
"""Batches of the paper's five workers, which have two of ten classes each."""


def partitioned(held, seed=3):
    """Return accesses of workers that hold so many samples each."""
    return SampleAccesses(np.repeat(np.arange(len(held)), held), seed)


def begun(draw):
    return [transfer for transfer, has_landed in draw.changes if not has_landed]


def landed(draw):
    return [transfer for transfer, has_landed in draw.changes if has_landed]


def counted(accesses, draws):
    """Return the accesses of each sample in some draws."""
    drawn = np.concatenate([samples for draw in draws for samples in draw.samples])
    return np.bincount(drawn, minlength=len(accesses.home))


def test_an_epoch_of_equal_workers_accesses_each_sample_once():
    accesses = partitioned([60, 60])
    draws = [accesses.draw((20, 20)) for _ in range(3)]
    assert set(counted(accesses, draws)) == {1}
    assert not any(draw.changes for draw in draws)
    assert accesses.extremes == (1, 1)


def test_samples_are_drawn_in_another_order_in_each_epoch():
    accesses = partitioned([100])
    first, second = accesses.draw((100,)), accesses.draw((100,))
    assert sorted(first.samples[0]) == sorted(second.samples[0]) == list(range(100))
    assert list(first.samples[0]) != list(second.samples[0]) != list(range(100))


def test_the_paper_s_workers_hold_samples_by_their_speed():
    accesses = partitioned([10_000] * 5)
    draws = [accesses.draw(PAPER) for _ in range(500)]
    assert accesses.held == [5000, 7500, 10_000, 12_500, 15_000]
    assert sum(len(transfer.samples) for draw in draws for transfer in landed(draw)) == 7500
    later = [accesses.draw(PAPER) for _ in range(500)]
    assert not any(draw.changes for draw in later)


def test_a_transfer_has_some_steps_to_arrive():
    accesses = partitioned([1000] * 5)
    starts, ends = {}, {}
    for step in range(120):
        draw = accesses.draw(tuple(batch // 8 for batch in PAPER))
        starts.update({transfer.number: step for transfer in begun(draw)})
        ends.update({transfer.number: step for transfer in landed(draw)})
    assert ends
    assert {ends[number] - starts[number] for number in ends} == {STEPS_TO_SEND}


def test_the_last_step_of_an_epoch_may_be_smaller():
    accesses = partitioned([10, 30])
    assert [len(own) for own in accesses.draw((4, 12), (1, 3)).samples] == [1, 3]


@given(
    st.lists(st.integers(20, 200), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(1, 20), min_size=5, max_size=5), min_size=1, max_size=60),
    st.integers(0, 3),
)
def test_accesses_of_any_two_samples_differ_by_two_at_most(held, sizes, seed):
    accesses = partitioned(held, seed)
    draws, holder = [], accesses.home.copy()
    for step_sizes in sizes:
        draws.append(accesses.draw(step_sizes[: len(held)]))
        for transfer, has_landed in draws[-1].changes:
            assert (holder[transfer.samples] == transfer.source).all()
            if has_landed:
                holder[transfer.samples] = transfer.target
        for worker, samples in enumerate(draws[-1].samples):
            assert (holder[samples] == worker).all()
        counts = counted(accesses, draws)
        assert accesses.extremes == (counts.min(), counts.max())
        assert counts.max() - counts.min() <= MAX_ACCESS_GAP
        assert min(accesses.held) >= 1


@given(
    st.lists(st.integers(20, 90), min_size=2, max_size=4), st.integers(0, 80), st.lists(st.integers(1, 20))
)
def test_a_saved_state_goes_on_with_the_same_samples(held, steps, sizes):
    sizes = tuple((*sizes, 3, 14, 15, 9)[: len(held)])
    first = partitioned(held)
    for _ in range(steps):
        first.draw(sizes)
    second = partitioned(held)
    second.restore({name: array.copy() for name, array in first.save().items()})
    for _ in range(40):
        ours, theirs = first.draw(sizes), second.draw(sizes)
        for own, other in zip(ours.samples, theirs.samples, strict=True):
            assert np.array_equal(own, other)
        assert [one.number for one in landed(ours)] == [one.number for one in landed(theirs)]


def test_a_restored_state_says_what_has_left_its_home():
    first = partitioned([100, 100])
    for _ in range(60):
        first.draw((4, 12))
    second = partitioned([100, 100])
    second.restore(first.save())
    (transfer,) = second.away()
    assert (transfer.source, transfer.target, transfer.number < 0) == (0, 1, True)
    assert len(transfer.samples) == second.held[1] - 100 > 0


def test_on_other_nodes_samples_keep_their_accesses():
    first = partitioned([100, 100])
    for _ in range(60):
        first.draw((4, 12))
    second = partitioned([50, 50, 100])
    second.restore(first.save())
    assert second.extremes == first.extremes
    assert (second.held, second.away(), second.pending) == ([50, 50, 100], [], ())


def test_the_state_of_other_data_is_not_used():
    first, second = partitioned([30]), partitioned([40])
    first.draw((20,))
    second.restore(first.save())
    assert second.extremes == (0, 0)


@pytest.mark.parametrize("held", [[3, 40], [40, 3]])
def test_a_worker_with_less_than_its_batch_is_not_emptied(held):
    accesses = partitioned(held)
    for _ in range(50):
        accesses.draw((10, 10))
        assert min(accesses.held) >= 1


def test_samples_of_an_epoch_begun_otherwise_come_later():
    accesses = SampleAccesses(np.zeros(10, np.int64), seed=3)
    accesses.begin_after(np.array([1, 4, 7]))
    drawn = [number for _ in range(7) for number in accesses.draw([1]).samples[0].tolist()]
    assert sorted(drawn) == [0, 2, 3, 5, 6, 8, 9]


GAP = 2.0


def test_nothing_moves_within_the_gap():
    assert next_migration([100, 100], [100, 300], [10, 30], GAP) is None


def test_migration_makes_both_partitions_equally_frequent():
    assert next_migration([100, 100], [100, 301], [10, 30], GAP) == Migration(source=0, target=1, samples=50)


def test_no_partition_is_emptied():
    assert next_migration([2, 2], [0, 10], [0, 10], GAP) == Migration(0, 1, 1)
    assert next_migration([1, 3], [0, 30], [0, 10], GAP) is None


@pytest.mark.parametrize(("held", "accesses"), [([0, 1], [1, 1]), ([1], [1, 1]), ([], [])])
def test_numbers_that_cannot_be_are_refused(held, accesses):
    with pytest.raises(BadInputError):
        next_migration(held, accesses, [1, 1], GAP)


WORKERS = st.lists(
    st.tuples(st.integers(1, 500), st.integers(0, 5000), st.integers(1, 64)), min_size=1, max_size=6
)


@given(WORKERS)
def test_a_migration_narrows_the_gap_between_the_two(workers):
    held, accesses, batches = zip(*workers, strict=True)
    found = next_migration(held, accesses, batches, GAP)
    if found is None:
        return
    source, target, samples = found.source, found.target, found.samples
    assert 1 <= samples < held[source]
    before = batches[target] / held[target] - batches[source] / held[source]
    after = batches[target] / (held[target] + samples) - batches[source] / (held[source] - samples)
    assert abs(after) < abs(before)
