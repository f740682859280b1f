"""Training of one member in one round: from its last checkpoint to convergence, stop or deadline."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.model.plan import Allocation
from hetctl.model.profile import PreprocessPoint
from hetctl.model.serialization import encode
from hetctl.model.training_progress import NO_BEST, BestCheckpoint, EpochResult, TimedRate
from hetctl.model.training_settings import EPOCHS, SECONDS, STEPS, CheckpointInterval
from hetctl.model.values import dataclass
from hetctl.perf.rate_prediction import is_noteworthy
from hetctl.runtime.data.loaders import Loader
from hetctl.runtime.frameworks import TrainableNetwork, finished
from hetctl.runtime.frameworks.stage_network import StageNetwork
from hetctl.runtime.worker.async_checkpoint import OnSaved, Saver
from hetctl.runtime.worker.checkpoint import (
    Arrays,
    CheckpointFolder,
    Loaded,
    Manifest,
    TrainingState,
)
from hetctl.runtime.worker.group import Group, all_gather
from hetctl.runtime.worker.hardware import Busy, peak_memory
from hetctl.storage.event_files import EventWriter, Fields

Note = Callable[[int, int, Any], None]

Steps = Generator[Any, Any, Any]
"""Training in parts: a fused network yields works for `FusedSteps`, and gets their results; others do not."""

BALANCE = "balance/"
"""Prefix of a checkpoint's arrays with the state of the batch size manager."""
ACCESSES = "visits/"
"""Prefix of a checkpoint's arrays with the state of `SampleAccesses`."""
SCORES = "scores/"
"""Prefix of the sums for the metrics of an unfinished evaluation of a member that hops."""
PREDICTIONS = "predictions/"
"""Prefix of the outputs of the network, and of the targets, for the validation samples."""
GENERATORS = "generators_of_rank/"
"""Prefix, before the rank, of the states of other ranks' generators, each a JSON text."""


