"""Trials as an Optuna study, for its dashboard and plots, and the importance of hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import zip_longest
from typing import Any

from hetctl.methods.automl.optuna_search import optuna_distribution, optuna_for
from hetctl.methods.automl.trials import Categorical, Config, Space
from hetctl.model.values import dataclass

COMPLETE, PRUNED, FAIL, RUNNING = "COMPLETE", "PRUNED", "FAIL", "RUNNING"
"""States of a trial in Optuna: after all epochs, ended early, failed, and not ended."""


@dataclass(frozen=True)
class StudyTrial:
    """A trial for a study.

    Parameters
    ----------
    config : mapping
        Values by key; keys outside the space become attributes.
    values : mapping of int to sequence of float
        Metrics by epoch, in the order of the study's directions; Optuna shows the first over the epochs.
    state : str
        `COMPLETE`, `PRUNED`, `FAIL` or `RUNNING`; a complete trial has values.
    attributes : mapping
        Further values to show.
    """

    config: Config
    values: Mapping[int, Sequence[float]]
    state: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def result(self) -> list[float] | None:
        """Values of a complete trial after its last epoch."""
        return [*self.values[max(self.values)]] if self.state == COMPLETE else None

    @property
    def over_epochs(self) -> dict[int, float]:
        """First metric by epoch."""
        return {epoch: first for epoch, (first, *_) in self.values.items()}


def update_study(
    storage: str, name: str, modes: Sequence[str], space: Space, trials: Sequence[StudyTrial]
) -> None:
    """Update a study with trials, by number; create it if the storage has none of this name.

    Trials that have ended in the study stay unchanged.

    Parameters
    ----------
    storage : str
        URL of Optuna's database, such as ``sqlite:///trials.db``.
    name : str
        Name of the study.
    modes : sequence of str
        ``min`` or ``max`` for each metric.
    space : mapping
        Parameters whose ranges hold the values of all trials, future ones included.

    Raises
    ------
    BadInputError
        If Optuna is missing.
    """
    optuna = optuna_for("a study")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    database = optuna.storages.RDBStorage(storage)
    try:
        directions = [optuna.study.StudyDirection[f"{mode}imize".upper()] for mode in modes]
        try:
            study = int(database.get_study_id_from_name(name))
        except KeyError:
            study = int(database.create_new_study(directions, name))
        known = database.get_all_trials(study, deepcopy=False)
        spaces = {key: optuna_distribution(parameter) for key, parameter in space.items()}
        for before, trial in zip_longest(known, trials):
            if before is None:
                database.create_new_trial(study, _as_optuna(trial, spaces))
            elif trial is not None and not before.state.is_finished():
                _continue(database, study, before, trial)
    finally:
        database.remove_session()
        database.engine.dispose()


def _as_optuna(trial: StudyTrial, spaces: Mapping[str, Any]) -> Any:
    import optuna

    others = {key: value for key, value in trial.config.items() if key not in spaces}
    held = {key: of for key, of in spaces.items() if key in trial.config}
    return optuna.create_trial(
        state=optuna.trial.TrialState[trial.state],
        params={key: trial.config[key] for key in held},
        distributions=held,
        intermediate_values=trial.over_epochs,
        values=trial.result,
        user_attrs={**others, **trial.attributes},
    )


def _continue(database: Any, study: int, before: Any, trial: StudyTrial) -> None:
    import optuna

    number = database.get_trial_id_from_study_id_trial_number(study, before.number)
    for epoch, value in trial.over_epochs.items():
        if epoch not in before.intermediate_values:
            database.set_trial_intermediate_value(number, epoch, value)
    if trial.state != RUNNING:
        database.set_trial_state_values(number, optuna.trial.TrialState[trial.state], trial.result)


Measured = tuple[Config, float]
"""Config of a trial, with all keys of the space, and its loss."""
LEAST_TRIALS = 8
"""Least number of trials for a computation of importance."""


def key_importance(trials: Sequence[Measured], space: Space) -> dict[str, float]:
    """Return the importance of each key, the largest first; they sum to 1.

    Optuna computes it by PED-ANOVA (Watanabe et al., 2023): the distance of a key's values in the best tenth
    of the trials from its values in all. Losses of other trials, most of which ended early, do not count.

    Parameters
    ----------
    space : mapping
        Parameters whose values differ between trials.

    Returns
    -------
    dict of str to float
        Empty if Optuna is not installed, or there are fewer than `LEAST_TRIALS`.
    """
    try:
        import optuna
        from optuna.importance import PedAnovaImportanceEvaluator
    except ImportError:
        return {}
    if len(trials) < LEAST_TRIALS or not space:
        return {}
    optuna.logging.disable_default_handler()
    study = optuna.create_study()
    # PBT may have changed a choice to a value between the listed ones.
    wide = {
        key: replace(one, values=tuple(dict.fromkeys([*one.values, *(config[key] for config, _ in trials)])))
        if isinstance(one, Categorical)
        else one
        for key, one in space.items()
    }
    spaces = {key: optuna_distribution(one) for key, one in wide.items()}
    for config, loss in trials:
        params = {key: config[key] for key in space}
        study.add_trial(optuna.create_trial(params=params, distributions=spaces, value=loss))
    found = optuna.importance.get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {key: float(share) for key, share in found.items()}
