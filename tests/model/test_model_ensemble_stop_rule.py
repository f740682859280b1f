"""When a member has converged, and what identifies it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule

PATIENT = StopRule(metric="val_accuracy", mode="max", patience=3, max_epochs=100)
histories = st.lists(st.floats(0, 1), max_size=30).map(tuple)


def epochs_of(rule: StopRule, history: tuple[float, ...]) -> int:
    """How many epochs are trained when the rule is asked after each."""
    return next((n for n in range(len(history) + 1) if rule.reason_to_stop(history[:n])), len(history))


@pytest.mark.parametrize(
    ("history", "epochs"),
    [
        ((), 0),
        ((0.5, 0.5, 0.5, 0.5, 0.9), 4),
        ((0.5, 0.4, 0.3, 0.6, 0.5, 0.5, 0.5, 0.9), 7),
        ((0.1, 0.2, 0.3, 0.4, 0.5), 5),
    ],
)
def test_patience_counts_epochs_without_a_better_one(history, epochs):
    assert epochs_of(PATIENT, history) == epochs


def test_less_is_better_in_mode_min():
    rule = replace(PATIENT, mode="min", metric="val_loss")
    assert epochs_of(rule, (3.0, 2.0, 2.5, 2.5, 2.5, 1.0)) == 5
    assert rule.reason_to_stop((3.0, 2.0, 2.5, 2.5, 2.5)) == "no better val_loss in 3 epochs"


def test_an_improvement_within_min_delta_is_none():
    creeping = (0.50, 0.505, 0.509, 0.51)
    assert epochs_of(replace(PATIENT, min_delta=0.01), creeping) == 4
    assert replace(PATIENT, min_delta=0.0).reason_to_stop(creeping) is None


@pytest.mark.parametrize(("mode", "history"), [("max", (0.1, 0.97)), ("min", (0.5, 0.02))])
def test_the_target_ends_training_at_once(mode, history):
    rule = replace(PATIENT, mode=mode, target=history[-1])
    assert rule.reason_to_stop(history[:1]) is None
    assert rule.reason_to_stop(history) == f"val_accuracy reached {history[-1]:g}"


@given(histories, st.integers(1, 10), st.integers(1, 20), st.sampled_from(["max", "min"]))
def test_epochs_lie_between_patience_and_max_epochs(history, patience, most, mode):
    rule = StopRule("m", mode, patience, max_epochs=most)
    epochs = epochs_of(rule, history)
    assert epochs <= most
    if epochs < min(len(history), most):
        assert epochs > patience
    if len(history) >= most:
        assert rule.reason_to_stop(history[:epochs])


@given(histories, st.integers(1, 10))
def test_both_modes_are_mirror_images(history, patience):
    upwards = StopRule("m", "max", patience)
    downwards = StopRule("m", "min", patience)
    assert epochs_of(upwards, history) == epochs_of(downwards, tuple(-value for value in history))


@given(histories, st.floats(0, 0.5))
def test_a_larger_min_delta_never_trains_longer(history, min_delta):
    assert epochs_of(replace(PATIENT, min_delta=min_delta), history) <= epochs_of(PATIENT, history)


@given(st.integers(1, 50), st.none() | st.integers(1, 90))
def test_predictions_never_assume_more_than_max_epochs(most, expected):
    rule = StopRule(max_epochs=most, expected_epochs=expected)
    assert rule.planned_epochs == min(most, expected or most)


def test_a_fingerprint_depends_on_network_and_batch_size_only():
    member = Member("m", {"units": 8, "layers": 2})
    same = replace(member, name="n", seed=9, stop=PATIENT, config={"layers": 2, "units": 8})
    others = {replace(member, batch_size=64).fingerprint, replace(member, config={"units": 9}).fingerprint}
    assert same.fingerprint == member.fingerprint
    assert len(others | {member.fingerprint}) == 3


def test_members_of_an_ensemble_are_found_by_name():
    ensemble = Ensemble("e", "tensorflow", Functions("a:b", "a:c"), (Member("a"), Member("b")), "/x")
    assert ensemble.member("b") == Member("b")
    with pytest.raises(KeyError, match="c"):
        ensemble.member("c")


FLAT = (0.5, 0.4, 0.4, 0.4)


@pytest.mark.parametrize(
    ("rule", "reason", "history", "still"),
    [
        (PATIENT, "100 epochs done", FLAT[:1] * 2, "100 epochs done"),
        (PATIENT, "40 epochs done", FLAT[:1] * 2, None),
        (PATIENT, "140 epochs done", FLAT[:1] * 2, "140 epochs done"),
        (PATIENT, "40 epochs done", FLAT, "no better val_accuracy in 3 epochs"),
        (PATIENT, "no better val_accuracy in 2 epochs", FLAT[:3], None),
        (PATIENT, "no better val_accuracy in 3 epochs", FLAT, "no better val_accuracy in 3 epochs"),
        (replace(PATIENT, target=0.5), "val_accuracy reached 0.5", (0.4,), "val_accuracy reached 0.5"),
        (replace(PATIENT, target=0.6), "val_accuracy reached 0.5", FLAT[:1], None),
        (replace(PATIENT, target=0.4), "val_accuracy reached 0.5", FLAT[:1], "val_accuracy reached 0.4"),
        (PATIENT, "val_accuracy reached 0.5", FLAT[:1], None),
        (PATIENT, "all epochs done", (), "all epochs done"),
    ],
)
def test_a_member_continues_only_if_its_limit_was_raised(rule, reason, history, still):
    assert rule.still_converged(reason, lambda: history) == still


@given(histories, st.integers(1, 10), st.integers(1, 30), st.integers(0, 5), st.integers(0, 5))
def test_a_verdict_stays_and_raised_limits_never_end_earlier(history, patience, most, more_patience, more):
    rule = StopRule(metric="val_accuracy", mode="max", patience=patience, max_epochs=most)
    reason = rule.reason_to_stop(history)
    if reason is None:
        return
    assert rule.still_converged(reason, lambda: history) == reason
    raised = replace(rule, patience=patience + more_patience, max_epochs=most + more)
    if raised.reason_to_stop(history) is None:
        assert raised.still_converged(reason, lambda: history) is None


@pytest.mark.parametrize(
    ("now", "extends"),
    [
        (StopRule(), True),
        (StopRule(max_epochs=101, patience=6), True),
        (StopRule(max_epochs=101, expected_epochs=50), True),
        (StopRule(max_epochs=99, patience=6), False),
        (StopRule(max_epochs=101, target=0.5), False),
        (StopRule(max_epochs=101, min_delta=0.1), False),
    ],
)
def test_only_higher_limits_extend_a_rule(now, extends):
    assert now.extends(StopRule()) is extends
