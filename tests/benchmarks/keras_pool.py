"""A simple alternative to hetctl: two pinned processes that run Keras' own ``fit``.

    python tests/benchmarks/keras_pool.py FOLDER

FOLDER has the example's ensemble file and its functions. Each process takes the next network when it is done
with one, and stops it early by the same rule. Prints seconds and the epochs of each network as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

PROCESSES = 2


def main(folder: Path) -> None:
    from hetctl.inputs.ensemble_file import read_ensemble

    members = read_ensemble(folder / "ensemble.yaml").members
    context = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()
    # The longest are not known beforehand: they are taken in the order of the file.
    for member in [*members, *[None] * PROCESSES]:
        tasks.put(member)
    began = time.time()
    workers = [
        context.Process(target=_work, args=(folder, core, tasks, results)) for core in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    epochs = dict(results.get() for _ in members)
    seconds = time.time() - began
    for worker in workers:
        worker.join()
    print(json.dumps({"seconds": seconds, "epochs": epochs}))


def _work(folder: Path, core: int, tasks: Any, results: Any) -> None:
    os.sched_setaffinity(0, {core})
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    sys.path.insert(0, str(folder))
    from digits import input_fn, model_fn

    (x, y), held_out = input_fn(None)
    while (member := tasks.get()) is not None:
        keras.utils.set_random_seed(member.seed)
        rule = member.stop
        stop = keras.callbacks.EarlyStopping(rule.metric, patience=rule.patience, mode=rule.mode)
        fitted = model_fn(dict(member.config)).fit(
            *(x, y, member.batch_size, rule.max_epochs),
            **{"verbose": 0, "callbacks": [stop], "validation_data": held_out},
        )
        results.put((member.name, len(fitted.epoch)))
        keras.backend.clear_session()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
