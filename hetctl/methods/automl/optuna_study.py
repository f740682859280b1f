"""Trials as a study of Optuna, which its dashboard and its plots open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetctl.methods.automl.optuna_source import distribution_of
from hetctl.methods.automl.space import Categorical, Parameter, Space
from hetctl.methods.automl.trial_history import Config
from hetctl.model.errors import BadInputError

COMPLETE, PRUNED, FAIL, RUNNING = "COMPLETE", "PRUNED", "FAIL", "RUNNING"
"""States of a trial in Optuna: with all epochs, ended before, failed, and not ended."""


@dataclass(frozen=True)
class StudyTrial:
    """A trial for a study.

    Parameters
    ----------
    config : mapping
        Values of the keys of the space; others become attributes.
    values : mapping of int to float
        Metric by epoch.
    state : str
        `COMPLETE`, `PRUNED`, `FAIL` or `RUNNING`. One that is complete has values.
    attributes : mapping
        What else is to be shown of it.
    """

    config: Config
    values: Mapping[int, float]
    state: str
    attributes: Mapping[str, Any] = field(default_factory=dict)


def write_study(storage: str, name: str, mode: str, space: Space, trials: Sequence[StudyTrial]) -> None:
    """Write trials, by number, into a new study.

    Parameters
    ----------
    storage : str
        URL of a storage of Optuna, such as ``sqlite:///trials.db``.
    name : str
        Name of the study.
    mode : str
        ``min`` or ``max``.

    Raises
    ------
    BadInputError
        If Optuna is missing.
    """
    try:
        import optuna
    except ImportError:
        raise BadInputError(
            "a study requires Optuna, which is not installed",
            hint="install hetctl with its extra optuna, or Optuna itself: pip install optuna",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    direction = optuna.study.StudyDirection[f"{mode}imize".upper()]
    study = optuna.create_study(storage=storage, study_name=name, direction=direction)
    spaces = distributions_of(space, [trial.config for trial in trials])
    for trial in trials:
        others = {key: value for key, value in trial.config.items() if key not in space}
        study.add_trial(
            optuna.create_trial(
                state=optuna.trial.TrialState[trial.state],
                params={key: trial.config[key] for key in space},
                distributions=spaces,
                intermediate_values=dict(trial.values),
                value=trial.values[max(trial.values)] if trial.state == COMPLETE else None,
                user_attrs={**others, **trial.attributes},
            )
        )


def distributions_of(space: Space, configs: Sequence[Config]) -> dict[str, Any]:
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
