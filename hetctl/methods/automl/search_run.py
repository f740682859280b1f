"""A search in a run: the reports that count, the next trials, and the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hetctl.methods.automl.halving import Asha, Hyperband
from hetctl.methods.automl.optuna_search import OptunaSource, Pruned
from hetctl.methods.automl.pbt import Mutation, Pbt
from hetctl.methods.automl.procedure import (
    FixedSource,
    GridSource,
    Method,
    OneShot,
    Procedure,
    RandomSource,
    TrialSource,
)
from hetctl.methods.automl.trials import Categorical, Config, NumberRange, Parameter, Report, TrialEvent
from hetctl.model.errors import BadInputError
from hetctl.model.searches import REPORT, TRIAL, SearchSpec, Trial
from hetctl.model.serialization import decode, encode
from hetctl.model.values import dataclass


def search_space(search: SearchSpec) -> dict[str, Parameter]:
    """Return the space of a search."""
    return {key: parameter_of(how) for key, how in search.space.items()}


def study_space(search: SearchSpec) -> dict[str, Parameter]:
    """Return the space of a search, with ranges for listed values that its method changes."""
    changed = search.settings.get("mutate", {})
    return {key: _range_of(one) if key in changed else one for key, one in search_space(search).items()}


def _range_of(parameter: Parameter) -> NumberRange:
    """Return a range itself, or the range from the least to the largest listed number."""
    if not isinstance(parameter, Categorical):
        return parameter
    numbers = [value for value in parameter.values if isinstance(value, int | float)]
    return NumberRange(min(numbers), max(numbers), whole=all(isinstance(n, int) for n in numbers))


def parameter_of(how: Mapping[str, Any]) -> Parameter:
    """Return a distribution as in an ensemble file."""
    others = {"step", "when", "prior"}
    ((kind, values),) = [(key, value) for key, value in how.items() if key not in others]
    when = {key: tuple(each) for key, each in how.get("when", {}).items()}
    prior = how.get("prior")
    if kind == "choice":
        return Categorical(tuple(values), when, prior)
    low, high = values
    return NumberRange(
        *(low, high, kind == "log_uniform", kind == "integer", how.get("step", 1)), when=when, prior=prior
    )


def search_parts(search: SearchSpec) -> tuple[Method, TrialSource]:
    """Return the method and the source of a search.

    Raises
    ------
    BadInputError
        If the settings contradict each other, or Optuna is needed and missing.
    """
    source = _source(search)
    method = METHODS[search.method](search, source)
    method.check(source)
    return method, source


def likely_configs(search: SearchSpec, method: Method, source: TrialSource) -> list[Config]:
    """Return a config for each trial by number: its own if certain, else a draw from the space.

    Plans and profiles use them, to allow for the shapes of future trials.
    """
    draws = RandomSource(search_space(search), search.seed)
    certain = source if isinstance(source, FixedSource) else draws
    return [(certain if number < method.trials else draws).config(number) for number in range(method.slots)]


def _source(search: SearchSpec) -> TrialSource:
    space = search_space(search)
    if search.sampler is not None:
        named = search.sampler
        return OptunaSource(space, named.name, search.seed, named.options, search.start, 1 + len(search.also))
    if search.method != "grid":
        return RandomSource(space, search.seed, search.start)
    return GridSource({key: one for key, one in space.items() if isinstance(one, Categorical)})


def _pbt(search: SearchSpec, source: TrialSource) -> Method:
    every = search.settings.get("every", 1)
    if search.epochs % every:
        raise BadInputError(f"epochs is {search.epochs}, but must be a multiple of every, {every}")
    mutations = {}
    for key, how in search.settings["mutate"].items():
        # Within the range, or from the least to the largest choice.
        ((kind, steps),), values = how.items(), _range_of(source.space[key])
        mutations[key] = Mutation(tuple(steps), values.low, values.high, multiply=kind == "multiply")
    return Pbt(search.settings["trials"], search.epochs // every, every, mutations, search.seed)


def _optuna(search: SearchSpec, source: TrialSource) -> Method:
    if search.pruner is None:
        return METHODS["random"](search, source)
    settings, pruner = search.settings, search.pruner
    return Pruned(settings["trials"], search.epochs, settings.get("every", 1), pruner.name, pruner.options)


METHODS: Mapping[str, Callable[[SearchSpec, TrialSource], Method]] = {
    "grid": lambda search, source: OneShot(source.size or 0, search.epochs),
    "random": lambda search, _: OneShot(search.settings["trials"], search.epochs),
    "hyperband": lambda search, _: Hyperband(search.epochs, **search.settings),
    "asha": lambda search, _: Asha(max_epochs=search.epochs, **search.settings),
    "pbt": _pbt,
    "optuna": _optuna,
}


DONE = "every trial that it asked for is reported"


@dataclass(frozen=True)
class UsedResources:
    """Used resources of a run: GPU-hours, and seconds since its start."""

    gpu_hours: float
    time_s: float


class SearchRun:
    """Search whose requests and reports are events of a run.

    Attributes
    ----------
    trials : list of Trial
        Trials by number, each with the epochs of its latest request.
    parallel : int
        Most trials at a time, unless the search sets it or its requests do not depend on reports.

    Parameters
    ----------
    events : iterable of (str, mapping)
        Kind and fields of the events so far, in order.

    Raises
    ------
    BadInputError
        If Optuna is missing, or now draws other configs than the recorded ones.
    """

    def __init__(
        self, search: SearchSpec, parallel: int, events: Iterable[tuple[str, Mapping[str, Any]]] = ()
    ) -> None:
        method, source = search_parts(search)
        self._search, self.parallel = search, parallel
        self._procedure = Procedure(method, source, _history(events))
        # Hyperband and PBT wait at barriers: their requests do not depend on the order of reports.
        free = not isinstance(source, OptunaSource) and isinstance(method, OneShot | Hyperband)
        self._is_free = free or isinstance(method, Pbt)

    @property
    def trials(self) -> list[Trial]:
        """Trials by number, each with the epochs of its latest request."""
        return self._procedure.history.trials

    @property
    def waiting(self) -> tuple[Trial, ...]:
        """Trials without a report."""
        return self._procedure.history.waiting

    def member_of(self, trial: Trial) -> str:
        """Return the member's name of a trial."""
        return self._search.members[trial.number]

    def report(self, trial: Trial, losses: Sequence[float] | None) -> dict[str, Any] | None:
        """Take a trial's result; return the fields of its event, or None if it does not count.

        Parameters
        ----------
        losses : sequence of float or None
            Loss by each metric of the search; None: the trial failed.
        """
        loss, *more = losses or (None,)
        if not self._procedure.tell(Report(trial.number, trial.epochs, loss, tuple(more))):
            return None
        # Every event names its trial by `number`.
        fields = encode(self._procedure.history.events[-1])
        if not self._search.also:
            del fields["more"]
        return {"member": self.member_of(trial), "number": fields.pop("trial"), **fields}

    def requests(self, resources: UsedResources) -> Iterator[dict[str, Any]]:
        """Yield the event fields of each trial to train now."""
        most = math.inf if self._is_free else self._search.parallel or self.parallel
        while not self._limit(resources) and len(self.waiting) < most:
            asked = self._procedure.ask(1)
            if not asked:
                return
            yield {"member": self.member_of(asked[0]), **encode(asked[0])}

    def reason_to_end(self, resources: UsedResources) -> str | None:
        """Return why no more trials will come; None if some may."""
        if self.waiting:
            return None
        return self._limit(resources) or (DONE if self._procedure.done else None)

    def _limit(self, resources: UsedResources) -> str | None:
        """Return the reached limit of the search's budget, or None."""
        budget = self._search.budget
        epochs = 0
        if budget.epochs is not None:
            inherited = sum(trial.parent.epochs for trial in self.trials if trial.parent)
            epochs = sum(trial.epochs for trial in self.trials) - inherited
        reached = (
            (budget.epochs, epochs, "epochs"),
            (budget.gpu_hours, resources.gpu_hours, "GPU-hours"),
            (budget.time_s, resources.time_s, "seconds"),
        )
        for limit, used, unit in reached:
            if limit is not None and used >= limit:
                return f"its budget of {limit:g} {unit} is used up"
        return None


def _history(events: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[TrialEvent]:
    for kind, data in events:
        if kind == TRIAL:
            yield decode(Trial, data)
        elif kind == REPORT:
            yield decode(Report, {**data, "trial": data["number"]})
