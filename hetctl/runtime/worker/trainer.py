"""Training of a member on the ranks of a group, each with the whole network."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy.typing as npt

from hetctl.model.training_progress import RankShare
from hetctl.runtime.data.batches import Batches, StepBalancer, held_out_batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sample_accesses import SampleAccesses, most_accessed
from hetctl.runtime.data.sampler import Order, epoch_order
from hetctl.runtime.frameworks import TrainableNetwork
from hetctl.runtime.worker.async_checkpoint import OnSaved, ShardSaver
from hetctl.runtime.worker.checkpoint import Arrays, Loaded
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.member_trainer import MemberTrainer, load_together, refuse_early_end
from hetctl.runtime.worker.random_state import RANKS, gathered_states, random_state, restore_own
from hetctl.runtime.worker.step_clock import EpochClock

BALANCE = "balance/"
"""Prefix of the names of the state of the manager of batch sizes among a checkpoint's arrays."""
ACCESSES = "visits/"
"""Prefix of the names of the state of `SampleAccesses`, as checkpoints have it."""
SCORES = "scores/"
"""Prefix of the sums from which a member that hops computes the metrics of an unfinished evaluation."""


class TrainingBalancer(StepBalancer, Protocol):
    """Balancer of a group's batch sizes whose state is a part of the member's checkpoints."""

    def shares(self) -> tuple[RankShare, ...]:
        """Return the parts of the ranks in a recent iteration, on rank 0."""

    def state(self) -> Arrays:
        """Return the state for a checkpoint, on rank 0; empty if there is none."""

    def restore(self, state: Arrays) -> None:
        """Continue with a state, if it suits the group; it is rank 0's that counts."""


