"""A text classifier of Hugging Face, made from a configuration: it learns which of two words is first."""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from hetctl.adapters.checkpoint_place import checkpoint_folder
from hetctl.adapters.transformers import HetctlTrainerCallback, last_checkpoint

WORDS, LENGTH, SAMPLES = 32, 12, 512


class Sentences(Dataset):
    """Sentences of numbered words; the label says which of the words 1 and 2 comes first."""

    def __init__(self, seed, samples):
        source = torch.Generator().manual_seed(seed)
        self.words = torch.randint(3, WORDS, (samples, LENGTH), generator=source)
        self.labels = torch.randint(2, (samples,), generator=source)
        for words, label in zip(self.words, self.labels, strict=True):
            first, second = torch.randperm(LENGTH, generator=source)[:2].sort().values
            words[first], words[second] = 1 + label, 2 - label

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def accuracy(predictions):
    """Return the share of sentences that are classified correctly."""
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def main():
    """Train to the last epoch, or until hetctl says stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step, of all ranks")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    folder = checkpoint_folder()
    torch.manual_seed(int(os.environ.get("HETCTL_SEED", "0")))
    network = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=options.hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=2 * options.hidden,
            max_position_embeddings=LENGTH,
        )
    )
    settings = TrainingArguments(
        output_dir=str(folder),
        seed=int(os.environ.get("HETCTL_SEED", "0")),
        num_train_epochs=options.epochs,
        # The checkpoint counts steps: with the same total batch they are as many on any number of ranks.
        per_device_train_batch_size=options.batch_size // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=options.learning_rate,
        per_device_eval_batch_size=64,
        eval_strategy="epoch",
        # The callback has checkpoints written.
        save_strategy="no",
        # The last checkpoint must stay until the next one is whole.
        save_total_limit=2,
        # The loss of a classifier is already a mean over sentences, and must not be added up over the ranks.
        average_tokens_across_devices=False,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=network,
        args=settings,
        train_dataset=Sentences(1, SAMPLES),
        eval_dataset=Sentences(2, 128),
        compute_metrics=accuracy,
        callbacks=[HetctlTrainerCallback(samples=SAMPLES)],
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))


if __name__ == "__main__":
    main()
