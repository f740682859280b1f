"""The adapter of Hugging Face's trainer: stopped and continued training ends with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.training, pytest.mark.filterwarnings("ignore")]

STEPS, EPOCHS = 8, 3


class Line(nn.Module):
    def __init__(self, told_at, ends):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.steps, self.told_at, self.ends = nn.Linear(1, 1), 0, told_at, ends

    def forward(self, x, labels):
        if self.training:
            self.steps += 1
            if self.steps == self.told_at:
                self.ends.tell_to_stop()
        outputs = self.layer(x)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


def trained(folder, told_at: int | None, ends) -> Line:
    """Train, and be told to stop in a step."""
    from transformers import Trainer, TrainingArguments

    from hetctl.adapters.transformers import HetctlTrainerCallback, last_checkpoint

    data = [{"x": torch.tensor([x / STEPS]), "labels": torch.tensor([1.0])} for x in range(STEPS)]
    model = Line(told_at, ends)
    settings = TrainingArguments(
        output_dir=str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=1, learning_rate=0.01,
        eval_strategy="epoch", save_strategy="no", save_total_limit=2, use_cpu=True, report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    callbacks = [HetctlTrainerCallback(samples=STEPS)]
    trainer = Trainer(model=model, args=settings, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    return model


def unnamed(reports):
    """Return reports without the paths of their checkpoints, which lie in different folders."""
    return [{key: value for key, value in report.items() if key != "checkpoint"} for report in reports]


@pytest.mark.parametrize(("told_at", "reported"), [(STEPS + 3, [1]), (2 * STEPS, [1, 2])])
def test_a_stopped_trainer_ends_with_the_same_weights(tmp_path, start_script, told_at, reported):
    ends = start_script()
    expected = trained(tmp_path / "whole", None, ends)
    whole = ends.reports()
    assert [report["epoch"] for report in whole] == [1, 2, 3]
    assert set(whole[0]) == {"epoch", "samples", "eval_loss", "checkpoint"}
    assert Path(whole[0]["checkpoint"]).name == f"checkpoint-{STEPS}"
    assert trained(tmp_path / "stopped", told_at, ends).steps == told_at
    assert unnamed(ends.reports()) == unnamed(whole[: len(reported)])
    ends = start_script()
    rest = trained(tmp_path / "stopped", None, ends)
    assert rest.steps == EPOCHS * STEPS - told_at
    # The last report before the stop is repeated.
    repeated = ends.reports()
    assert unnamed(repeated) == unnamed(whole[len(reported) - 1 :])
    # A checkpoint within an epoch is not the one of its report.
    assert ("checkpoint" in repeated[0]) is not (told_at % STEPS > 0)
    assert torch.equal(rest.layer.weight, expected.layer.weight)


def test_a_checkpoint_without_a_mark_is_passed_over(tmp_path):
    from hetctl.adapters.transformers import WHOLE, last_checkpoint

    assert last_checkpoint(tmp_path / "none") is None
    for steps in (8, 16, 100):
        (tmp_path / f"checkpoint-{steps}").mkdir()
    for steps in (8, 16):
        (tmp_path / f"checkpoint-{steps}" / WHOLE).touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-16")
