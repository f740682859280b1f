"""How many epochs members take: from their own results so far, else from the others'."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetctl.core.ensemble import Member, StopRule
from hetctl.core.profile import Progress
from hetctl.perf.convergence import Guess, Likelihood, errors_as_losses, fit_losses, predict_epochs

LEAST_OTHERS = 3
"""From so many others on, a member without results and without an author's word goes by them."""
AUTHORS_SPREAD = 0.5
"""How far an author's `expected_epochs` is trusted beside a member's own results: a factor of e^0.5."""


@dataclass(frozen=True)
class _Results:
    """A member's results so far, as losses.

    Parameters
    ----------
    rule : StopRule
        Of the losses: less is better.
    """

    member: Member
    done: Progress
    rule: StopRule
    fit: Likelihood | None

    def predicted(self, others: Guess | None) -> float:
        """Return the epochs in all; the author's word comes before the others."""
        expected = self.rule.expected_epochs
        guess = others if expected is None else Guess(float(expected), AUTHORS_SPREAD)
        return predict_epochs(self.fit, self.rule, len(self.done.epochs), guess)[0]


def predicted_epochs(
    members: Sequence[Member], progress: Mapping[str, Progress]
) -> dict[str, tuple[int, str]]:
    """Return the epochs in all of members of which something can be said, and how it is known.

    Left out are members whose results cannot be fitted, unless the others' can and the author of the
    ensemble said nothing of them.
    """
    results = [_results(member, progress[member.name]) for member in members]
    others = _others(results)
    found: dict[str, tuple[int, str]] = {}
    for result in results:
        if result.fit:
            how = "by its results so far (Capes, Equation 1)"
        elif others and result.rule.expected_epochs is None:
            how = "as other members take"
        else:
            continue
        epochs = min(math.ceil(result.predicted(others) - 1e-6), result.rule.max_epochs)
        found[result.member.name] = epochs, f"{epochs} epochs in all {how}"
    return found


def _results(member: Member, done: Progress) -> _Results:
    metric = member.stop.metric
    values = [epoch.metrics[metric] for epoch in done.epochs if metric in epoch.metrics]
    as_losses = errors_as_losses(values, member.stop)
    if as_losses is None:
        return _Results(member, done, member.stop, None)
    losses, rule = as_losses
    return _Results(member, done, rule, fit_losses(losses)[0])


def _others(results: Sequence[_Results]) -> Guess | None:
    known = [
        math.log(max(len(r.done.epochs) if r.done.converged else r.predicted(None), 1.0))
        for r in results
        if r.done.converged or r.fit
    ]
    if len(known) < LEAST_OTHERS:
        return None
    return Guess(math.exp(statistics.median(known)), max(statistics.stdev(known), 0.1))
