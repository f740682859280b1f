"""A module of PyTorch Lightning that classifies generated images, on any number of ranks."""

import argparse
import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetctl.adapters.lightning import HetctlLightningCallback, last_checkpoint, trainer_settings

CLASSES, SAMPLES = 4, 512


class ImageClassifier(LightningModule):
    """Convolutional network for images of 3 x 16 x 16."""

    def __init__(self, width, learning_rate):
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
            nn.Linear(16 * width, CLASSES),
        )  # fmt: skip

    def training_step(self, batch, _index):
        """Return the loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch, _index):
        """Log loss and accuracy, as means over all ranks."""
        images, labels = batch
        outputs = self.network(images)
        accuracy = (outputs.argmax(1) == labels).float().mean()
        metrics = {"val_loss": nn.functional.cross_entropy(outputs, labels), "val_accuracy": accuracy}
        self.log_dict(metrics, sync_dist=True)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def images_of(seed, samples):
    """Return images, each with a pattern of its class under noise."""
    patterns = torch.randn(CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (samples,), generator=source)
    noise = torch.randn(samples, 3, 16, 16, generator=source)
    return TensorDataset(patterns[labels] + 2 * noise, labels)


def main():
    """Train to the last epoch, or until hetctl says stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step, of all ranks")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    seed_everything(int(os.environ.get("HETCTL_SEED", "0")), verbose=False)
    # The checkpoint counts steps: with the same total batch they are as many on any number of ranks.
    on_rank = options.batch_size // int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        **trainer_settings(),
        max_epochs=options.epochs,
        callbacks=[HetctlLightningCallback(samples=SAMPLES)],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        ImageClassifier(options.width, options.learning_rate),
        DataLoader(images_of(1, SAMPLES), batch_size=on_rank, shuffle=True),
        DataLoader(images_of(2, 128), batch_size=128),
        ckpt_path=last_checkpoint(),
    )


if __name__ == "__main__":
    main()
