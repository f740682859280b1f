"""How each network trains: the rule, and the words that explain it."""

from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.parallelism import Demand, ModeLimits, choose_modes, hopper_epochs, too_large
from hetctl.model.plan import DATA_PARALLEL, HOPPER, PIPELINE

GIB = 2**30
ROOM = ModeLimits(gpus=8, gpu="a V100 of summit", memory_bytes=16 * GIB, partitions=0)
PARTITIONED = ModeLimits(gpus=8, gpu="a V100 of summit", memory_bytes=16 * GIB, partitions=8)


def modes(demands, room):
    return [choice.mode for choice in choose_modes(demands, room)]


def many(count, epochs=10, memory_bytes=GIB):
    return [Demand(f"m{i}", memory_bytes, epochs) for i in range(count)]


def test_a_network_too_large_for_a_gpu_is_a_pipeline():
    (small, large) = choose_modes([Demand("s", GIB), Demand("l", 20 * 10**9)], ROOM)
    assert (small.mode, large.mode) == (DATA_PARALLEL, PIPELINE)
    assert large.why.startswith("it needs 20 GB of memory, and a V100 of summit has 17.2 GB")


def test_a_network_that_just_fits_is_no_pipeline():
    assert not too_large(Demand("m", 16 * GIB), ROOM)
    assert too_large(Demand("m", 16 * GIB + 1), ROOM)


def test_without_partitions_all_train_data_parallel():
    choices = choose_modes(many(50), ROOM)
    assert {choice.mode for choice in choices} == {DATA_PARALLEL}
    assert {choice.why for choice in choices} == {"it fits one GPU, and the data is not partitioned"}


def test_more_configurations_than_half_of_the_gpus_hop():
    """CEREBRO, appendix 12: the hopper while p/2 < |S|."""
    assert modes(many(5), PARTITIONED) == [HOPPER] * 5
    assert modes(many(4), PARTITIONED) == [DATA_PARALLEL] * 4


def test_pipelines_do_not_count_as_configurations():
    demands = [*many(4), Demand("large", 20 * GIB, 10)]
    assert modes(demands, PARTITIONED) == [DATA_PARALLEL] * 4 + [PIPELINE]


def test_the_reason_names_epochs_that_remain_data_parallel():
    choices = choose_modes([*many(4, epochs=3), Demand("a", GIB, 10), Demand("b", GIB, 12)], PARTITIONED)
    assert [choice.mode for choice in choices] == [HOPPER] * 6
    assert "after" not in choices[0].why
    assert choices[4].why.endswith("after 3 of its 10 epochs too few are left, and it goes on data-parallel")


def test_unknown_memory_counts_as_enough_with_a_reason():
    unknown = ModeLimits(gpus=8, gpu="a slot of local", memory_bytes=None, partitions=0)
    (choice,) = choose_modes([Demand("m", 80 * GIB)], unknown)
    assert choice.mode == DATA_PARALLEL
    assert "does not say how much memory" in choice.why


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 40))
def test_members_hop_while_they_outnumber_half_of_the_gpus(epochs, gpus):
    hops = hopper_epochs(epochs, gpus)
    if hops:
        assert sum(count >= hops for count in epochs) > gpus / 2
    assert sum(count > hops for count in epochs) <= gpus / 2
