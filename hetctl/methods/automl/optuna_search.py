"""Search by Optuna: its samplers draw configurations, and one of its pruners ends trials early."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from typing import Any
from weakref import WeakKeyDictionary

from hetctl.methods.automl.procedure import Method, NewTrial, at_least
from hetctl.methods.automl.trials import (
    Categorical,
    Config,
    Parameter,
    Report,
    Space,
    TrialHistory,
    is_active,
)
from hetctl.model.errors import BadInputError
from hetctl.model.searches import Trial
from hetctl.model.values import dataclass

SAMPLERS, PRUNERS = "samplers", "pruners"
TRIED_LOSSES = (1.0, 0.0, 2.0)
"""Made-up losses to try out parts of Optuna when a search is read."""
EXAMPLES = {
    SAMPLERS: "for example TPESampler, GPSampler or CmaEsSampler",
    PRUNERS: "for example MedianPruner, SuccessiveHalvingPruner or HyperbandPruner",
}


@dataclass(frozen=True)
class OptunaSource:
    """Optuna sampler whose draws and reports follow the order of the history.

    The sampler learns from each trial's first report, but not from PBT's mutants, which it did not draw. A
    restored search repeats all draws, since a sampler's state cannot be saved as JSON.

    Parameters
    ----------
    sampler : str
        Name of a class in ``optuna.samplers``.
    options : mapping
        Arguments of that class, with all required ones except a seed.
    start : tuple of mapping
        Values of the first configurations; what they leave out is drawn.
    metrics : int
        Number of losses of a report.
    """

    space: Space
    sampler: str = "TPESampler"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    start: tuple[Config, ...] = ()
    metrics: int = 1

    def __post_init__(self) -> None:
        with _refuse_optuna_errors(SAMPLERS, self.sampler):
            study = self.new_study()
            # Only draws and reports use options and import packages.
            for loss in TRIED_LOSSES:
                study.tell(self._ask(study)[0], [loss] * self.metrics)

    def _ask(self, study: Any) -> tuple[Any, Config]:
        """Return a new trial with its configuration; keys whose conditions do not hold are not drawn."""
        spaces = {name: optuna_distribution(each) for name, each in self.space.items()}
        if not any(each.when for each in self.space.values()):
            # All at once: some samplers draw keys together, in the order of the space.
            trial = study.ask(spaces)
            return trial, {name: trial.params[name] for name in self.space}
        trial, config = study.ask(), dict[str, Any]()
        for name, each in self.space.items():
            if is_active(each, config):
                config[name] = _suggested(trial, name, spaces[name])
        return trial, config

    @property
    def size(self) -> int | None:
        """Number of configurations of an exhaustive sampler; None if draws are unlimited."""
        if self.sampler == "GridSampler":
            return math.prod(len(values) for values in self.options["search_space"].values())
        if self.sampler == "BruteForceSampler":
            return math.prod(parameter.count for parameter in self.space.values())
        return None

    def new_study(self) -> Any:
        """Return a study with the sampler in its initial state; BadInputError if that fails."""
        sampler = _optuna_part(SAMPLERS, self.sampler, self.options, self.seed)
        study = _study_of(sampler=sampler, directions=["minimize"] * self.metrics)
        for given in self.start:
            study.enqueue_trial(dict(given))
        return study

    def follow(self, history: TrialHistory) -> Callable[[int], Config]:
        """Return a function that draws configurations from a study that follows the history.

        Raises
        ------
        BadInputError
            If Optuna now draws other configurations than the history has.
        """
        from optuna.trial import TrialState

        study, drawn, seen = self.new_study(), dict[int, Any](), 0

        def draw(number: int) -> Config:
            drawn[number], config = self._ask(study)
            return config

        def check_draw(trial: Trial) -> None:
            # The history has the trained config: from another draw Optuna would learn wrong values.
            if (config := draw(trial.number)) != trial.config:
                raise BadInputError(
                    f"the saved trial {trial.number} has {dict(trial.config)}, but Optuna now draws {config}",
                    hint="continue with the version of Optuna with which the search began",
                )

        def catch_up() -> None:
            nonlocal seen
            for event in history.events[seen:]:
                if isinstance(event, Report):
                    if event.trial in drawn:
                        failed = event.loss is None
                        state = TrialState.FAIL if failed else TrialState.COMPLETE
                        values = None if failed else [event.loss, *event.more]
                        # A trial reports again after more epochs, but Optuna takes a single result.
                        study.tell(drawn[event.trial], values, state, skip_if_finished=True)
                elif event.parent is None and event.number not in drawn:
                    check_draw(event)
            seen = len(history.events)

        def config(number: int) -> Config:
            catch_up()
            return draw(number)

        catch_up()
        return config


def _study_of(**parts: Any) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study: Any = optuna.create_study(**parts)
    # Exhausted samplers stop the study, which is an error outside `optimize`.
    study.stop = lambda: None
    return study


def _suggested(trial: Any, name: str, distribution: Any) -> Any:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    low, high, log = distribution.low, distribution.high, distribution.log
    if isinstance(distribution, IntDistribution):
        return trial.suggest_int(name, low, high, step=distribution.step, log=log)
    return trial.suggest_float(name, low, high, log=log)


def optuna_distribution(parameter: Parameter) -> Any:
    """Return a parameter as an Optuna distribution."""
    from optuna import distributions

    if isinstance(parameter, Categorical):
        return distributions.CategoricalDistribution(parameter.values)
    if parameter.whole:
        low, high = int(parameter.low), int(parameter.high)
        return distributions.IntDistribution(low, high, log=parameter.log, step=parameter.step)
    return distributions.FloatDistribution(parameter.low, parameter.high, log=parameter.log)


@dataclass(frozen=True)
class Pruned(Method):
    """Optuna study whose trials report every few epochs; after each report the pruner decides.

    Trials that go on come before new ones. Failed trials end.

    Parameters
    ----------
    trials : int
        Number of configurations.
    epochs : int
        Epochs of the trials that reach the end.
    every : int
        Epochs between two decisions.
    pruner : str
        Name of a class in ``optuna.pruners``.
    options : mapping
        Arguments of that class.
    """

    trials: int
    epochs: int
    every: int = 1
    pruner: str = "MedianPruner"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(1, trials=self.trials, epochs=self.epochs, every=self.every)
        with _refuse_optuna_errors(PRUNERS, self.pruner):
            study = self.new_study()
            # Only judged trials use options and import packages.
            for loss in TRIED_LOSSES:
                trial = study.ask()
                for epochs in range(self.every, 3 * self.every + 1, self.every):
                    trial.report(loss, epochs)
                    trial.should_prune()
                study.tell(trial, loss)

    def likely_epochs(self) -> tuple[int, ...]:
        """Return the epochs of each trial if half of the trials are pruned in the middle."""
        half = -(-self.epochs // 2)
        return tuple(half if number % 2 else self.epochs for number in range(self.trials))

    def new_study(self) -> Any:
        """Return a study with the pruner in its initial state; BadInputError if that fails."""
        return _study_of(pruner=_optuna_part(PRUNERS, self.pruner, self.options))

    def next_trial(self, history: TrialHistory) -> Trial | NewTrial | None:
        """Return the first trial to go on, or a new one."""
        if history not in _KEPT:
            _KEPT[history] = _PrunerDecisions(self)
        ended = _KEPT[history].catch_up(history)
        for trial in history.trials:
            loss = history.rung(trial.epochs)[trial.number]
            is_reported = loss is not None and math.isfinite(loss)
            if is_reported and trial.epochs < self.epochs and trial.number not in ended:
                return replace(trial, epochs=min(trial.epochs + self.every, self.epochs))
        if len(history.trials) < self.trials:
            return NewTrial(min(self.every, self.epochs))
        return None


class _PrunerDecisions:
    """Decisions of a pruner on a history's reports, each final on arrival."""

    def __init__(self, method: Pruned) -> None:
        self._study = method.new_study()
        self._epochs, self._seen = method.epochs, 0
        self._trials = list[Any]()
        self.ended = set[int]()

    def catch_up(self, history: TrialHistory) -> set[int]:
        """Take the new events of the history; return the pruned trials."""
        for event in history.events[self._seen :]:
            if isinstance(event, Report):
                self._judge(event)
            elif event.number == len(self._trials):
                self._trials.append(self._study.ask())
        self._seen = len(history.events)
        return self.ended

    def _judge(self, report: Report) -> None:
        from optuna.trial import TrialState

        trial = self._trials[report.trial]
        if report.loss is None:
            self._study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            return
        trial.report(report.loss, report.epochs)
        if report.epochs >= self._epochs:
            self._study.tell(trial, report.loss)
        elif trial.should_prune():
            self.ended.add(report.trial)
            self._study.tell(trial, state=TrialState.PRUNED)


