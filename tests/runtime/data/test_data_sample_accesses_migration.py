import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.errors import BadInputError
from hetctl.runtime.data.sample_accesses import Migration, next_migration

GAP = 2.0


def train(held, batches, iterations):
    """Return what they hold, the number of migrations, and the largest gap that was seen."""
    held, accesses = list(held), [0] * len(batches)
    moves, widest = [], 0.0
    for iteration in range(iterations):
        accesses = [seen + batch for seen, batch in zip(accesses, batches, strict=True)]
        traversals = [seen / own for seen, own in zip(accesses, held, strict=True)]
        widest = max(widest, max(traversals) - min(traversals))
        if found := next_migration(held, accesses, batches, GAP):
            held[found.source] -= found.samples
            held[found.target] += found.samples
            accesses = [0] * len(batches)
            moves.append(iteration)
    return held, moves, widest


def test_nothing_moves_within_the_gap():
    assert next_migration([100, 100], [100, 300], [10, 30], GAP) is None


def test_migration_makes_both_partitions_equally_frequent():
    assert next_migration([100, 100], [100, 301], [10, 30], GAP) == Migration(source=0, target=1, samples=50)


def test_once_is_enough_where_speeds_stay():
    held, moves, _ = train([1000, 1000], [10, 30], 5000)
    assert held == [500, 1500]
    assert len(moves) == 1


def test_the_paper_s_five_workers():
    batches = (64, 96, 128, 160, 192)
    held, moves, widest = train([10_000] * 5, batches, 50_000)
    assert sum(held) == 50_000
    assert widest <= GAP + 0.1
    shares = [own / batch for own, batch in zip(held, batches, strict=True)]
    assert max(shares) / min(shares) < 1.05
    assert moves[-1] < 40_000


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
