"""Method and source of a search that an ensemble file defines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hetctl.methods.automl.asha import Asha
from hetctl.methods.automl.grid_random import GridSource, OneShot, RandomSource
from hetctl.methods.automl.hyperband import Hyperband
from hetctl.methods.automl.optuna_search import OptunaSource, Pruned
from hetctl.methods.automl.pbt import Mutation, Pbt
from hetctl.methods.automl.procedure import Method, TrialSource
from hetctl.methods.automl.space import Categorical, NumberRange, Parameter, Space
from hetctl.methods.automl.trial_history import Config
from hetctl.model.errors import BadInputError
from hetctl.model.searches import SearchSpec


def space_of(search: SearchSpec) -> dict[str, Parameter]:
    """Return the space of a search."""
    return {key: _parameter(how) for key, how in search.space.items()}


def study_space_of(search: SearchSpec) -> dict[str, Parameter]:
    """Return the space of a search with the range of each key whose listed values its method changes."""
    changed = search.settings.get("mutate", {})
    return {key: _range_of(one) if key in changed else one for key, one in space_of(search).items()}


def _range_of(parameter: Parameter) -> Parameter:
    if not isinstance(parameter, Categorical):
        return parameter
    numbers = [value for value in parameter.values if isinstance(value, int | float)]
    return NumberRange(min(numbers), max(numbers), whole=all(isinstance(n, int) for n in numbers))


def _parameter(how: Mapping[str, Any]) -> Parameter:
    ((kind, values),) = how.items()
    if kind == "choice":
        return Categorical(tuple(values))
    low, high = values
    return NumberRange(low, high, log=kind == "log_uniform", whole=kind == "integer")


def parts_of_search(search: SearchSpec) -> tuple[Method, TrialSource]:
    """Return the method and the source of a search.

    Raises
    ------
    BadInputError
        If the settings do not go together, or Optuna is needed and missing.
    """
    space = space_of(search)
    source = _source(search, space)
    method = METHODS[search.method](search, space, source)
    method.check(source)
    return method, source


def likely_configs(search: SearchSpec, method: Method, source: TrialSource) -> list[Config]:
    """Return a config for each trial by number: its own if that is certain, else one of the space.

    Plans and profiles go by them, so that they count with the shapes of trials that are yet to come.
    """
    certain = source if isinstance(source, GridSource | RandomSource) else None
    draws = RandomSource(space_of(search), search.seed)
    of = [certain if certain and number < method.fresh else draws for number in range(method.slots)]
    return [source_of_one.config(number) for number, source_of_one in enumerate(of)]


def _source(search: SearchSpec, space: Space) -> TrialSource:
    if search.method == "grid":
        return GridSource(space)
    if search.sampler is None:
        return RandomSource(space, search.seed)
    return OptunaSource(space, search.sampler.name, search.seed, search.sampler.options)


def _grid(search: SearchSpec, _space: Space, source: TrialSource) -> Method:
    assert source.size is not None
    return OneShot(source.size, search.epochs)


def _random(search: SearchSpec, _space: Space, _source: TrialSource) -> Method:
    return OneShot(search.settings["trials"], search.epochs)


def _hyperband(search: SearchSpec, _space: Space, _source: TrialSource) -> Method:
    return Hyperband(search.epochs, **search.settings)


def _asha(search: SearchSpec, _space: Space, _source: TrialSource) -> Method:
    return Asha(max_epochs=search.epochs, **search.settings)


def _pbt(search: SearchSpec, space: Space, _source: TrialSource) -> Method:
    every = search.settings.get("every", 1)
    if search.epochs % every:
        raise BadInputError(f"epochs is {search.epochs}, but must be a multiple of every, {every}")
    mutations = {key: _mutation(space[key], how) for key, how in search.settings["mutate"].items()}
    return Pbt(search.settings["trials"], search.epochs // every, every, mutations, search.seed)


def _mutation(parameter: Parameter, how: Mapping[str, Any]) -> Mutation:
    """Return a mutation that stays within the range, or between the least and the largest choice."""
    ((kind, steps),) = how.items()
    values = _range_of(parameter)
    assert isinstance(values, NumberRange)
    return Mutation(tuple(steps), values.low, values.high, multiply=kind == "multiply")


def _optuna(search: SearchSpec, _space: Space, _source: TrialSource) -> Method:
    trials = search.settings["trials"]
    if search.pruner is None:
        return OneShot(trials, search.epochs)
    every = search.settings.get("every", 1)
    return Pruned(trials, search.epochs, every, search.pruner.name, search.pruner.options)


METHODS: Mapping[str, Callable[[SearchSpec, Space, TrialSource], Method]] = {
    "grid": _grid,
    "random": _random,
    "hyperband": _hyperband,
    "asha": _asha,
    "pbt": _pbt,
    "optuna": _optuna,
}
