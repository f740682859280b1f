"""Callback and settings of the trainer for scripts in PyTorch Lightning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from hetctl import script
from hetctl.adapters.checkpoint_place import checkpoint_folder, replace_durably
from hetctl.adapters.ddp import StopVote

FILE = "lightning.ckpt"


def trainer_settings() -> dict[str, Any]:
    """Return the arguments by which `Trainer` takes its ranks and devices from hetctl; none outside of a run.

    Otherwise, in a job of Slurm or LSF, Lightning would take them from the batch system, for which each agent
    of hetctl is a rank. It needs equally many ranks on each node.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    if not ranks:
        return {}
    on_node = int(os.environ["LOCAL_WORLD_SIZE"])
    return {
        "devices": on_node,
        "num_nodes": -(-ranks // on_node),
        "plugins": [TorchElasticEnvironment()],
        "strategy": "ddp" if ranks > 1 else "auto",
    }


def last_checkpoint() -> str | None:
    """Return the path of the checkpoint from which `Trainer.fit` has to go on; None at the first start."""
    path = _file()
    return str(path) if path.exists() else None


def _file() -> Path:
    return checkpoint_folder() / FILE


class HetctlLightningCallback(Checkpoint):  # type: ignore[misc]
    """Write a checkpoint after each epoch, report it, and stop with a checkpoint when hetctl says so.

    Parameters
    ----------
    samples : int or None
        Training samples of an epoch, of all ranks together. None: no rate is derived.
    """

    def __init__(self, samples: int | None = None) -> None:
        self._samples = samples
        self._vote = StopVote()
        self._left = False
        self._reported: dict[str, Any] = {}
        self._ends_epoch = False

    def state_dict(self) -> dict[str, Any]:
        """Return the last report, and whether the checkpoint is that of its epoch's end."""
        return {"reported": self._reported, "ends_epoch": self._ends_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the last report from the checkpoint."""
        self._reported, self._ends_epoch = state_dict["reported"], state_dict["ends_epoch"]

    def on_train_start(self, trainer: Trainer, _module: LightningModule) -> None:
        """Repeat the last report, which a kill of the script may have lost."""
        self._report(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, _module: LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Leave the epoch with a checkpoint if told to stop, between two updates, unless it is over."""
        between = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self._vote() and between and not trainer.is_last_batch:
            self._save(trainer, ends_epoch=False)
            self._left = trainer.should_stop = True
            # Lightning would validate a member whose time is over.
            trainer.limit_val_batches = 0

    def on_train_epoch_end(self, trainer: Trainer, _module: LightningModule) -> None:
        """Write the checkpoint of a whole epoch and report it."""
        if self._left:
            return
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self._reported = {**metrics, "epoch": trainer.current_epoch + 1}
        self._save(trainer, ends_epoch=True)
        self._report(trainer)
        trainer.should_stop = trainer.should_stop or self._vote.decided

    def _report(self, trainer: Trainer) -> None:
        if self._reported and trainer.is_global_zero:
            checkpoint = _file() if self._ends_epoch else None
            script.report(samples=self._samples, checkpoint=checkpoint, **self._reported)

    def _save(self, trainer: Trainer, *, ends_epoch: bool) -> None:
        self._ends_epoch = ends_epoch
        new = _file().with_suffix(".new")
        trainer.save_checkpoint(new)
        if trainer.is_global_zero:
            replace_durably(new, _file())
