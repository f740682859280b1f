"""A history equals the sequence of its epochs, however it was made."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.serialization import decode, encode
from hetctl.model.training_progress import NEWEST, EpochHistory, EpochResult, Progress, TimedRate

numbers = st.floats(allow_nan=False, allow_infinity=False)
results = st.builds(
    EpochResult,
    st.just(0),
    st.dictionaries(st.sampled_from(["loss", "val_loss", "accuracy"]), numbers, max_size=3),
    numbers,
    st.integers(1, 99),
    numbers,
    st.none() | numbers,
    st.none() | st.integers(0, 999),
    st.none() | st.sampled_from(["A100", "H100"]),
    st.none() | numbers,
)


@st.composite
def epochs(draw):
    """Draw epochs in the order of their numbers, some of which may be missing."""
    drawn = sorted(draw(st.sets(st.integers(1, 60), max_size=20)))
    return [replace(draw(results), epoch=number) for number in drawn]


def kept(history):
    """Return a history that was written and read again."""
    return EpochHistory.from_row(json.loads(json.dumps(history.row())), history.packed())


@given(epochs())
def test_a_history_is_the_sequence_of_its_epochs(told):
    for history in (EpochHistory.of(told), kept(EpochHistory.of(told))):
        assert history == told == list(history)
        assert (len(history), history[-2:], history[:1]) == (len(told), tuple(told[-2:]), tuple(told[:1]))
        assert [history[at] for at in range(-len(told), len(told))] == told * 2
        losses = [done.metrics["loss"] for done in told if "loss" in done.metrics]
        assert history.values("loss") == losses
        assert history.best("loss", "min") == min(losses, default=None)
        assert history.best("loss", "max") == max(losses, default=None)
        assert encode(history) == encode(told)
        assert Progress("a", history) == Progress("a", tuple(told))


@given(epochs())
def test_no_change_of_a_batch_is_missing_from_a_history(told):
    known = [(done.epoch, done.gpus, done.batch_size) for done in told if done.batch_size is not None]
    changes = [after for before, after in zip([(), *known], known, strict=False) if before[1:] != after[1:]]
    for history in (EpochHistory.of(told), kept(EpochHistory.of(told))):
        assert set(changes) <= set(history.batches) <= set(known)


def test_a_timed_rate_outlives_the_epochs():
    timed = TimedRate(50.0, 2, 32, None, 0.04)
    history = EpochHistory.of([EpochResult(1, {"loss": 2.0}, 1.0, 1, 0.0)]).with_rate(timed)
    again = EpochHistory.from_row(history.row(), history.packed()).until(0)
    assert (list(again), again.rates) == ([], {("", 2, 32): (50.0,)})


def test_epochs_with_equal_batches_are_one():
    alike = [EpochResult(epoch, {}, 1.0, 2, 0.0, batch_size=32) for epoch in range(1, 9)]
    assert EpochHistory.of(alike).batches == [(1, 2, 32)]


@given(epochs(), st.integers(0, 61), st.booleans())
def test_a_history_divides_at_any_epoch(told, number, is_kept):
    whole = EpochHistory().plus(told, range(len(told)))
    history = kept(whole) if is_kept else whole
    before, after = history.until(number), history.after(number)
    assert before == [done for done in told if done.epoch <= number]
    assert after == [(done, line) for line, done in enumerate(told) if done.epoch > number]
    again = before.plus((done for done, _ in after), (line for _, line in after))
    assert (again, again.rates, again.overheads_s) == (told, whole.rates, whole.overheads_s)


@given(epochs(), st.integers(0, 20), results)
def test_histories_that_begin_alike_stay_apart(told, count, other):
    beginning = EpochHistory.of(told[:count])
    one, two = beginning.plus(told[count:]), beginning.plus([replace(other, epoch=99)])
    assert (one, beginning) == (told, told[:count])
    assert two == [*told[:count], replace(other, epoch=99)]


@given(epochs())
def test_the_newest_rates_are_known_without_the_epochs(told):
    whole = EpochHistory.of(told)
    history = EpochHistory.from_row(whole.row(), whole.packed().rpartition(b" ")[0] + b" nothing")
    of_kinds = {(done.gpu_type or "", done.gpus, done.batch_size) for done in told if done.rate}
    assert history.rates.keys() == of_kinds
    for gpu_type, gpus, size in of_kinds:
        same = [e.rate for e in told if (e.gpu_type or "", e.gpus, e.batch_size) == (gpu_type, gpus, size)]
        assert list(history.rates[gpu_type, gpus, size]) == [rate for rate in same if rate][-NEWEST:]
    assert history[-1:] == tuple(told[-1:])


def test_a_status_reads_back_what_a_history_wrote():
    told = EpochHistory.of([EpochResult(1, {"loss": 1.0}, 2.0, 1, 3.0)])
    assert decode(tuple[EpochResult, ...], encode(told)) == tuple(told)
