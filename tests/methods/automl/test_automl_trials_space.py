from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.automl.grid_random import GridSource, OneShot, RandomSource
from hetctl.methods.automl.procedure import Procedure
from hetctl.methods.automl.trials import Categorical, NumberRange
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