def own_arrays(arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Return a checkpoint's arrays of the network alone."""
    return {
        name: array
        for name, array in arrays.items()
        if not name.startswith((BALANCE, ACCESSES, SCORES, PREDICTIONS, GENERATORS))
    }


def random_state() -> Any:
    """Return the states of the generators as plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    numpy_state = [kind, [int(key) for key in keys], position, has_gauss, gauss]
    version, internal, gauss_next = random.getstate()
    return {"numpy": numpy_state, "python": [version, list(internal), gauss_next]}


def set_random_state(state: Any) -> None:
    """Set the generators to states from `random_state`; None leaves them as they are."""
    if state is None:
        return
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))


class SaveClock:
    """Epochs, steps and time of one rank since the last checkpoint; only rank 0 decides by them.

    Parameters
    ----------
    now : callable
        Clock in seconds.
    """

    def __init__(self, interval: CheckpointInterval, now: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._now = now
        self.restart()

    def restart(self) -> None:
        """Begin the next interval: training starts, or a checkpoint is being written."""
        self._since = self._now()
        self._counts = {EPOCHS: 0, STEPS: 0}

    def count(self, unit: str) -> None:
        """Count an epoch, or a step."""
        self._counts[unit] += 1

    def is_due(self) -> bool:
        """Return true if the interval is over."""
        counts = {**self._counts, SECONDS: self._now() - self._since}
        return counts[self._interval.unit] >= self._interval.every


class StopSignal:
    """Reason to pause training now, if any: a message of the driver, or the deadline.

    Parameters
    ----------
    requested : callable
        Function that returns the driver's reason for a stop; None if it has requested none.
    max_uninterrupted_s : float or None
        Longest time in seconds that fits into a job; work that takes longer is done in parts.
    """

    def __init__(
        self, requested: Callable[[], str | None], deadline: float, max_uninterrupted_s: float | None = None
    ) -> None:
        self._requested = requested
        self._deadline = deadline
        self._max_uninterrupted_s = max_uninterrupted_s
        self.reason: str | None = None

    def __call__(self) -> bool:
        """Return true if training has to pause."""
        # The rank checks its own clock, too: the driver may hang.
        at_deadline = "deadline" if time.time() >= self._deadline else None
        self.reason = self.reason or self._requested() or at_deadline
        return self.reason is not None

    def permits(self, seconds: float) -> bool:
        """Return true if no stop is requested, and work of `seconds` ends before the deadline.

        Work too long for any job begins all the same: it has to be done in parts.
        """
        # A stop would give users' functions an epoch without batches, which they need not expect.
        self.reason = self.reason or self._requested()
        if self.reason is not None:
            return False
        longest_s = self._max_uninterrupted_s
        needed_s = 0.0 if longest_s is not None and seconds > longest_s else seconds
        if time.time() + needed_s > self._deadline:
            self.reason = "deadline"
        return self.reason is None


def refuse_early_end(group: Group, stop: StopSignal, position: int, samples: int, part: str) -> None:
    """Raise a BadInputError if ``train_fn`` has ended early without being told to stop.

    Parameters
    ----------
    position, samples : int
        Numbers of samples that it took, and of all samples.
    part : str
        Description of the data whose samples these are.
    """
    if group.broadcast(stop.reason) is None:
        raise BadInputError(
            f"train_fn took {position} of the {samples} samples of {part}",
            "let it iterate over all batches of `data`",
        )


@dataclass
class MemberTrainer(ABC):
    """A member's training in one round; how an epoch is trained and saved is up to subclasses.

    Parameters
    ----------
    allocation : Allocation
        Its share of the round: one rank on each GPU.
    launched_at : float
        Time of the task's assignment, in seconds since the epoch.
    gpu_type : str or None
        Type of the ranks' GPUs if the site has several types and the ranks use one; else None.
    restarted_at : float or None
        Start of this rank's work on the member, in seconds since the epoch; None if it had to load samples.
    heartbeat : callable
        Function called as a heartbeat after each step of training and evaluation.
    note : callable
        Function called after each step with the epoch, its finished samples, and the last loss.
    show : callable
        Function called with each finished epoch, on rank 0 alone, in another thread than the trainer's.
    has_saved : callable
        Function that returns true if an earlier task of the member has reported a checkpoint.
    saver : Saver or None
        Writer of checkpoints; None: a thread that writes the whole network.
    busy : callable
        Function that returns the share of the time since its last call in which its device was busy.
    joined : callable
        Function that returns true once another member has come to its GPU.
    """

    member: Member
    network: TrainableNetwork | StageNetwork
    training: Loader
    validation: Loader
    checkpoints: CheckpointFolder
    group: Group
    events: EventWriter
    stop: StopSignal
    allocation: Allocation
    launched_at: float
    gpu_type: str | None = None
    restarted_at: float | None = None
    heartbeat: Callable[[], None] = lambda: None
    note: Note = lambda *_: None
    show: Callable[[EpochResult], None] = lambda _: None
    has_saved: Callable[[], bool] = lambda: False
    saver: Saver | None = None
    busy: Busy = lambda: None
    joined: Callable[[], bool] = lambda: False
    state: TrainingState = field(default_factory=TrainingState)

    def __post_init__(self) -> None:
        self._saver = self.saver or Saver(self.checkpoints)
        self._clock = SaveClock(self.member.checkpoint)
        self._unsaved = False
        self._saved_within_epoch = False
        self._reported_best: BestCheckpoint | None = NO_BEST
        self._trained_at: float | None = None
        self._data_s = self._save_s = 0.0
        self._preparation_rate: float | None = None

    @abstractmethod
    def _train_epoch(self) -> Steps:
        """Train the rest of the epoch; return false, with a state to save, if told to stop before its end."""

    @abstractmethod
    def _evaluate(self, number: int) -> Steps:
        """Return the ``val_*`` metrics after an epoch, equal on every rank."""

    @abstractmethod
    def _end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Apply the results of an epoch before it is saved."""

    @abstractmethod
    def _save(self, report: OnSaved) -> None:
        """Start to write a checkpoint."""

    def run(self) -> None:
        """Do `steps` at once."""
        finished(self.steps())

    def steps(self) -> Steps:
        """Train until the member has converged or is told to stop, and its last state is in a checkpoint."""
        with closing(self._saver):
            self._restore()
            self._rescale_learning_rate()
            self._clock.restart()
            self.events.write(
                "started",
                epochs=len(self.state.epochs),
                part_samples=self.state.part_samples,
                samples=self.training.samples,
            )
            if self.group.rank == 0 and self.state.epochs:
                # The last process may have been killed before it reported it.
                self._reported_best = None
                self.checkpoints.look_for_best(self.state)
                self.events.write_all(*self._of_best())
            while not (reason := self._reason_to_stop_for_good()):
                # Clocks and measured times differ: rank 0 decides, or some ranks would train on alone.
                if not self.group.broadcast(self.stop.permits(self._epoch_seconds_left())):
                    break
                if not (yield from self._train_epoch()):
                    self._unsaved = True
                    break
            if self._unsaved:
                self._begin_save(self._report_checkpoint)
            # The events below say that the last state is in a checkpoint.
            self._saver.wait()
            if reason:
                self.events.write("converged", reason=reason)
            else:
                reason = self.group.broadcast(self.stop.reason)
                self.events.write("stopped", reason=reason, part_samples=self.state.part_samples)

    def _reason_to_stop_for_good(self) -> str | None:
        rule = self.member.stop
        history = tuple(epoch.metrics[rule.metric] for epoch in self.state.epochs)
        return self.group.broadcast(rule.reason_to_stop(history))  # type: ignore[no-any-return]

    def _load(self) -> Loaded:
        """Return the newest checkpoint."""
        return self.checkpoints.load()

    def _restore(self) -> None:
        loaded = self._load()
        self.events.write_all(*map(_damaged, loaded.invalid))
        if loaded.arrays is None:
            if self.has_saved():
                raise lost_checkpoints_error(self.member.name, self.checkpoints.path, loaded.invalid)
            return
        self.state = loaded.state
        if self.state.visited or self.state.evaluating:
            # Such an epoch trains the samples in another order.
            epoch = len(self.state.epochs) + 1
            raise BadInputError(
                f"the newest checkpoint of {self.member.name} is in the middle of epoch {epoch} of hops",
                "finish the epoch with `--mode hopper`, or start a new run with `hetctl submit --new`",
            )
        if self.checkpoints.is_of_parent(loaded.state):
            # A mutant's learning rate is its own, not the parent's as scaled for the parent's GPUs.
            self.state = replace(loaded.state, gpus=1)
            self.network.adopt(own_arrays(loaded.arrays))
        else:
            self._restore_arrays(loaded.arrays)
        self._restore_generators(loaded.arrays)
        if self.state.epochs:
            # The event is missing if the last process was killed between checkpoint and event.
            self.events.write("epoch", **encode(self.state.epochs[-1]))

    def _restore_arrays(self, arrays: Arrays) -> None:
        self.network.restore(arrays)

    def _restore_generators(self, arrays: Arrays) -> None:  # noqa: ARG002
        """Set NumPy's and Python's generators; the network restores the framework's."""
        set_random_state(self.state.random_state)

    def _rescale_learning_rate(self) -> None:
        """Rescale (Capes et al., Equation 7): ``lr_new = gpus_new / gpus_last * lr_last``."""
        gpus = self.allocation.gpus
        if self.member.rescales and gpus != self.state.gpus:
            self.network.scale_learning_rate(gpus / self.state.gpus)
        self.state = replace(self.state, gpus=gpus)

    def _epoch_seconds_left(self) -> float:
        given, samples = self.allocation, self.training.samples
        gpus = given.gpus_alone(joined=self.joined())
        same_size = [epoch.duration_s for epoch in self.state.epochs if epoch.gpus == gpus]
        # An estimate must not keep an epoch from beginning.
        expected_s = samples / given.rate if given.rate_known else 0.0
        return (same_size[-1] if same_size else expected_s) * (1 - self.state.part_samples / samples)

    def _after_step(self, epoch: int, position: int, loss: Any) -> None:
        # Detect a full disk before training another epoch that could not be saved.
        self._saver.check()
        self._clock.count(STEPS)
        self.heartbeat()
        self.note(epoch, position, loss)
        if self.launched_at:
            now = time.time()
            self.events.write(
                "first_step",
                startup_s=now - self.launched_at,
                restart_s=None if self.restarted_at is None else now - self.restarted_at,
                peak_memory_bytes=peak_memory(),
            )
            self.launched_at = 0.0
            # What comes before is no training.
            self.busy()

    def _report_rate(self, rate: float, error: float) -> None:
        given = self.allocation, self.joined()
        timed = timed_rate(*given, self.member, self.gpu_type, rate, error, self.busy)
        self.events.write_all(("rate", encode(timed)), *self._of_preparation())
        if timed.beside:
            # From now on others may come and go.
            self.joined = lambda: True

    def _of_preparation(self) -> Iterator[Fields]:
        """Yield how fast a preprocessor is, once that is known and whenever it has changed."""
        rate, before = self.training.preparation_rate, self._preparation_rate
        if rate is not None and (before is None or is_noteworthy(before, rate)):
            self._preparation_rate = rate
            yield "preprocess", encode(PreprocessPoint(1, rate))

    def _finish_epoch(self, number: int, rate: float | None, *, is_whole: bool) -> Steps:
        """Evaluate, save and report an epoch that this task has trained wholly or in part."""
        began = time.perf_counter()
        # From the end of the last epoch's training, with all overheads.
        last_s = began - self._trained_at if self._trained_at is not None and is_whole else None
        self._trained_at = began
        if rate is None and last_s is not None:
            # It has too few full batches, but the process has trained before: nothing is done only once.
            rate = self.training.samples / self.state.part_s
        metrics = yield from self._evaluate(number)
        evaluate_s = time.perf_counter() - began
        result = EpochResult(
            epoch=number,
            metrics={"loss": self.state.part_loss / self.state.part_samples, **metrics},
            duration_s=self.state.part_s,
            gpus=self.allocation.gpus_alone(joined=self.joined()),
            finished_at=time.time(),
            rate=rate,
            batch_size=self.member.batch_size,
            gpu_type=self.gpu_type,
            overhead_s=max(0.0, last_s - self.training.samples / rate) if rate and last_s else None,
        )
        check_metrics(result.metrics, self.member)
        self._end_epoch(result.metrics)
        # A member that has hopped before keeps its visits.
        gpus, visit = self.allocation.gpus, self.state.visit
        self.state = TrainingState(epochs=(*self.state.epochs, result), gpus=gpus, visit=visit)

        waits = {"data_s": self._data_s, "save_s": self._save_s}
        self._data_s = self._save_s = 0.0

        def report_epoch(*before: Fields) -> None:
            epoch = {**encode(result), "evaluate_s": evaluate_s, **waits}
            self.events.write_all(*before, ("epoch", epoch), *self._of_preparation())
            self.show(result)

        def report(manifest: Manifest, seconds: float) -> None:
            """Report the epoch after its checkpoint, so that no epoch is trained twice."""
            report_epoch(*self._of_checkpoint(manifest, seconds))

        self._clock.count(EPOCHS)
        ranked = self.member.stop.ranked(self.state.epochs)
        is_best = self.member.keep.best > 0 and ranked[0] is self.state.epochs[-1]
        is_wanted = self._saved_within_epoch and is_best
        self._saved_within_epoch = False
        # Rank 0 decides: clocks differ, and each rank may have to save a part of the state.
        is_due, is_wanted = self.group.broadcast([self._clock.is_due(), is_wanted])
        if is_due:
            self._begin_save(report)
        elif is_wanted:
            # Between those of the interval, which it does not move.
            self._save_now(report)
        else:
            self._unsaved = True
            # An earlier epoch, whose checkpoint is still being written, is reported first.
            self._saver.call_after(report_epoch)

    def _begin_save(self, report: OnSaved) -> None:
        """Start to write a checkpoint, and the next interval."""
        self._saved_within_epoch = self.state.part_samples > 0
        self._save_now(report)
        self._clock.restart()

    def _save_now(self, report: OnSaved) -> None:
        began = time.perf_counter()
        self._save(report)
        self._save_s += time.perf_counter() - began
        self._unsaved = False

    def _report_checkpoint(self, manifest: Manifest, seconds: float) -> None:
        self.events.write_all(*self._of_checkpoint(manifest, seconds))

    def _of_checkpoint(self, manifest: Manifest, seconds: float) -> Iterator[Fields]:
        yield from self._of_best()
        written = {
            "epoch": len(manifest.state.epochs),
            "part_samples": manifest.state.part_samples,
            "path": str(self.checkpoints.path / manifest.file),
            "bytes": manifest.bytes,
            "sha256": manifest.sha256,
            "duration_s": seconds,
        }
        yield "checkpoint", written

    def _of_best(self) -> Iterator[Fields]:
        """Yield the checkpoint of the best epoch, if it is another one than before."""
        yield from map(_damaged, self.checkpoints.take_damaged())
        if (best := self.checkpoints.best) != self._reported_best:
            self._reported_best = best
            yield "best_checkpoint", encode(best)


def _damaged(name: str) -> Fields:
    print(f"checkpoint {name} is damaged and is not used", flush=True)
    return "checkpoint_invalid", {"name": name}


def timed_rate(
    allocation: Allocation,
    joined: bool,
    member: Member,
    gpu_type: str | None,
    rate: float,
    error: float,
    busy: Busy,
) -> TimedRate:
    """Return the rate of a member that has been timed in its round; `joined` as in `gpus_alone`."""
    share = busy() if allocation.gpus == 1 else None
    place = allocation.gpus_alone(joined=joined), member.batch_size, gpu_type
    return TimedRate(rate, *place, error, time.time(), share, () if joined else allocation.beside)


def load_together(checkpoints: CheckpointFolder, group: Group, needs: Callable[[str], bool]) -> Loaded:
    """Return this rank's arrays of the newest checkpoint that all ranks can read, and all invalid ones.

    Parameters
    ----------
    needs : callable
        Function that returns true for the names of arrays that this rank reads or checks.
    """
    loaded, invalid, newest = checkpoints.load(needs=needs), set[str](), tuple[int, ...]()

    def is_not_after(state: TrainingState) -> bool:
        return state.order <= newest

    while True:
        gathered = all_gather(group, [list(loaded.state.order), list(loaded.invalid)])
        invalid.update(name for _, names in gathered for name in names)
        found = {tuple(order) for order, _ in gathered}
        newest = min(found)
        if len(found) == 1:
            return replace(loaded, invalid=tuple(sorted(invalid, reverse=True)))
        # If a rank finds its part damaged, all ranks use an earlier checkpoint.
        loaded = checkpoints.load(is_not_after, needs)


def lost_checkpoints_error(member: str, folder: Path, damaged: Sequence[str]) -> BadInputError:
    """Return the error of a trained member all of whose checkpoints are damaged.

    Parameters
    ----------
    damaged : sequence of str
        Names of its checkpoints.
    """
    found = f"only damaged checkpoints ({', '.join(damaged)})" if damaged else "no checkpoint any more"
    return TransientInputError(
        f"{member} has trained, but {folder} has {found}: it does not start anew by itself",
        "restore the files there and `hetctl submit`, or start a new run with `hetctl submit --new`",
    )


def check_metrics(metrics: Mapping[str, float], member: Member) -> None:
    """Reject results that a member's stop rule or search cannot use.

    Raises
    ------
    BadInputError
        If the metric of the stop rule or the search is missing, or a metric is not a finite number.
    """
    add = "report it with each epoch" if member.command else "add it to the metrics of the model"
    needed = {"stop rule": ("stop", member.stop.metric), "search": ("search", member.objective.metric)}
    for owner, (key, metric) in needed.items():
        if metric not in metrics:
            raise BadInputError(
                f"the {owner}'s metric {metric} is not among the results: {', '.join(sorted(metrics))}",
                f"name one of them in `{key}:`, or {add}",
            )
    check_finite(metrics, "epoch")


def check_finite(metrics: Mapping[str, float], after: str) -> None:
    """Reject results of training that has diverged.

    Parameters
    ----------
    after : str
        Part of training with these results, for the message.

    Raises
    ------
    BadInputError
        If a metric is not a finite number.
    """
    for name, value in metrics.items():
        if not np.isfinite(value):
            raise BadInputError(
                f"{name} is {value} after the {after}: training diverged, and would again",
                "lower its learning rate, or clip its gradients",
            )