_KEPT: WeakKeyDictionary[TrialHistory, _PrunerDecisions] = WeakKeyDictionary()
"""Decisions by history, kept so that each decision is made once."""


def optuna_for(user: str) -> Any:
    """Return the package Optuna; BadInputError if it is missing.

    Parameters
    ----------
    user : str
        Part of hetctl that needs Optuna, for the message.
    """
    try:
        import optuna
    except ImportError:
        raise BadInputError(
            f"{user} requires Optuna, which is not installed",
            hint="install hetctl with its extra optuna, or Optuna itself: pip install optuna",
        ) from None
    return optuna


def _optuna_part(kind: str, name: str, options: Mapping[str, Any], seed: int = 0) -> Any:
    """Return a new sampler or pruner in its initial state.

    An option that is a mapping with a ``name`` is a part inside this one.

    Parameters
    ----------
    kind : str
        `SAMPLERS` or `PRUNERS`.
    seed : int
        Seed for parts that take one, unless the options have it.

    Raises
    ------
    BadInputError
        If Optuna is missing, has no such class, or the class refuses the options.
    """
    word = kind.removesuffix("s")
    made = getattr(getattr(optuna_for(f"{word} {name}"), kind), name, None)
    if not isinstance(made, type) or name.startswith("Base"):
        raise BadInputError(f"{word} {name} is not a class of optuna.{kind}", hint=EXAMPLES[kind])
    known = inspect.signature(made).parameters
    if not isinstance(options, Mapping):
        raise BadInputError(
            f"options of {word} {name} are a mapping, got {options!r}", f"its options are {', '.join(known)}"
        )
    # Samplers use NumPy's RandomState, which takes seeds of 32 bits.
    seeded = {"seed": seed % 2**32} if "seed" in known else {}
    given = {
        key: _optuna_part(kind, str(value["name"]), value.get("options", {}), seed)
        if isinstance(value, Mapping) and "name" in value
        else value
        for key, value in options.items()
    }
    with _refuse_optuna_errors(kind, name, f"its options are {', '.join(known)}"):
        return made(**{**seeded, **given})


@contextmanager
def _refuse_optuna_errors(
    kind: str, name: str, hint: str = "change its options, or install what it imports"
) -> Iterator[None]:
    """Refuse a sampler or pruner if Optuna raises an error in the block, and hide its warnings."""
    try:
        with warnings.catch_warnings():
            # Each process would warn of experimental parts, which are many.
            warnings.simplefilter("ignore")
            yield
    except BadInputError:
        raise
    # Options may break Optuna's classes in any way.
    except Exception as error:
        raise BadInputError(
            f"{kind.removesuffix('s')} {name} cannot be used: {type(error).__name__}: {error}", hint
        ) from None
