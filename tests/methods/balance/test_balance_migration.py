import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.balance.migration import GAP, Migration, next_migration
from hetctl.model.errors import BadInputError


def train(partitions, batches, iterations):
    """Return the partitions, the number of migrations, and the largest gap that was seen."""
    partitions, drawn = list(partitions), [0] * len(batches)
    moves, widest = [], 0.0
    for iteration in range(iterations):
        drawn = [taken + batch for taken, batch in zip(drawn, batches, strict=True)]
        traversals = [taken / held for taken, held in zip(drawn, partitions, strict=True)]
        widest = max(widest, max(traversals) - min(traversals))
        if found := next_migration(partitions, drawn, batches):
            partitions[found.source] -= found.samples
            partitions[found.target] += found.samples
            drawn = [0] * len(batches)
            moves.append(iteration)
    return partitions, moves, widest


def test_nothing_moves_within_the_gap():
    assert next_migration([100, 100], [100, 300], [10, 30]) is None


def test_migration_makes_both_partitions_equally_frequent():
    assert next_migration([100, 100], [100, 301], [10, 30]) == Migration(source=0, target=1, samples=50)


def test_once_is_enough_where_speeds_stay():
    partitions, moves, _ = train([1000, 1000], [10, 30], 5000)
    assert partitions == [500, 1500]
    assert len(moves) == 1


def test_the_paper_s_five_workers():
    batches = (64, 96, 128, 160, 192)
    partitions, moves, widest = train([10_000] * 5, batches, 50_000)
    assert sum(partitions) == 50_000
    assert widest <= GAP + 0.1
    shares = [held / batch for held, batch in zip(partitions, batches, strict=True)]
    assert max(shares) / min(shares) < 1.05
    assert moves[-1] < 40_000


def test_no_partition_is_emptied():
    assert next_migration([2, 2], [0, 10], [0, 10]) == Migration(0, 1, 1)
    assert next_migration([1, 3], [0, 30], [0, 10]) is None


@pytest.mark.parametrize(("partitions", "drawn"), [([0, 1], [1, 1]), ([1], [1, 1]), ([], [])])
def test_partitions_that_cannot_be_are_refused(partitions, drawn):
    with pytest.raises(BadInputError):
        next_migration(partitions, drawn, [1, 1])


WORKERS = st.lists(
    st.tuples(st.integers(1, 500), st.integers(0, 5000), st.integers(1, 64)), min_size=1, max_size=6
)


@given(WORKERS)
def test_a_migration_narrows_the_gap_between_the_two(workers):
    partitions, drawn, batches = zip(*workers, strict=True)
    found = next_migration(partitions, drawn, batches)
    if found is None:
        return
    source, target, samples = found.source, found.target, found.samples
    assert 1 <= samples < partitions[source]
    before = batches[target] / partitions[target] - batches[source] / partitions[source]
    after = batches[target] / (partitions[target] + samples) - batches[source] / (
        partitions[source] - samples
    )
    assert abs(after) < abs(before)
