"""How each network trains: the rule, and the words that explain it."""

from hetctl.methods.parallelism import Demand, HopChoice, ModeLimits, choose_modes, too_large
from hetctl.model.plan import DATA_PARALLEL, HOPPER, PIPELINE

GIB = 2**30
ROOM = ModeLimits(gpus=8, gpu="a V100 of summit", memory_bytes=16 * GIB, partitions=0)
PARTITIONED = ModeLimits(gpus=8, gpu="a V100 of summit", memory_bytes=16 * GIB, partitions=8)


PARALLEL = HopChoice({0: 100.0, 10: 700.0})
HOPS = HopChoice({0: 1000.0, 10: 300.0, 12: 400.0})


def modes(demands, room, hops):
    return [choice.mode for choice in choose_modes(demands, room, hops)]


def many(count, epochs=10, memory_bytes=GIB):
    return [Demand(f"m{i}", memory_bytes, epochs) for i in range(count)]


def test_a_network_too_large_for_a_gpu_is_a_pipeline():
    (small, large) = choose_modes([Demand("s", GIB), Demand("l", 20 * 10**9)], ROOM, PARALLEL)
    assert (small.mode, large.mode) == (DATA_PARALLEL, PIPELINE)
    assert large.reason.startswith("it needs 20 GB of memory, and a V100 of summit has 17.2 GB")


def test_a_network_that_just_fits_is_no_pipeline():
    assert not too_large(Demand("m", 16 * GIB), ROOM)
    assert too_large(Demand("m", 16 * GIB + 1), ROOM)


def test_without_partitions_all_train_data_parallel():
    choices = choose_modes(many(50), ROOM, HopChoice({0: 1.0}))
    assert {choice.mode for choice in choices} == {DATA_PARALLEL}
    assert {choice.reason for choice in choices} == {"it fits one GPU, and the data is not partitioned"}


def test_the_cheapest_alternative_is_chosen():
    assert modes(many(5), PARTITIONED, HOPS) == [HOPPER] * 5
    assert modes(many(5), PARTITIONED, PARALLEL) == [DATA_PARALLEL] * 5
    assert (HOPS.epochs, PARALLEL.epochs, HopChoice({}).epochs) == (10, 0, 0)
    assert HopChoice({12: 5.0, 0: 5.0}).epochs == 0


def test_reasons_name_the_prices():
    (hops,) = choose_modes(many(1), PARTITIONED, HOPS)
    assert hops.reason == "hopping over 8 partitions is estimated at 300 s, data-parallel training at 17 min"
    (parallel,) = choose_modes(many(1), PARTITIONED, PARALLEL)
    assert parallel.reason == (
        "it fits one GPU, and data-parallel training is estimated at 100 s, hopping at 12 min"
    )


def test_reasons_name_alternatives_that_have_no_plan():
    (hops,) = choose_modes(many(1), PARTITIONED, HopChoice({10: 5.0}))
    (parallel,) = choose_modes(many(1), PARTITIONED, HopChoice({0: 5.0}))
    assert hops.reason == "hopping over 8 partitions is estimated at 5 s"
    assert parallel.reason == "it fits one GPU, and hopping has no plan"


def test_pipelines_do_not_hop():
    demands = [*many(4), Demand("large", 20 * GIB, 10)]
    assert modes(demands, PARTITIONED, HOPS) == [HOPPER] * 4 + [PIPELINE]


def test_the_reason_names_epochs_that_remain_data_parallel():
    choices = choose_modes([*many(4, epochs=3), Demand("b", GIB, 12)], PARTITIONED, HOPS)
    assert [choice.mode for choice in choices] == [HOPPER] * 5
    assert "after" not in choices[0].reason
    assert choices[4].reason.endswith("; after 10 of its 12 epochs it goes on data-parallel")


def test_unknown_memory_counts_as_enough_with_a_reason():
    unknown = ModeLimits(gpus=8, gpu="a slot of local", memory_bytes=None, partitions=0)
    (choice,) = choose_modes([Demand("m", 80 * GIB)], unknown, HopChoice({0: 1.0}))
    assert choice.mode == DATA_PARALLEL
    assert "does not say how much memory" in choice.reason
