"""Members that are the trials of a search, and the errors of a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from hetctl.inputs.ensemble_schema import (
    METHOD_KEYS,
    OF_METHODS,
    EnsembleModel,
    SearchChoiceModel,
    SearchModel,
)
from hetctl.inputs.input_errors import suggestion
from hetctl.inputs.member_entries import MOST_MEMBERS, MemberEntry, fitted, usual_mode
from hetctl.inputs.validation import value_of
from hetctl.inputs.yaml_source import Location
from hetctl.model.ensemble import Member, Objective
from hetctl.model.errors import BadInputError
from hetctl.model.searches import STOPPING, USUAL_SAMPLER, NamedPart, PruneRule, SearchBudget, SearchSpec

SEARCH: Location = ("search",)


class Trials(NamedTuple):
    """Search of an ensemble file, with an entry and the likely epochs of each trial.

    Parameters
    ----------
    objective : Objective or None
        Metric that the search goes by; None: that of the stop rule.
    """

    spec: SearchSpec
    points: list[MemberEntry]
    epochs: tuple[int, ...]
    objective: Objective | None


def search_problems(model: EnsembleModel) -> Iterator[tuple[Location, str]]:
    """Yield the errors in the keys of `search`, each with its place."""
    if model.search is None:
        if not model.members:
            yield ("members",), "is required, unless there is a search"
        return
    search = model.search
    keys = METHOD_KEYS[search.method]
    given = {key for key in OF_METHODS & search.model_fields_set if getattr(search, key) is not None}
    for key in sorted(keys.needs - given):
        yield (*SEARCH, key), f"is required with method {search.method}"
    for key in sorted(given - keys.needs - keys.may):
        others = ", ".join(name for name, of in METHOD_KEYS.items() if key in of.needs | of.may)
        yield (*SEARCH, key), f"does not go with method {search.method}, only with {others}"
    yield from _value_problems(search)
    for key in sorted({"max_epochs", "expected_epochs"} & search.stop.model_fields_set):
        yield (*SEARCH, "stop", key), "does not go with a search, whose method sets the epochs of a trial"


def _value_problems(search: SearchModel) -> Iterator[tuple[Location, str]]:
    for key, how in search.space.items():
        yield from _space_problems(search, key, how)
    yield from _start_problems(search)
    yield from _also_problems(search)
    for key in search.mutate or ():
        if key not in search.space:
            yield (*SEARCH, "mutate", key), f"is no key of space{suggestion(key, search.space)}"
        elif search.space[key].when:
            yield (*SEARCH, "mutate", key), "cannot mutate: not every config has it"
        elif not _is_number(search, key):
            yield (*SEARCH, "mutate", key), "cannot mutate: not all of its values are numbers"
    if search.metric is None and search.mode is not None:
        yield (*SEARCH, "mode"), "needs a metric; the direction of the stop rule's is stop.mode"
    if search.prune and (search.pruner is not None or search.method == "pbt"):
        rival = "pruner" if search.pruner is not None else "method pbt"
        yield (*SEARCH, "prune"), f"does not go with {rival}, which decides by itself which trials go on"
    if search.pruner is None and search.method == "optuna" and search.every is not None:
        yield (*SEARCH, "every"), "needs a pruner, which decides so often"


def _space_problems(search: SearchModel, key: str, how: SearchChoiceModel) -> Iterator[tuple[Location, str]]:
    """Yield the errors in a key of the space, each with its place."""
    if search.method == "grid" and how.model_fields_set != {"choice"}:
        yield (*SEARCH, "space", key), "must be a choice alone: a grid needs its values listed"
    above = list(search.space)[: list(search.space).index(key)]
    for other, values in how.when.items():
        place = (*SEARCH, "space", key, "when", other)
        if other not in above:
            yield place, f"is no key of space above {key}{suggestion(other, above)}"
        elif wrong := [value for value in values if not _holds(search, other, value)]:
            yield place, f"is never {wrong[0]!r}"
    if how.prior is None:
        return
    if not _holds(search, key, how.prior):
        yield (*SEARCH, "space", key, "prior"), "must be one of its values"
    if search.sampler is not None or search.method == "optuna":
        yield (*SEARCH, "space", key, "prior"), "does not go with a sampler of Optuna, which takes none"


def _also_problems(search: SearchModel) -> Iterator[tuple[Location, str]]:
    if search.also and search.pruner is not None:
        yield (*SEARCH, "also"), "does not go with a pruner, which judges by one metric"
    if search.also and search.variant == STOPPING:
        yield (*SEARCH, "also"), "does not go with the variant stopping, which judges by one metric"
    if search.metric in search.also:
        yield (*SEARCH, "also", search.metric), "is the metric that the search goes by anyway"


def _start_problems(search: SearchModel) -> Iterator[tuple[Location, str]]:
    if search.start and search.method == "grid":
        yield (*SEARCH, "start"), "does not go with method grid, which tries all configs"
    if search.trials is not None and len(search.start) > search.trials:
        yield (*SEARCH, "start"), f"must have at most {search.trials} configs, one for each trial"
    for number, given in enumerate(search.start):
        for key, value in given.items():
            place = (*SEARCH, "start", number, key)
            if key not in search.space:
                yield place, f"is no key of space{suggestion(key, search.space)}"
            elif not _holds(search, key, value):
                yield place, "must be one of the values of its space"


def _holds(search: SearchModel, key: str, value: Any) -> bool:
    """Return true if a value is one of a key's in the space."""
    # Imported here since most ensembles have no search.
    from hetctl.methods.automl.search_run import parameter_of

    return parameter_of(search.space[key].model_dump(exclude_unset=True)).holds(value)


