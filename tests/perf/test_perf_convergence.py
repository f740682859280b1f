from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import nnls

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.profile import MemberProfile
from hetctl.model.training_progress import EpochResult, Progress
from hetctl.perf.convergence import (
    NO_PRIOR,
    ConvergenceForecast,
    EpochPrior,
    epochs_beyond,
    errors_as_losses,
    fit_histories,
    fit_line,
    log_epochs,
    predict_epochs,
)
from hetctl.perf.workloads import active_workloads


@dataclass(frozen=True)
class Curve:
    """Equation 1."""

    slope: float
    start: float
    floor: float

    def loss(self, epoch: float) -> float:
        return 1 / (self.slope * epoch + self.start) + self.floor

    def epochs(self, rule: StopRule, noise: float = 0.0) -> float:
        parameters = (np.array([each]) for each in (self.slope, self.start, self.floor))
        return math.exp(log_epochs(*parameters, noise, rule)[0])

    def history(self, epochs: int, noise: float = 0.0, seed: int = 0) -> list[float]:
        draw = random.Random(seed)
        return [self.loss(epoch) * (1 + noise * draw.gauss(0, 1)) for epoch in range(1, epochs + 1)]


RULE = StopRule(metric="val_loss", patience=2, min_delta=0.02, max_epochs=100)
CURVE = Curve(slope=0.4, start=0.2, floor=0.5)
WHOLE = 17
"""Epochs that a member with this curve takes."""
curves = st.builds(Curve, st.floats(0.05, 2.0), st.floats(0.0, 1.0), st.floats(0.0, 2.0))


def predicted(losses: list[float], rule: StopRule, prior: EpochPrior = NO_PRIOR) -> float:
    (fit,) = fit_histories([(losses, rule)])
    return predict_epochs([fit], [prior])[0] if fit else epochs_beyond(prior, len(losses))


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.01, 10)), min_size=3, max_size=12),
)
def test_the_line_is_non_negative_least_squares(points: list[tuple[float, float]]) -> None:
    epochs = np.arange(1.0, len(points) + 1)
    values = np.array([value for value, _ in points])
    weights = np.array([weight for _, weight in points])
    slope, start = fit_line(epochs, values[None], weights[None])
    roots = np.sqrt(weights)
    expected, _ = nnls(np.stack([epochs, np.ones_like(epochs)], axis=1) * roots[:, None], values * roots)
    assert [slope[0], start[0]] == pytest.approx(list(expected), rel=1e-6, abs=1e-7)


@given(curves, st.integers(1, 10), st.floats(0.001, 0.1))
def test_convergence_is_patience_epochs_with_min_delta_or_less(
    curve: Curve, patience: int, min_delta: float
) -> None:
    epochs = curve.epochs(StopRule(patience=patience, min_delta=min_delta, max_epochs=10**9))
    if epochs > patience + 1e-9:
        assert curve.loss(epochs - patience) - curve.loss(epochs) == pytest.approx(min_delta)
    else:
        assert epochs == pytest.approx(patience)


def test_a_target_is_reached_when_the_curve_is_that_low() -> None:
    curve = Curve(0.5, 0.1, 0.2)
    assert curve.loss(curve.epochs(StopRule(target=0.4, min_delta=1e-6))) == pytest.approx(0.4)
    assert curve.epochs(StopRule(target=0.1, max_epochs=77, min_delta=1e-9)) == pytest.approx(77)


def test_without_min_delta_gains_below_the_noise_do_not_count() -> None:
    curve, rule = Curve(0.3, 0.2, 0.7), StopRule(patience=3, max_epochs=1000)
    assert curve.epochs(rule, noise=0.05) < curve.epochs(rule, noise=0.001) < 999


UNFIT = [
    [3.0, 2.0],
    [1.0, 2.0, 3.0, 4.0, 5.0],
    [2.0, 2.0, 2.0, 2.0],
    *([3.0, wrong, 2.0, 1.0] for wrong in (math.nan, math.inf, 0.0, -1.0)),
]


@pytest.mark.parametrize("losses", UNFIT)
def test_losses_that_do_not_fall_are_not_fitted(losses: list[float]) -> None:
    assert fit_histories([(losses, RULE)]) == [None]


priors = st.just(NO_PRIOR) | st.builds(EpochPrior, st.floats(1.0, 500.0), st.floats(0.05, 1.0))
rules = st.builds(
    StopRule,
    patience=st.integers(1, 9),
    min_delta=st.just(0.0) | st.floats(1e-9, 1.0),
    target=st.none() | st.floats(0.0, 5.0),
    max_epochs=st.integers(1, 500),
)


@pytest.mark.filterwarnings("error")
@given(
    st.lists(st.floats(), max_size=30) | st.lists(st.floats(5e-324, 1.7e308), min_size=3, max_size=30),
    rules,
    st.builds(EpochPrior, st.floats(1.0, 500.0), st.floats(0.05, 1.0)),
)
@example([1.7e308, 1.7e308, 1.0, 1.0], RULE, EpochPrior(9.0, 0.1))
@example([1.0, 1.0, 9e307, 9e307], RULE, EpochPrior(9.0, 0.1))
@example([1.0, 1e154, 1.0, 1.0], RULE, EpochPrior(9.0, 0.1))
@example([1.0, 1.0, 0.5, 1e-231], StopRule(patience=5), EpochPrior(9.0, 0.1))
def test_any_history_predicts_finitely_many_further_epochs(
    losses: list[float], rule: StopRule, prior: EpochPrior
) -> None:
    assert len(losses) < predicted(losses, rule, prior) < math.inf


