from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.automl.procedure import GridSource, OneShot, Procedure, RandomSource
from hetctl.methods.automl.trials import Categorical, NumberRange, active_part
from hetctl.model.errors import BadInputError

shares = st.floats(0, 1, exclude_max=True)


@given(low=st.floats(1e-9, 1e9), factor=st.floats(1.0, 1e6), share=shares, log=st.booleans())
def test_a_range_keeps_to_its_ends(low: float, factor: float, share: float, log: bool) -> None:
    value = NumberRange(low, low * factor, log=log).at(share)
    assert low <= value <= low * factor


@given(low=st.integers(1, 1000), more=st.integers(0, 1000), share=shares, log=st.booleans())
def test_a_whole_range_gives_whole_numbers(low: int, more: int, share: float, log: bool) -> None:
    value = NumberRange(low, low + more, log=log, whole=True).at(share)
    assert isinstance(value, int)
    assert low <= value <= low + more


@pytest.mark.parametrize("log", [False, True])
def test_a_whole_range_reaches_both_its_ends(log: bool) -> None:
    values = {NumberRange(2, 5, log=log, whole=True).at(share / 100) for share in range(100)}
    assert values == {2, 3, 4, 5}


def test_half_of_a_log_range_lies_below_the_geometric_mean() -> None:
    assert NumberRange(1e-4, 1.0, log=True).at(0.5) == pytest.approx(1e-2)
    assert NumberRange(0.0, 1.0).at(0.5) == 0.5


@given(values=st.lists(st.integers(), min_size=1, max_size=5), share=shares)
def test_a_choice_gives_one_of_its_values(values: list[int], share: float) -> None:
    assert Categorical(tuple(values)).at(share) in values


@given(low=st.integers(-50, 50), more=st.integers(0, 100), step=st.integers(1, 30), share=shares)
def test_a_step_gives_every_value_from_the_lower_end(low: int, more: int, step: int, share: float) -> None:
    numbers = NumberRange(low, low + more, whole=True, step=step)
    value = numbers.at(share)
    assert value in range(low, low + more + 1, step)
    assert numbers.holds(value)
    assert {numbers.at(place / 200) for place in range(200)} == {*range(low, low + more + 1, step)}


@given(
    low=st.floats(1e-6, 1e3),
    factor=st.floats(1.01, 1e6),
    at=st.floats(0, 1),
    share=shares,
    log=st.booleans(),
)
def test_draws_around_a_prior_stay_in_the_range(
    low: float, factor: float, at: float, share: float, log: bool
) -> None:
    prior = min(max(NumberRange(low, low * factor, log=log).at(at), low), low * factor)
    value = NumberRange(low, low * factor, log=log, prior=prior).at(share)
    assert low <= value <= low * factor


def test_draws_lie_around_a_prior() -> None:
    even = (place / 1000 for place in range(1000))
    values = [NumberRange(1e-4, 1.0, log=True, prior=1e-2).at(share) for share in even]
    assert sorted(values)[500] == pytest.approx(1e-2, rel=0.02)
    # A deviation is a quarter of four orders of magnitude; 0.6827 / 0.9545 of the draws lie within it.
    assert sum(1e-3 < value < 1e-1 for value in values) == pytest.approx(715, abs=5)


def test_half_of_a_choice_is_its_prior() -> None:
    values = [Categorical(("a", "b", "c", "d"), prior="c").at(place / 800) for place in range(800)]
    assert [values.count(each) for each in "abcd"] == [100, 100, 500, 100]


SPACE = {
    "kind": Categorical(("sgd", "adam")),
    "momentum": NumberRange(0.0, 1.0, when={"kind": ("sgd",)}),
    "nesterov": Categorical((True, False), when={"kind": ("sgd",), "momentum": (0.5, 0.9)}),
}


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"kind": "adam", "momentum": 0.5, "nesterov": True}, {"kind"}),
        ({"kind": "sgd", "momentum": 0.4, "nesterov": True}, {"kind", "momentum"}),
        ({"kind": "sgd", "momentum": 0.9, "nesterov": True}, {"kind", "momentum", "nesterov"}),
    ],
)
def test_keys_whose_conditions_do_not_hold_are_left_out(config, kept) -> None:
    assert active_part(SPACE, config).keys() == kept


def test_the_first_configs_are_those_given() -> None:
    start = ({"kind": "adam", "momentum": 0.3}, {"kind": "sgd"})
    source, plain = RandomSource(SPACE, 7, start), RandomSource(SPACE, 7)
    assert source.config(0) == {"kind": "adam"}
    assert source.config(1)["kind"] == "sgd"
    assert 0 <= source.config(1)["momentum"] <= 1
    assert [source.config(n) for n in range(2, 20)] == [plain.config(n) for n in range(2, 20)]
    drawn = [source.config(n) for n in range(2, 60)]
    assert {"momentum" in config for config in drawn if config["kind"] == "adam"} == {False}


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_grid_is_the_product_of_its_values(sizes: list[int]) -> None:
    source = GridSource({f"p{i}": Categorical(tuple(range(size))) for i, size in enumerate(sizes)})
    configs = [tuple(source.config(number).values()) for number in range(source.size)]
    assert configs == list(product(*(range(size) for size in sizes)))
    assert list(source.config(0)) == list(source.space)


def test_a_grid_that_is_too_small_is_refused() -> None:
    with pytest.raises(BadInputError, match="takes 3 configurations, but there are only 2"):
        Procedure(OneShot(3, 1), GridSource({"lr": Categorical((0.1, 0.01))}))


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0)])
def test_a_search_for_nothing_is_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(BadInputError, match="is 0, but must be at least 1"):
        OneShot(*arguments)


def test_draws_are_spread_over_the_space() -> None:
    source = RandomSource({"lr": NumberRange(0.0, 1.0), "network": Categorical(("a", "b", "c"))}, seed=-1)
    configs = [source.config(number) for number in range(300)]
    assert sum(config["lr"] for config in configs) / 300 == pytest.approx(0.5, abs=0.1)
    assert {config["network"] for config in configs} == {"a", "b", "c"}
    assert len({config["lr"] for config in configs}) == 300