def _is_number(search: SearchModel, key: str) -> bool:
    how = search.space[key]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in how.choice)


def trials_of(model: EnsembleModel) -> Trials | None:
    """Return the trials of a file without errors in its keys; None without a search.

    Raises
    ------
    BadInputError
        If its values do not go together, or Optuna is needed and missing.
    """
    if model.search is None:
        return None
    # Imported here since most ensembles have no search.
    from hetctl.methods.automl.search_run import likely_configs, search_parts

    spec = _spec(model.search, model.seed)
    method, source = search_parts(spec)
    if method.slots > MOST_MEMBERS:
        raise BadInputError(f"must have at most {MOST_MEMBERS:,} trials, has {method.slots:,}")
    configs = likely_configs(spec, method, source)
    points = [
        MemberEntry(
            SEARCH,
            fitted(f"{model.search.name}-{number:03d}", [model.search.name, number]),
            {**model.search.config, **config},
            model.search,
        )
        for number, config in enumerate(configs)
    ]
    named, metric = replace(spec, members=tuple(point.name for point in points)), model.search.metric
    objective = Objective(metric, model.search.mode or usual_mode(metric)) if metric else None
    return Trials(named, points, method.likely_epochs(), objective)


def as_trials(members: list[Member], trials: Trials | None) -> list[Member]:
    """Return the members of a file; trials get the epochs that their search gives them."""
    if trials is None:
        return members
    likely, most = dict(zip(trials.spec.members, trials.epochs, strict=True)), trials.spec.epochs
    return [
        replace(
            member,
            stop=replace(member.stop, max_epochs=most, expected_epochs=min(likely[member.name], most)),
            search_objective=trials.objective,
        )
        if member.name in likely
        else member
        for member in members
    ]


def _spec(search: SearchModel, seed: int) -> SearchSpec:
    method = search.method
    sampler, pruner = (part and value_of(NamedPart, part) for part in (search.sampler, search.pruner))
    prune = search.prune and value_of(PruneRule, search.prune)
    keys = METHOD_KEYS[method]
    values = search.model_dump(include=set(keys.needs | keys.may), exclude_none=True, exclude_unset=True)
    settings = {key: value for key, value in values.items() if key not in ("sampler", "pruner")}
    return SearchSpec(
        method=method,
        members=(),
        space={key: how.model_dump(exclude_unset=True) for key, how in search.space.items()},
        epochs=search.epochs,
        settings=settings,
        sampler=sampler or (USUAL_SAMPLER if method == "optuna" else None),
        pruner=pruner,
        prune=prune and replace(prune, mode=prune.mode or usual_mode(prune.metric)),
        seed=search.seed if "seed" in search.model_fields_set else seed,
        start=tuple(search.start),
        also=dict(search.also),
        parallel=search.parallel,
        budget=value_of(SearchBudget, search.budget),
    )
