"""Configurations drawn by one of Optuna's samplers, which learn from the reported losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetctl.methods.automl.optuna_parts import SAMPLERS, optuna_part
from hetctl.methods.automl.space import Categorical, Parameter, Space
from hetctl.methods.automl.trial_history import Config, Report, Trial, TrialHistory
from hetctl.model.errors import BadInputError


@dataclass(frozen=True)
class OptunaSource:
    """An Optuna sampler whose draws and reports follow the order of the history.

    The sampler learns from the first report of each trial; PBT's mutants, which it did not draw, are left
    out. A restored search repeats all draws, since the state of a sampler cannot be saved as JSON.

    Parameters
    ----------
    sampler : str
        Name of a class in ``optuna.samplers``.
    options : mapping
        Arguments of that class; one that is required, other than a seed, must be among them.
    """

    space: Space
    sampler: str = "TPESampler"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.new_sampler()

    @property
    def size(self) -> None:
        """None: the number of draws is unlimited."""

    def new_sampler(self) -> Any:
        """Return a new sampler in its initial state.

        Raises
        ------
        BadInputError
            If Optuna is missing, has no such sampler, or the options are wrong.
        """
        return optuna_part(SAMPLERS, self.sampler, self.options, self.seed)

    def follow(self, history: TrialHistory) -> Callable[[int], Config]:
        """Return a function that draws configurations from a study of the history."""
        return _Study(self, history).config


class _Study:
    """An Optuna study that is kept up to date with the history."""

    def __init__(self, source: OptunaSource, history: TrialHistory) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(sampler=source.new_sampler())
        self._distributions = {name: distribution_of(p) for name, p in source.space.items()}
        self._history, self._seen = history, 0
        self._drawn = dict[int, optuna.Trial]()
        self._catch_up()

    def config(self, number: int) -> Config:
        """Return the configuration drawn for a new trial."""
        self._catch_up()
        return self._draw(number)

    def _draw(self, number: int) -> Config:
        self._drawn[number] = self._study.ask(self._distributions)
        return self._drawn[number].params

    def _catch_up(self) -> None:
        for event in self._history.events[self._seen :]:
            if isinstance(event, Report):
                self._tell(event)
            elif event.parent is None and event.number not in self._drawn:
                self._draw_again(event)
        self._seen = len(self._history.events)

    def _tell(self, report: Report) -> None:
        from optuna.trial import TrialState

        if report.trial in self._drawn:
            state = TrialState.FAIL if report.loss is None else TrialState.COMPLETE
            # A trial is reported again after more epochs, but Optuna takes a single result of it.
            self._study.tell(self._drawn[report.trial], report.loss, state, skip_if_finished=True)

    def _draw_again(self, trial: Trial) -> None:
        config = self._draw(trial.number)
        # The history has the values that were trained: another draw would make Optuna learn from wrong ones.
        if config != trial.config:
            raise BadInputError(
                f"the saved trial {trial.number} has {dict(trial.config)}, but Optuna now draws {config}",
                hint="continue with the version of Optuna with which the search began",
            )


def distribution_of(parameter: Parameter) -> Any:
    """Return a parameter as a distribution of Optuna."""
    from optuna import distributions

    if isinstance(parameter, Categorical):
        return distributions.CategoricalDistribution(parameter.values)
    if parameter.whole:
        return distributions.IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
    return distributions.FloatDistribution(parameter.low, parameter.high, log=parameter.log)
