"""Importance of hyper-parameters: the shares in which they explain which trials are good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetctl.methods.automl.optuna_search import distribution_of
from hetctl.methods.automl.space import Categorical, Parameter, Space
from hetctl.methods.automl.trial_history import Config

Measured = tuple[Config, float]
"""Config of a trial, with all keys of the space, and its loss."""
LEAST_TRIALS = 8
"""Least number of trials from which importance is computed."""


def importance_of(trials: Sequence[Measured], space: Space) -> dict[str, float]:
    """Return the importance of each key, the largest first; they sum to 1.

    They are those of PED-ANOVA (Watanabe et al., 2023), as Optuna computes them: how far the values of each
    key in the best tenth of the trials are from those in all. Losses of the others, most of which were ended
    early, do not count.

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
    spaces = _distributions_of(space, [config for config, _ in trials])
    for config, loss in trials:
        params = {key: config[key] for key in space}
        study.add_trial(optuna.create_trial(params=params, distributions=spaces, value=loss))
    found = optuna.importance.get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {key: float(share) for key, share in found.items()}


def _distributions_of(space: Space, configs: Sequence[Config]) -> dict[str, Any]:
    """Return a space as distributions of Optuna that hold the values of these configs."""
    return {
        key: distribution_of(_with(parameter, [config[key] for config in configs if key in config]))
        for key, parameter in space.items()
    }


def _with(parameter: Parameter, seen: Sequence[Any]) -> Parameter:
    """Return a choice with the values between its own to which PBT has changed some."""
    if not isinstance(parameter, Categorical):
        return parameter
    return Categorical(tuple(dict.fromkeys([*parameter.values, *seen])))
