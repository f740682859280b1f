"""Samples that tell their numbers, how often they were prepared, and whose random part they have."""

from __future__ import annotations

import numpy as np

from hetctl.runtime.data.sampler import sample_rng
from hetctl.runtime.data.sources import MapSource


class NumberedSamples(MapSource):
    """Inputs of eight times the number; the random part adds a fraction, and changes the type."""

    def __init__(self, samples, log=None, bad=None):
        self.samples, self.log, self.bad = samples, log, bad
        super().__init__(self, "training")

    def __len__(self):
        return self.samples

    def _read(self, number):
        if number == self.bad:
            raise ValueError(f"sample {number} is rotten")
        if self.log:
            with self.log.open("a") as log:
                log.write(f"{number}\n")
        return np.full(8, number, np.uint8), np.int64(number)

    def augment(self, x, rng, out=None):
        return np.add(x, np.float32(rng.random()), out=out)

    def prepared(self):
        """Return how often each sample was prepared, except the first, which determines the layout."""
        return np.bincount(np.array(self.log.read_text().split(), int), minlength=self.samples)[1:].tolist()


def check_samples(x, y, numbers, seed, epoch):
    """Compare samples with those that one process would prepare."""
    assert y.tolist() == list(numbers)
    fractions = np.array([np.float32(sample_rng(seed, epoch, number).random()) for number in y], np.float32)
    assert np.array_equal(x, np.repeat((y.astype(np.float32) + fractions)[:, None], 8, axis=1))
