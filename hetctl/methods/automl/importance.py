"""Importance of hyper-parameters: the shares in which they explain which trials are good."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Measured = tuple[Mapping[str, Any], float]
"""Config of a trial, with keys that all trials have, and its loss."""
LEAST_TRIALS = 8
"""Fewer trials say nothing of importance."""
LOGARITHMIC_FROM = 30.0


def importance_of(trials: Sequence[Measured], keys: Sequence[str]) -> dict[str, float]:
    """Return the importance of each key, the largest first; they sum to 1.

    They are those of PED-ANOVA (Watanabe et al., 2023), as Optuna computes them: how far the values of each
    key in the best tenth of the trials are from those in all. Losses of the others, most of which were ended
    early, do not count.

    Parameters
    ----------
    keys : sequence of str
        Keys of the configs that differ between trials.

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
    if len(trials) < LEAST_TRIALS or not keys:
        return {}
    optuna.logging.disable_default_handler()
    study = optuna.create_study()
    spaces = {key: _distribution([config[key] for config, _ in trials]) for key in keys}
    for config, loss in trials:
        params = {key: _param(config[key]) for key in keys}
        study.add_trial(optuna.create_trial(params=params, distributions=spaces, value=loss))
    found = optuna.importance.get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {key: float(share) for key, share in found.items()}


def _distribution(values: Sequence[Any]) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if any(isinstance(_param(value), str) for value in values):
        return CategoricalDistribution(sorted({_param(value) for value in values}))
    low, high = float(min(values)), float(max(values))
    return FloatDistribution(low, high, log=low > 0 and high >= LOGARITHMIC_FROM * low)


def _param(value: Any) -> float | str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else str(value)
