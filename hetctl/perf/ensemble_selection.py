"""Ensembles of trained members from their predictions: averages, selection, calibration, and what is gained.

Selection is greedy and with replacement (Caruana et al., "Ensemble Selection from Libraries of Models",
ICML 2004). Averages of weights are those of Wortsman et al., "Model soups" (ICML 2022), and the temperature
is that of Guo et al., "On Calibration of Modern Neural Networks" (ICML 2017). Nothing is judged by the
samples by which it was chosen: see `folds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.errors import BadInputError
from hetctl.model.exports import ACCURACY, LOSS, MAE, MSE, Gain, OutputForm
from hetctl.model.values import dataclass

Array = npt.NDArray[Any]
Weights = npt.NDArray[np.float64]

LEAST = 1e-12
"""Smallest probability whose logarithm is taken: a wrong and certain member must not count infinitely."""
SUM_ERROR = 1e-3
"""Error of the sum of probabilities, as 16-bit numbers have it."""
SELECTIONS = 50
"""Steps of the greedy selection; of their prefixes the best is taken."""
EM_STEPS = 200
TEMPERATURES = (0.05, 20.0)
BISECTIONS = 60
RESAMPLES = 2000
SEED = 0
"""Seed of the division of samples, and of resamples: the same command gives the same numbers."""


def read_targets(targets: Array, outputs: Array) -> tuple[Array, int]:
    """Return targets as class numbers and the number of classes, or as rows of values and 0.

    Parameters
    ----------
    targets, outputs : array
        Targets and a network's outputs, a row for each sample.

    Raises
    ------
    BadInputError
        If they are neither one class nor values for each sample.
    """
    rows = outputs.reshape(len(outputs), -1)
    flat = targets.reshape(len(targets), -1)
    width, one = rows.shape[1], flat.shape[1] == 1
    if (
        one
        and targets.dtype.kind in "biu"
        and width > 1
        and outputs.ndim == 2
        and flat.max(initial=0) < width
    ):
        return flat[:, 0].astype(np.int64), width
    binary = bool(np.isin(flat, (0, 1)).all())
    if one and width == 1 and binary:
        return flat[:, 0].astype(np.int64), 2
    if flat.shape == rows.shape and not binary:
        return flat.astype(np.float64), 0
    if flat.shape == rows.shape and (flat.sum(axis=1) == 1).all():
        return flat.argmax(axis=1), width
    raise BadInputError(
        f"outputs of the shape {outputs.shape} for targets of {targets.shape} are neither one class nor"
        " values for each sample",
        "such members cannot be averaged by hetctl; export them one by one",
    )


def form_of(outputs: Array, classes: int) -> OutputForm:
    """Return what a network's outputs are: probabilities if they are none below 0 and add up to 1."""
    if not classes:
        return OutputForm.VALUES
    rows = outputs.reshape(len(outputs), -1)
    in_bounds = bool(((rows >= 0) & (rows <= 1 + SUM_ERROR)).all())
    adds_up = rows.shape[1] == 1 or bool((abs(rows.sum(axis=1, dtype=np.float64) - 1) < SUM_ERROR).all())
    return OutputForm.PROBABILITIES if in_bounds and adds_up else OutputForm.LOGITS


def predictions_of(outputs: Array, form: OutputForm) -> Array:
    """Return probabilities of classes, or values: a row of 64-bit numbers for each sample."""
    rows = outputs.reshape(len(outputs), -1).astype(np.float64)
    if form is OutputForm.VALUES:
        return rows
    if rows.shape[1] == 1:
        upper = rows if form is OutputForm.PROBABILITIES else 1 / (1 + np.exp(-rows))
        return np.hstack([1 - upper, upper])
    return rows if form is OutputForm.PROBABILITIES else softmax(rows)


