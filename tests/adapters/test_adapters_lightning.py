"""The adapter of PyTorch Lightning: epochs that are left and continued, and the ranks that it finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]

STEPS, EPOCHS = 8, 3


def trained(told_at: int | None, ends) -> tuple[list[str], int]:
    """Train, and be told to stop in a step; return what was called, and the number of steps in all."""
    from lightning.pytorch import LightningModule, Trainer

    from hetctl.adapters.lightning import HetctlLightningCallback, last_checkpoint

    class Line(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            # With random weights near the best ones, the loss need not fall with every epoch.
            torch.nn.init.zeros_(self.layer.weight)
            torch.nn.init.zeros_(self.layer.bias)
            self.calls = []

        def training_step(self, batch, _index):
            self.calls.append("step")
            if len(self.calls) == told_at:
                ends.tell_to_stop()
            return (self.layer(batch[0]) - 1).square().mean()

        def validation_step(self, batch, _index):
            self.calls.append("validation")
            self.log("val_loss", (self.layer(batch[0]) - 1).square().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    module = Line()
    trainer = Trainer(
        accelerator="cpu", max_epochs=EPOCHS, callbacks=[HetctlLightningCallback(samples=STEPS)],
        logger=False, num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(torch.arange(1.0, STEPS + 1)[:, None] / STEPS)
    trainer.fit(module, DataLoader(data), DataLoader(data, batch_size=STEPS), ckpt_path=last_checkpoint())
    return module.calls, trainer.global_step


def test_an_epoch_that_was_left_gets_the_steps_it_lacks(start_script):
    ends = start_script()
    calls, steps = trained(STEPS + 1 + 3, ends)
    assert (calls.count("step"), calls[-1], steps) == (STEPS + 3, "step", STEPS + 3)
    (first,) = ends.reports()
    assert (first["epoch"], first["samples"]) == (1, STEPS)
    ends = start_script()
    calls, steps = trained(None, ends)
    assert (calls[: STEPS - 3 + 1].count("step"), steps) == (STEPS - 3, EPOCHS * STEPS)
    again, *others = ends.reports()
    assert Path(first["checkpoint"]).name == "lightning.ckpt"
    # The checkpoint within the second epoch is not the one of the report.
    assert "checkpoint" not in again
    assert again == {key: value for key, value in first.items() if key != "checkpoint"}
    assert [report["epoch"] for report in others] == [2, 3]
    assert first["val_loss"] > others[0]["val_loss"] > others[1]["val_loss"]


def test_an_epoch_whose_last_step_is_done_is_reported(start_script):
    ends = start_script()
    calls, steps = trained(STEPS, ends)
    assert (calls.count("validation"), steps) == (1, STEPS)
    assert [report["epoch"] for report in ends.reports()] == [1]
    ends = start_script()
    _, steps = trained(None, ends)
    assert steps == EPOCHS * STEPS
    assert [report["epoch"] for report in ends.reports()] == [1, 2, 3]


IN_SLURM = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "run"}
OF_RANK = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def test_ranks_are_those_of_hetctl_in_a_job_of_slurm(monkeypatch):
    from lightning.pytorch import Trainer

    from hetctl.adapters.lightning import trainer_settings

    assert trainer_settings() == {}
    for name, value in {**IN_SLURM, **OF_RANK}.items():
        monkeypatch.setenv(name, value)
    found = Trainer(**trainer_settings(), accelerator="cpu", logger=False)
    assert (found.global_rank, found.world_size, found.local_rank, found.node_rank) == (3, 4, 1, 1)
    assert Trainer(accelerator="cpu", devices=1, logger=False).world_size == 1
