"""Grid and random search: every configuration is trained for the same epochs (CEREBRO, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from hetctl.methods.automl.procedure import Method, NewTrial, at_least
from hetctl.methods.automl.trial_history import TrialHistory


@dataclass(frozen=True)
class OneShot(Method):
    """The one-shot instance of CEREBRO's template.

    Parameters
    ----------
    trials : int
        Number of configurations.
    epochs : int
        Epochs of each configuration.
    """

    trials: int
    epochs: int

    def __post_init__(self) -> None:
        at_least(1, trials=self.trials, epochs=self.epochs)

    @property
    def fresh(self) -> int:
        """Number of configurations that the method takes from the source."""
        return self.trials

    def likely_epochs(self) -> tuple[int, ...]:
        """Return the epochs of each trial."""
        return (self.epochs,) * self.trials

    def next_trial(self, history: TrialHistory) -> NewTrial | None:
        """Return the next configuration, independent of earlier results (CEREBRO, section 3)."""
        return NewTrial(self.epochs) if len(history.trials) < self.trials else None
