"""A sequential program that repeats the minibatches of virtual workers with the weights in their logs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np


class WaveProgram:
    """Virtual workers in one process, part after part of the epochs.

    Parameters
    ----------
    build : callable
        Returns a fresh stage for a range of layers.
    """

    def __init__(self, layout, build):
        self.layout = layout
        self.stages = [
            [build(range(plan.first, plan.last + 1)) for plan in stages] for stages in layout.workers
        ]
        self._begin({}, [])

    def _begin(self, met, batches):
        self.met, self.batches, self.done = met, batches, {}
        self.initial = [[stage.weights() for stage in stages] for stages in self.stages]

    def train(self, records, batches):
        """Train one part.

        Parameters
        ----------
        batches : list of list
            Pairs (x, y) of each virtual worker, as many as all have completed.
        """
        met = {
            (record.worker, record.stage, minibatch): (completed, pulled)
            for record in records
            for minibatch, completed, pulled in record.minibatches
        }
        self._begin(met, batches)
        left = [list(range(1, len(own) + 1)) for own in batches]
        while any(left):
            ready = [at for at, numbers in enumerate(left) if numbers and self._train(at, numbers[0])]
            assert ready, "the log has a circle"
            for worker in ready:
                left[worker].pop(0)
        waves = -(-max(map(len, batches)) // self.layout.in_flight)
        for worker, stages in enumerate(self.stages):
            for at, stage in enumerate(stages):
                set_weights(stage, self.weights(worker, at, 0, waves))

    def end_epoch(self):
        """Advance the learning rates of all virtual workers."""
        for stages in self.stages:
            for stage in stages:
                stage.end_epoch()

    def weights(self, worker, stage, completed, pulled):
        """Return the weights with own minibatches and waves of all; None if some are not known yet."""
        wave = self.layout.in_flight
        found = [weight.copy() for weight in self.initial[worker][stage]]
        wanted = [
            (other, minibatch)
            for other, own in enumerate(self.batches)
            for minibatch in range(1, min(pulled * wave, len(own)) + 1)
        ] + [(worker, minibatch) for minibatch in range(pulled * wave + 1, completed + 1)]
        if not all(one in self.done for one in wanted):
            return None
        for one in wanted:
            for at, name in enumerate(self.stages[worker][stage].weight_names):
                found[at] = found[at] + self.done[one][name]
        return found

    def saved(self):
        """Return the arrays of the first virtual worker's stages."""
        return {name: array for stage in self.stages[0] for name, array in stage.save().items()}

    def restart(self, layout=None, build=None):
        """Begin anew with the weights and the slots of the first virtual worker, as a run does."""
        arrays = self.saved()
        program = self if layout is None else WaveProgram(layout, build)
        for stages in program.stages:
            for stage in stages:
                stage.restore(arrays)
        return program

    def _train(self, worker, minibatch):
        stages = self.stages[worker]
        versions = [self.weights(worker, at, *self.met[worker, at, minibatch]) for at in range(len(stages))]
        if any(version is None for version in versions):
            return False
        x, y = self.batches[worker][minibatch - 1]
        for stage, version in zip(stages, versions, strict=True):
            set_weights(stage, version)
        used = [stage.version() for stage in stages]
        for stage, version in zip(stages[:-1], used[:-1], strict=True):
            x = stage.forward(minibatch, version, x)
        _, gradient = stages[-1].forward_backward(minibatch, used[-1], x, y)
        for stage in reversed(stages[:-1]):
            gradient = stage.backward(minibatch, gradient)
        updates = {}
        for stage in stages:
            before = stage.weights()
            stage.update(minibatch)
            for name, now, then in zip(stage.weight_names, stage.weights(), before, strict=True):
                updates[name] = now - then
        self.done[worker, minibatch] = updates
        return True


def set_weights(stage, weights):
    """Replace the weights of a stage."""
    stage.updates()
    stage.set_global_weights(weights)


def limited(records, minibatches):
    """Return records without minibatches after a number."""
    kept = (min(len(r.completed), max(0, minibatches - r.first + 1)) for r in records)
    return [
        replace(r, completed=r.completed[:count], pulled=r.pulled[:count])
        for r, count in zip(records, kept, strict=True)
        if count
    ]


def equal_to(expected, saved, tolerance):
    """Return the names of arrays that differ by more than a share of their largest value."""
    return [
        name
        for name, array in expected.items()
        if np.abs(saved[name] - array).max() > tolerance * max(1.0, np.abs(array).max())
    ]