def test_a_guess_decides_while_the_losses_do_not() -> None:
    curve, rule = Curve(0.2, 0.2, 0.7), StopRule(patience=3, min_delta=0.01, max_epochs=1000)
    few, many = curve.history(4, noise=0.05, seed=1), curve.history(20, noise=0.01, seed=1)
    prior = EpochPrior(80.0, 0.1)
    assert predicted(few, rule, prior) > predicted(few, rule)
    assert predicted(many, rule, prior) == pytest.approx(curve.epochs(rule), rel=0.35)
    assert epochs_beyond(prior, 0) == 80
    assert epochs_beyond(prior, 90) > 90


def test_metrics_of_which_more_is_better_become_losses() -> None:
    rule = StopRule(metric="val_accuracy", mode="max", target=0.9)
    found = errors_as_losses([0.5, 0.75], rule)
    assert found is not None
    assert found[0] == [0.5, 0.25]
    assert (found[1].mode, found[1].target) == ("min", pytest.approx(0.1))
    assert errors_as_losses([12.0, 15.0], StopRule(mode="max")) is None
    assert errors_as_losses([3.0], RULE) == ([3.0], RULE)


@given(st.lists(st.tuples(curves, st.integers(0, 9), rules, priors), max_size=9))
def test_members_fitted_and_predicted_at_once_are_as_each_alone(
    members: list[tuple[Curve, int, StopRule, EpochPrior]],
) -> None:
    histories = [(curve.history(epochs), rule) for curve, epochs, rule, _ in members]
    fits = fit_histories(histories)
    known = [(fit, prior) for fit, (*_, prior) in zip(fits, members, strict=True) if fit]
    together = iter(predict_epochs([fit for fit, _ in known], [prior for _, prior in known]))
    for fit, history, (*_, prior) in zip(fits, histories, members, strict=True):
        (alone,) = fit_histories([history])
        assert (fit is None) is (alone is None)
        if fit and alone:
            assert fit.logs.tolist() == alone.logs.tolist()
            assert next(together) == pytest.approx(predict_epochs([alone], [prior])[0])


def member(name: str, rule: StopRule = RULE) -> Member:
    return Member(name, stop=rule)


def after(name: str, epochs: int, metric: str = "val_loss", **values: str) -> Progress:
    losses = [CURVE.loss(epoch) for epoch in range(1, epochs + 1)]
    shown = [1 - loss / 4 if metric == "val_accuracy" else loss for loss in losses]
    done = tuple(EpochResult(e, {metric: value}, 1.0, 1, 0.0) for e, value in enumerate(shown, start=1))
    return Progress(name, done, **values)  # type: ignore[arg-type]


def predicted_epochs(
    members: Sequence[Member], progress: Mapping[str, Progress]
) -> dict[str, tuple[int, str]]:
    forecast = ConvergenceForecast(members)
    forecast.update({member.name: progress[member.name] for member in members})
    return dict(forecast.epochs)


def test_the_rule_holds_after_17_epochs() -> None:
    assert WHOLE - 1 < CURVE.epochs(RULE) <= WHOLE


@pytest.mark.parametrize("seen", [5, 8, 12])
def test_results_that_follow_equation_1_tell_the_epochs(seen: int) -> None:
    found = predicted_epochs([member("a")], {"a": after("a", seen)})
    assert found == {"a": (WHOLE, "17 epochs in all by its results so far (Capes, Equation 1)")}


def test_an_accuracy_is_seen_as_an_error_rate() -> None:
    rule = replace(RULE, metric="val_accuracy", mode="max", min_delta=0.005)
    found = predicted_epochs([member("a", rule)], {"a": after("a", 8, "val_accuracy")})
    assert found["a"][0] == WHOLE


def test_results_that_cannot_be_fitted_give_no_prediction() -> None:
    rising = Progress("a", tuple(EpochResult(e, {"val_loss": float(e)}, 1, 1, 0) for e in range(1, 9)))
    assert predicted_epochs([member("a")], {"a": rising}) == {}
    assert predicted_epochs([member("a")], {"a": after("a", 2)}) == {}


def test_without_results_others_count_unless_epochs_are_expected() -> None:
    told = member("e", replace(RULE, expected_epochs=50))
    members = [member(name) for name in "abcd"] + [told]
    progress = {
        "a": after("a", 6),
        "b": after("b", 7),
        "c": after("c", 20, converged="done"),
        "d": Progress("d"),
        "e": Progress("e"),
    }
    found = predicted_epochs(members, progress)
    assert found["d"] == (17, "17 epochs in all as other members take")
    assert "e" not in found


def test_too_few_others_give_no_prediction() -> None:
    members = [member("a"), member("b"), member("c")]
    progress = {"a": after("a", 6), "b": after("b", 7), "c": Progress("c")}
    assert set(predicted_epochs(members, progress)) == {"a", "b"}


def test_max_epochs_is_the_most() -> None:
    short = member("a", replace(RULE, max_epochs=10))
    assert predicted_epochs([short], {"a": after("a", 8)})["a"][0] == 10


def test_planners_get_the_predicted_work() -> None:
    whole = Ensemble("e", "tensorflow", Functions("m:i", "m:m"), (member("a"),), "/nowhere")
    profile = MemberProfile("a", {1: 10.0}, samples_per_epoch=100)
    (workload,) = active_workloads(whole, {"a": profile}, {"a": after("a", 8)}, 4)
    assert workload.samples_left == (WHOLE - 8) * 100
    assert "17 epochs in all" in workload.notes[-1]
