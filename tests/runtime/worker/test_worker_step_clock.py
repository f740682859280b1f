"""The rate in training: known after some steady steps, and told again only if it changes."""

import pytest

from hetctl.runtime.worker.step_clock import RATE_EVERY_S, RateClock


class Epochs:
    """Steps of epochs of 10 full batches and a smaller last one, on a clock of its own."""

    def __init__(self):
        self.now, self.steps, self.position = 0.0, 0, 0
        self.clock = RateClock(32, lambda: self.now)

    def train(self, seconds, step_s, between_s=0.0):
        """Train for some seconds; return the rates that were told."""
        told, until = [], self.now + seconds
        while self.now < until:
            if self.position == 330:
                self.position, self.now = 0, self.now + between_s
            self.position = min(self.position + 32, 330)
            self.now += step_s
            self.steps += 1
            told += filter(None, [self.clock.note(self.position, None)])
        return told


def test_the_rate_is_told_once_after_few_seconds():
    epochs = Epochs()
    ((rate, error),) = epochs.train(20.0, 0.25)
    assert (rate, error) == (pytest.approx(128.0), pytest.approx(0.0))


def test_what_lies_between_epochs_does_not_count():
    ((rate, _),) = Epochs().train(60.0, 0.25, between_s=3.0)
    assert rate == pytest.approx(128.0)


def test_a_changed_rate_is_told_again():
    epochs = Epochs()
    epochs.train(20.0, 0.25)
    assert epochs.train(2 * RATE_EVERY_S, 0.26) == []
    ((rate, _),) = epochs.train(2 * RATE_EVERY_S, 0.4)
    assert rate == pytest.approx(80.0)


def test_a_step_after_an_interruption_is_not_timed():
    epochs, told = Epochs(), []
    for _ in range(9):
        epochs.clock.interrupt()
        epochs.now += 5.0
        told += epochs.train(1.0, 0.25)
    ((rate, _),) = told
    assert rate == pytest.approx(128.0)
