from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.profile import MemberProfile
from hetctl.model.training_progress import EpochResult, Progress
from hetctl.perf.convergence import LossCurve, epochs_to_converge
from hetctl.perf.epochs_to_converge import ConvergenceForecast, Epochs
from hetctl.perf.workloads import active_workloads

RULE = StopRule(metric="val_loss", patience=2, min_delta=0.02, max_epochs=100)
CURVE = LossCurve(slope=0.4, start=0.2, floor=0.5)
WHOLE = 17
"""Epochs that a member with this curve takes."""


def member(name: str, rule: StopRule = RULE) -> Member:
    return Member(name, stop=rule)


def after(name: str, epochs: int, metric: str = "val_loss", **values: str) -> Progress:
    losses = [CURVE.loss(epoch) for epoch in range(1, epochs + 1)]
    shown = [1 - loss / 4 if metric == "val_accuracy" else loss for loss in losses]
    done = tuple(EpochResult(e, {metric: value}, 1.0, 1, 0.0) for e, value in enumerate(shown, start=1))
    return Progress(name, done, **values)  # type: ignore[arg-type]


def predicted_epochs(members: Sequence[Member], progress: Mapping[str, Progress]) -> Epochs:
    forecast = ConvergenceForecast(members)
    forecast.update({member.name: progress[member.name] for member in members})
    return dict(forecast.epochs)


def test_the_rule_holds_after_17_epochs() -> None:
    assert WHOLE - 1 < epochs_to_converge(CURVE, RULE) <= WHOLE


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
