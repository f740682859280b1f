from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import nnls

from hetctl.model.ensemble import StopRule
from hetctl.perf.convergence import (
    EpochPrior,
    LossCurve,
    _line,
    epochs_to_converge,
    errors_as_losses,
    fit_histories,
    fit_losses,
    log_epochs,
    predict_epochs,
)
from hetctl.perf.epochs_to_converge import CurveTable

RULE = StopRule(patience=3, min_delta=0.01, max_epochs=1000)
curves = st.builds(LossCurve, st.floats(0.05, 2.0), st.floats(0.0, 1.0), st.floats(0.0, 2.0))


def history(curve: LossCurve, epochs: int, noise: float = 0.0, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [curve.loss(epoch) * (1 + noise * draw.gauss(0, 1)) for epoch in range(1, epochs + 1)]


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.01, 10)), min_size=3, max_size=12),
)
def test_the_line_is_non_negative_least_squares(points: list[tuple[float, float]]) -> None:
    epochs = np.arange(1.0, len(points) + 1)
    values = np.array([value for value, _ in points])
    weights = np.array([weight for _, weight in points])
    slope, start = _line(epochs, values[None], weights[None])
    roots = np.sqrt(weights)
    expected, _ = nnls(np.stack([epochs, np.ones_like(epochs)], axis=1) * roots[:, None], values * roots)
    assert [slope[0], start[0]] == pytest.approx(list(expected), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("epochs", [5, 10, 30])
def test_a_curve_without_noise_is_found_again(epochs: int) -> None:
    likelihood, reason = fit_losses(history(LossCurve(0.3, 0.2, 0.7), epochs))
    assert likelihood is not None
    assert reason == ""
    found = likelihood.best
    assert found.loss(60) == pytest.approx(LossCurve(0.3, 0.2, 0.7).loss(60), rel=0.03)


@given(curves, st.integers(1, 10), st.floats(0.001, 0.1))
def test_convergence_is_patience_epochs_with_min_delta_or_less(
    curve: LossCurve, patience: int, min_delta: float
) -> None:
    rule = StopRule(patience=patience, min_delta=min_delta, max_epochs=10**9)
    epochs = epochs_to_converge(curve, rule)
    if epochs > patience:
        assert curve.loss(epochs - patience) - curve.loss(epochs) == pytest.approx(min_delta)
    else:
        assert epochs == patience


def test_a_target_is_reached_when_the_curve_is_that_low() -> None:
    curve = LossCurve(0.5, 0.1, 0.2)
    epochs = epochs_to_converge(curve, StopRule(target=0.4, min_delta=1e-6))
    assert curve.loss(epochs) == pytest.approx(0.4)
    assert epochs_to_converge(curve, StopRule(target=0.1, max_epochs=77, min_delta=1e-9)) == 77


def test_without_min_delta_gains_below_the_noise_do_not_count() -> None:
    quiet, noisy = LossCurve(0.3, 0.2, 0.7, 0.001), LossCurve(0.3, 0.2, 0.7, 0.05)
    rule = StopRule(patience=3, max_epochs=1000)
    assert epochs_to_converge(noisy, rule) < epochs_to_converge(quiet, rule) < 1000


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([3.0, 2.0], "too few"),
        ([1.0, 2.0, 3.0, 4.0, 5.0], "does not fall"),
        ([2.0, 2.0, 2.0, 2.0], "does not fall"),
        ([3.0, 2.0, math.nan, 1.0], "not a number above 0"),
        ([3.0, 2.0, 0.0, 1.0], "not a number above 0"),
        ([3.0, 2.0, -1.0, 1.0], "not a number above 0"),
        ([3.0, math.inf, 2.0, 1.0], "not a number above 0"),
    ],
)
def test_the_reason_is_given_if_losses_cannot_be_fitted(losses: list[float], words: str) -> None:
    likelihood, reason = fit_losses(losses)
    assert likelihood is None
    assert words in reason


priors = st.none() | st.builds(EpochPrior, st.floats(1.0, 500.0), st.floats(0.05, 1.0))
rules = st.builds(
    StopRule,
    patience=st.integers(1, 9),
    min_delta=st.just(0.0) | st.floats(1e-9, 1.0),
    target=st.none() | st.floats(0.0, 5.0),
    max_epochs=st.integers(1, 500),
)


