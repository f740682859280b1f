"""Sequences of several lengths as mappings, with a ``collate_fn``, and networks that take them padded."""

import json
import os
import signal
from pathlib import Path

import numpy as np

SAMPLES, HELD_OUT, WORDS = 101, 37, 20
"""Numbers of samples that batches do not divide."""


def sequence(number):
    """A mapping with a sequence of 1 to 9 words, whose label is whether more than half of them are high."""
    rng = np.random.default_rng(number)
    words = rng.integers(1, WORDS, rng.integers(1, 10))
    return {"number": number, "words": words.tolist(), "label": int((words > WORDS // 2).mean() > 0.5)}


class Sequences:
    """A map-style dataset."""

    def __init__(self, samples, first=0):
        self.samples, self.first = samples, first

    def __len__(self):
        return self.samples

    def __getitem__(self, number):
        return sequence(self.first + number)


def collate(samples):
    """Pad to the longest sequence of the batch."""
    longest = max(len(sample["words"]) for sample in samples)
    words = np.zeros((len(samples), longest), np.int64)
    for row, sample in zip(words, samples, strict=True):
        row[: len(sample["words"])] = sample["words"]
    numbers = np.array([sample["number"] for sample in samples])
    return {"words": words, "number": numbers}, np.array([sample["label"] for sample in samples])


SHARDS = 6


def write_shards(folder):
    """Write the sequences as shards of the kind that the folder is named after."""
    for part, samples, first in (("training", SAMPLES, 0), ("validation", HELD_OUT, 1000)):
        (folder / part).mkdir(parents=True)
        for number, shard in enumerate(np.array_split(np.arange(first, first + samples), SHARDS)):
            WRITERS[folder.name](folder / part / f"{number}", [sequence(n) for n in shard.tolist()])


def write_tar(path, samples):
    import webdataset

    with webdataset.TarWriter(f"{path}.tar") as file:
        for sample in samples:
            file.write({"__key__": str(sample["number"]), "json": sample})


def write_records(path, samples):
    import tensorflow as tf

    with tf.io.TFRecordWriter(f"{path}.tfrecord") as file:
        for sample in samples:
            file.write(json.dumps(sample).encode())


def write_lines(path, samples):
    path.with_suffix(".jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def read_tar(shard):
    import webdataset

    # Order and shares of the ranks are hetctl's: WebDataset must not split the shards once more.
    samples = webdataset.WebDataset(str(shard), shardshuffle=False, nodesplitter=iter)
    return (one["json"] for one in samples.decode())


def read_records(shard):
    import tensorflow as tf

    return map(json.loads, tf.data.TFRecordDataset(str(shard)).as_numpy_iterator())


def read_stream(shard):
    import datasets

    return datasets.load_dataset("json", data_files=str(shard), split="train", streaming=True)


WRITERS = {"webdataset": write_tar, "tfrecord": write_records, "stream": write_lines}
READERS = {"webdataset": read_tar, "tfrecord": read_records, "stream": read_stream}


def shards_in(folder, part, samples):
    from hetctl.samples import Shards

    sizes = [len(shard) for shard in np.array_split(np.arange(samples), SHARDS)]
    return Shards(sorted((folder / part).iterdir()), READERS[folder.name], sizes, collate, mix=2)


def input_fn(kind):
    from hetctl.samples import Collated

    if kind and Path(kind).is_dir():
        folder = Path(kind)
        return shards_in(folder, "training", SAMPLES), shards_in(folder, "validation", HELD_OUT)
    if kind == "kind://huggingface":
        import datasets

        training, validation = (
            datasets.Dataset.from_list([sequence(first + number) for number in range(samples)])
            for samples, first in ((SAMPLES, 0), (HELD_OUT, 1000))
        )
    else:
        training, validation = Sequences(SAMPLES), Sequences(HELD_OUT, 1000)
    return Collated(training, collate), Collated(validation, collate)


def torch_model_fn(config):
    import torch

    class Bag(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(WORDS, 8, padding_idx=0)
            self.scores = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))

        def forward(self, x):
            there = (x["words"] > 0).sum(1, keepdim=True)
            return self.scores(self.words(x["words"]).sum(1) / there)

    model = Bag()
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), 0.0 if config.get("still") else 0.05),
        "loss": torch.nn.CrossEntropyLoss(),
        "metrics": {"accuracy": lambda outputs, y: (outputs.argmax(1) == y).float().mean()},
    }


def keras_model_fn(config):
    import keras

    inputs = {name: keras.Input(shape, name=name) for name, shape in (("words", (None,)), ("number", ()))}
    words = keras.layers.Embedding(WORDS, 8, mask_zero=True)(inputs["words"])
    hidden = keras.layers.Dropout(0.1, seed=1)(keras.layers.GlobalAveragePooling1D()(words))
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
    return model


def noting_train_fn(data, model, optimizer, config, context):
    """Note the numbers of the samples of each batch; the first time, be killed at the step `killed_at`."""
    import torch

    folder, losses = Path(config["folder"]), []
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with (folder / f"seen-{context.rank}").open("a") as file:
            print(context.epoch, context.step, *x["number"].tolist(), file=file)
        if context.step == config["killed_at"] and context.rank == context.size - 1:
            try:
                (folder / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
    return sum(losses) / len(losses) if losses else 0.0