def softmax(logits: Array) -> Array:
    """Return the probabilities of logits."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: Array = powers / powers.sum(axis=1, keepdims=True)
    return found


SCORES: dict[str, Callable[[Array, Array], Array]] = {
    ACCURACY: lambda p, y: (p.argmax(axis=1) == y).astype(np.float64),
    LOSS: lambda p, y: -np.log(np.maximum(p[np.arange(len(y)), y], LEAST)),
    MSE: lambda p, y: ((p - y) ** 2).mean(axis=1),
    MAE: lambda p, y: abs(p - y).mean(axis=1),
}
"""Values of each sample by metric, whose mean is the metric."""


def metric_like(named: str, classes: int) -> str:
    """Return the metric that is nearest to that of a stop rule."""
    if not classes:
        return MAE if "mae" in named or "absolute" in named else MSE
    return ACCURACY if "acc" in named else LOSS


@dataclass(frozen=True)
class Task:
    """Predictions of members for the same samples, and what is sought.

    Parameters
    ----------
    predictions : array
        By member, sample, and class or value.
    targets : array
        Class numbers, or rows of values.
    """

    predictions: Array
    targets: Array
    metric: str

    @property
    def has_classes(self) -> bool:
        """True if the predictions are probabilities."""
        return self.targets.ndim == 1

    def of(self, rows: Array) -> Task:
        """Return the task of some of the samples."""
        return Task(self.predictions[:, rows], self.targets[rows], self.metric)

    def loss(self, predictions: Array) -> tuple[float, float]:
        """Return what is to be small: the metric, then a loss that tells equal ones apart."""
        value = float(SCORES[self.metric](predictions, self.targets).mean())
        fine = LOSS if self.has_classes else MSE
        second = float(SCORES[fine](predictions, self.targets).mean())
        return (-value if self.metric == ACCURACY else value), second

    def order(self) -> list[int]:
        """Return the members, the best first."""
        return sorted(range(len(self.predictions)), key=lambda one: self.loss(self.predictions[one]))


def best(task: Task) -> Weights:
    """Return the weights with the best member alone."""
    return _only([task.order()[0]], task)


def average(task: Task) -> Weights:
    """Return equal weights."""
    return _only(range(len(task.predictions)), task)


def greedy(task: Task, steps: int = SELECTIONS) -> Weights:
    """Return weights by greedy selection with replacement (Caruana et al., section 2).

    Each step adds the member with which the average is best; a member may be added again.
    """
    count = len(task.predictions)
    total, chosen = np.zeros(task.predictions.shape[1:]), np.zeros(count)
    found, least = chosen, (np.inf, np.inf)
    for step in range(1, steps + 1):
        losses = [task.loss((total + one) / step) for one in task.predictions]
        pick = min(range(count), key=losses.__getitem__)
        total, chosen = total + task.predictions[pick], chosen + np.eye(count)[pick]
        if losses[pick] < least:
            found, least = chosen / step, losses[pick]
    return found


def weighted(task: Task) -> Weights:
    """Return the weights, none below 0, whose average has the least loss: log-loss of classes, or squares.

    Both losses are convex in the weights. That of a mixture of probabilities falls with each step of
    expectation maximization; squares, with each step to a member (Frank and Wolfe), of the best length.
    """
    count = len(task.predictions)
    weights = np.full(count, 1 / count)
    if task.has_classes:
        likelihoods = np.maximum(task.predictions[:, np.arange(len(task.targets)), task.targets], LEAST)
        for _ in range(EM_STEPS):
            parts = weights[:, None] * likelihoods
            weights = (parts / parts.sum(axis=0)).mean(axis=1)
        return weights
    errors = (task.predictions - task.targets).reshape(count, -1)
    products = errors @ errors.T
    for _ in range(EM_STEPS):
        gradient = products @ weights
        step = np.eye(count)[gradient.argmin()] - weights
        curvature = step @ products @ step
        if curvature <= 0:
            break
        weights = weights + np.clip(-(gradient @ step) / curvature, 0.0, 1.0) * step
    return weights


def averaged(predictions: Array, weights: Weights) -> Array:
    """Return the weighted average of members' predictions."""
    found: Array = np.tensordot(weights, predictions, axes=1)
    return found


def temperature(probabilities: Array, targets: Array) -> float:
    """Return the temperature with the least log-loss (Guo et al., section 4.2), within `TEMPERATURES`.

    The loss is convex in the inverse of the temperature, by whose derivative it is found.
    """
    logits = np.log(np.maximum(probabilities, LEAST))
    own = logits[np.arange(len(targets)), targets].mean()

    def slope(inverse: float) -> float:
        return float((softmax(inverse * logits) * logits).sum(axis=1).mean() - own)

    low, high = (1 / bound for bound in reversed(TEMPERATURES))
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return float(1 / (low * high) ** 0.5)


def scaled(probabilities: Array, by: float) -> Array:
    """Return probabilities at a temperature."""
    return softmax(np.log(np.maximum(probabilities, LEAST)) / by)


def folds(samples: int) -> Iterator[tuple[Array, Array]]:
    """Yield the two halves of the samples, drawn at random, and each time the other half.

    What is chosen by the first is judged by the second, so that all samples judge, but none its own choice.
    """
    order = np.random.default_rng(SEED).permutation(samples)
    halves = order[: samples // 2], order[samples // 2 :]
    yield halves
    yield halves[::-1]


Choose = Callable[[Array], Callable[[Array], Array]]
"""Function of the numbers of samples by which to choose; it returns one of others, for their predictions."""


def judged(choose: Choose, shape: Sequence[int]) -> Array:
    """Return the predictions for all samples, each by what was chosen without it.

    Parameters
    ----------
    shape : sequence of int
        Shape of the predictions of all samples.
    """
    found = np.empty(tuple(shape))
    for chosen_by, others in folds(len(found)):
        found[others] = choose(chosen_by)(others)
    return found


def choosing(task: Task, weights_of: Callable[[Task], Weights]) -> Choose:
    """Return the choice of weights as `judged` takes it."""

    def choose(rows: Array) -> Callable[[Array], Array]:
        weights = weights_of(task.of(rows))
        return lambda others: averaged(task.predictions[:, others], weights)

    return choose


def greedy_soup(
    order: Sequence[int], loss_of: Callable[[tuple[int, ...]], tuple[float, float]]
) -> tuple[int, ...]:
    """Return the members of a greedy soup (Wortsman et al., Recipe 1).

    Parameters
    ----------
    order : sequence of int
        Members, the best first.
    loss_of : callable
        Function that returns the loss of the average of these members' weights.
    """
    chosen: tuple[int, ...] = (order[0],)
    least = loss_of(chosen)
    for one in order[1:]:
        candidate = tuple(sorted((*chosen, one)))
        if (found := loss_of(candidate)) <= least:
            chosen, least = candidate, found
    return chosen


def gain_of(scores: Array, before: Array, *, larger_is_better: bool) -> Gain:
    """Return by how much the mean of scores is better than that of others of the same samples.

    The interval is of the paired bootstrap: samples are drawn with replacement, the same ones for both.
    """
    differences = scores - before if larger_is_better else before - scores
    count, draws = len(differences), np.random.default_rng(SEED)
    # Equal differences are drawn together: the same distribution, at a fraction of the time for classes.
    values, sizes = np.unique(differences, return_counts=True)
    means = [float(draws.multinomial(count, sizes / count) @ values) / count for _ in range(RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return Gain(float(differences.mean()), float(low), float(high))


def _only(members: Sequence[int] | range, task: Task) -> Weights:
    weights = np.zeros(len(task.predictions))
    weights[list(members)] = 1 / len(members)
    return weights