@given(st.lists(st.floats(), max_size=30), rules, priors)
def test_any_history_predicts_finitely_many_further_epochs(
    losses: list[float], rule: StopRule, prior: EpochPrior | None
) -> None:
    likelihood, _ = fit_losses(losses)
    epochs, spread = predict_epochs(likelihood, rule, len(losses), prior)
    assert math.isfinite(epochs)
    assert math.isfinite(spread)
    assert epochs > len(losses) or (prior is None and likelihood is None and epochs > 0)


@pytest.mark.filterwarnings("error")
@given(st.lists(st.floats(5e-324, 1.7e308), min_size=3, max_size=30), rules, priors)
@example([1.7e308, 1.7e308, 1.0, 1.0], RULE, None)
@example([1.0, 1.0, 9e307, 9e307], RULE, None)
@example([1.0, 1e154, 1.0, 1.0], RULE, None)
@example([1.0, 1.0, 0.5, 1e-231], StopRule(patience=5), None)
def test_losses_of_any_size_are_borne_without_a_word(
    losses: list[float], rule: StopRule, prior: EpochPrior | None
) -> None:
    likelihood, _ = fit_losses(losses)
    epochs, _ = predict_epochs(likelihood, rule, len(losses), prior)
    assert math.isfinite(epochs)
    assert epochs > 0


def test_a_guess_decides_while_the_losses_do_not() -> None:
    curve = LossCurve(0.2, 0.2, 0.7)
    true = epochs_to_converge(curve, RULE)
    few, _ = fit_losses(history(curve, 4, noise=0.05, seed=1))
    many, _ = fit_losses(history(curve, 20, noise=0.01, seed=1))
    prior = EpochPrior(80.0, 0.1)
    assert predict_epochs(few, RULE, 4, prior)[0] > predict_epochs(few, RULE, 4, None)[0]
    assert predict_epochs(many, RULE, 20, prior)[0] == pytest.approx(true, rel=0.35)
    assert predict_epochs(None, RULE, 0, prior)[0] == 80
    assert predict_epochs(None, RULE, 90, prior)[0] > 90


def test_metrics_of_which_more_is_better_become_losses() -> None:
    rule = StopRule(metric="val_accuracy", mode="max", target=0.9)
    found = errors_as_losses([0.5, 0.75], rule)
    assert found is not None
    assert found[0] == [0.5, 0.25]
    assert (found[1].mode, found[1].target) == ("min", pytest.approx(0.1))
    assert errors_as_losses([12.0, 15.0], StopRule(mode="max")) is None
    assert errors_as_losses([3.0], RULE) == ([3.0], RULE)


@given(curves, rules, st.integers(3, 12))
def test_epochs_of_all_curves_at_once_are_those_of_each(
    curve: LossCurve, rule: StopRule, epochs: int
) -> None:
    likelihood, _ = fit_losses(history(curve, epochs))
    assert likelihood is not None
    columns = zip(likelihood.slopes, likelihood.starts, likelihood.floors, strict=True)
    each = [epochs_to_converge(LossCurve(*column, likelihood.noise), rule) for column in columns]
    assert np.exp(log_epochs(likelihood, rule)) == pytest.approx([min(max(e, 1.0), 1e4) for e in each])


@given(st.lists(st.tuples(curves, st.integers(0, 9)), max_size=9), rules, priors)
def test_members_fitted_and_predicted_at_once_are_as_each_alone(
    members: list[tuple[LossCurve, int]], rule: StopRule, prior: EpochPrior | None
) -> None:
    histories = [history(curve, epochs) for curve, epochs in members]
    table, expected = CurveTable(), {}
    for number, (losses, (fit, reason)) in enumerate(zip(histories, fit_histories(histories), strict=True)):
        alone, why_alone = fit_losses(losses)
        assert ((fit is None), reason) == ((alone is None), why_alone)
        if fit and alone:
            assert [*fit.logs, *fit.slopes, fit.noise] == [*alone.logs, *alone.slopes, alone.noise]
            table.put(str(number), fit.logs, log_epochs(fit, rule), len(losses))
            expected[str(number)] = predict_epochs(alone, rule, len(losses), prior)[0]
    for number in list(expected)[::2]:
        table.drop(number)
        del expected[number]
    assert table.epochs(expected, prior) == pytest.approx(expected)
    assert sorted(table) == sorted(expected)