@dataclass
class Trainer(MemberTrainer):
    """A member's training in one round, as in `MemberTrainer`.

    Parameters
    ----------
    balancer : TrainingBalancer or None
        Balancer of the group's batch sizes; None: they are constant.
    accesses : SampleAccesses or None
        Accesses of the samples of partitioned data; None: each sample is accessed once in an epoch.
    """

    network: TrainableNetwork
    balancer: TrainingBalancer | None = None
    accesses: SampleAccesses | None = None

    def _restore_arrays(self, arrays: Arrays) -> None:
        managed = _under(BALANCE, arrays)
        if managed and self.balancer is not None:
            self.balancer.restore(managed)
        before = _under(ACCESSES, arrays)
        if before and self.accesses is not None:
            self.accesses.restore(before)
        elif self.state.part_samples:
            self._continue_otherwise(before, self.state.part_samples, self.state.part_order)
        self.network.restore(own_arrays(arrays))

    def _continue_otherwise(self, accesses: Arrays, done: int, order: Order) -> None:
        """Continue an epoch in which samples were drawn by accesses and now are not, or the reverse.

        Each node of this group has all partitions, and had not before, or the reverse. Data without
        partitions has neither, and orders whose keys only its loader knows.
        """
        if accesses and isinstance(self.training, ArrayLoader):
            if len(accesses["visits"]) == self.training.samples:
                self.training.continue_after(most_accessed(accesses, done), order)
        elif not accesses and self.accesses is not None:
            self.accesses.begin_after(epoch_order(self.training.samples, *order)[:done])

    def _adopt_arrays(self, arrays: Arrays) -> None:
        self.network.adopt(own_arrays(arrays))

    def _restore_generators(self, arrays: Arrays) -> None:
        super()._restore_generators(arrays)
        restore_own(self.network, self.group.rank, arrays)

    def _train_epoch(self) -> bool:
        """Train the rest of the epoch; return false if told to stop before its end."""
        number, is_whole = len(self.state.epochs) + 1, not self.state.part_samples
        clock = EpochClock(self.training.samples, self.member.chunk(self.group.size))

        def after_step(position: int) -> None:
            clock.note(position, batches.loss)
            self._after_step(number, position, batches.loss)

        batches = Batches(
            self.training,
            number,
            self.state.part_samples,
            self.group,
            self.stop,
            after_step,
            self.state.part_order or None,
            self.balancer,
            most=self.member.micro_batch_size,
            should_pause=self._is_pause_due,
            in_step=self.member.shard,
        )
        with closing(batches):
            while self._train_part(batches):
                self._begin_save(self._report_checkpoint)
                batches.resume()
        ended = time.perf_counter()
        last_s = ended - self._trained_at if self._trained_at is not None and is_whole else None
        self._trained_at = ended
        if not batches.complete:
            refuse_early_end(self.group, self.stop, batches.position, self.training.samples, "an epoch")
            return False
        self._finish_epoch(number, clock.rate, last_s)
        if self.accesses is not None:
            fewest, most = self.accesses.extremes
            self.events.write(
                "sample_accesses", epoch=number, fewest=fewest, most=most, held=self.accesses.held
            )
        return True

    def _is_pause_due(self) -> bool:
        """Return true if a checkpoint is due in the middle of an epoch."""
        # A time is no reason to wait for the last checkpoint; a number of steps is kept to.
        waits = self.member.checkpoint.is_timed and self._saver.is_busy
        return self._clock.is_due() and not waits

    def _train_part(self, batches: Batches) -> bool:
        """Train to the epoch's end, a stop, or a checkpoint that is due; return true if one is due."""
        began = time.perf_counter()
        loss = self.network.train(batches)
        self._account_part(batches, loss, time.perf_counter() - began)
        return batches.paused

    def _account_part(self, batches: Batches, loss: float, seconds: float) -> None:
        done = batches.position - batches.start
        self.state = replace(
            self.state,
            part_samples=batches.position,
            part_order=batches.order or (),
            # The mean of no losses is no number.
            part_loss=self.state.part_loss + (loss * done if done else 0.0),
            part_s=self.state.part_s + seconds,
        )

    def _evaluate(self, number: int) -> dict[str, float]:
        """Return the ``val_*`` metrics after an epoch, equal on every rank."""
        return self.network.evaluate(held_out_batches(self.validation, number, self.heartbeat))

    def _end_epoch(self, metrics: Mapping[str, float]) -> None:
        self.network.end_epoch(metrics)

    def _save(self, report: OnSaved) -> None:
        self.state = replace(self.state, random_state=random_state())
        of_ranks = gathered_states(self.network, self.group)
        if self.group.rank != 0 and not self.member.shard:
            # All ranks have the same weights: of GPUs, each would copy them to the node's memory.
            return
        arrays = self.network.save() | of_ranks
        if self.balancer is not None:
            arrays.update({f"{BALANCE}{name}": array for name, array in self.balancer.state().items()})
        if self.accesses is not None:
            arrays.update({f"{ACCESSES}{name}": array for name, array in self.accesses.save().items()})
        self._saver.save(arrays, self.state, report)


@dataclass
class ShardedTrainer(Trainer):
    """The training, as in `Trainer`, of a member that is divided among its ranks."""

    def _new_saver(self) -> ShardSaver:
        return ShardSaver(self.checkpoints, self.network, self.group)

    def _load(self) -> Loaded:
        """Return the newest checkpoint of which all ranks together have checked all parts."""
        loaded = load_together(self.checkpoints, self.group, checked_by(self.group))
        if loaded.arrays is not None:
            self.network.open_shards(self.checkpoints.path / loaded.shards)
        return loaded


def checked_by(group: Group) -> Callable[[str], bool]:
    """Return a function that is true for the names of arrays, and of the shards that this rank checks.

    There may be more shards than ranks, or fewer.
    """

    def needs(name: str) -> bool:
        kind, _, number = name.partition("/")
        return kind != "shards" or int(number) % group.size == group.rank

    return needs


def own_arrays(arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Return the network's own arrays of a checkpoint, not those of managers, accesses, scores or ranks."""
    return {
        name: array
        for name, array in arrays.items()
        if not name.startswith((BALANCE, ACCESSES, SCORES, RANKS))
    }


def _under(prefix: str, arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays whose names have a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
