"""Callback for scripts with Hugging Face's `Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hetctl import script
from hetctl.adapters.ddp import StopVote, wait_for_ranks

WHOLE = "whole"
"""File in a checkpoint that all ranks have written."""
PREFIX = "eval_"
TIMES = frozenset({"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"})
"""Keys in a log entry of `Trainer` that are not metrics."""


def last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest whole checkpoint, from which `Trainer.train` goes on; None at the first start."""
    whole = [path.parent for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{WHOLE}")]
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


class HetctlTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Have a checkpoint written after each epoch, report it, and stop with a checkpoint when hetctl says so.

    Parameters
    ----------
    samples : int or None
        Training samples of an epoch, of all ranks together. None: no rate is derived.
    """

    def __init__(self, samples: int | None = None) -> None:
        self._samples = samples
        self._vote = StopVote()
        self._left = False
        self._ended: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_others: Any
    ) -> None:
        """Repeat the last report, which a kill of the script may have lost."""
        for entry in reversed(state.log_history):
            if metrics := _metrics_of(entry):
                self._report(args, state, round(entry["epoch"]), metrics)
                return

    def on_step_end(
        self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_others: Any
    ) -> None:
        """Leave the epoch with a checkpoint if told to stop, unless it is over."""
        if self._vote() and not float(state.epoch).is_integer():
            self._left = control.should_training_stop = control.should_save = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_others: Any
    ) -> None:
        """Have a whole epoch saved; an interrupted one is saved already."""
        if self._left:
            control.should_save = control.should_evaluate = False
            return
        self._ended = round(state.epoch)
        control.should_save = True
        # `Trainer` is about to write over the last step, which it may have saved already.
        _mark_of(args, state).unlink(missing_ok=True)
        control.should_training_stop = control.should_training_stop or self._vote.decided

    def on_save(
        self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_others: Any
    ) -> None:
        """Mark the checkpoint as whole, and report the epoch that it ends."""
        wait_for_ranks()
        if state.is_world_process_zero:
            _mark_of(args, state).touch()
        if self._ended is not None:
            entry = state.log_history[-1] if state.log_history else {}
            self._report(args, state, self._ended, _metrics_of(entry))
            self._ended = None

    def _report(
        self, args: TrainingArguments, state: TrainerState, epoch: int, metrics: dict[str, Any]
    ) -> None:
        if not state.is_world_process_zero:
            return
        # Within an epoch the checkpoint is not that of the metrics.
        mark = _mark_of(args, state)
        checkpoint = mark.parent if mark.exists() and float(state.epoch).is_integer() else None
        script.report(epoch=epoch, samples=self._samples, checkpoint=checkpoint, **metrics)


def _mark_of(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / WHOLE


def _metrics_of(entry: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if name.startswith(PREFIX) and name not in TIMES}
