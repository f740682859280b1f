"""The same ASHA, on the same configs, by Ray Tune and by Optuna with a pool of processes.

python tests/benchmarks/search_rivals.py ray|optuna FILE

FILE has ``{"configs", "workers", "rungs": [first, eta, last], "folder"}``; each epoch's end is a line of
``FOLDER/epochs.jsonl``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from search_trainable import loss_after, pace

Task = Mapping[str, Any]


def note(folder: str, trial: int, epoch: int, began: float) -> None:
    """Append the end of an epoch; lines of this length are written whole."""
    line = json.dumps({"trial": trial, "epoch": epoch, "time": time.time(), "seconds": time.time() - began})
    with Path(folder, "epochs.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def train_epoch(task: Task, trial: int, epoch: int) -> float:
    """Train an epoch of a trial; return its loss."""
    config, began = task["configs"][trial], time.time()
    pace(config, time.monotonic())
    note(task["folder"], trial, epoch, began)
    return loss_after(config, epoch)


def by_ray(task: Task) -> None:
    """Search with Ray Tune's ASHAScheduler, which ends trials at their rungs or goes on with them."""
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    first, eta, last = task["rungs"]

    def trainable(config: dict[str, int]) -> None:
        for epoch in range(1, last + 1):
            tune.report({"loss": train_epoch(task, config["trial"], epoch)})

    ray.init(num_cpus=task["workers"], include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    scheduler = ASHAScheduler(
        time_attr="training_iteration", max_t=last, grace_period=first, reduction_factor=eta, brackets=1
    )
    tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space={"trial": tune.grid_search(list(range(len(task["configs"]))))},
        tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=f"{task['folder']}/ray", verbose=0),
    ).fit()
    ray.shutdown()


def by_optuna(task: Task) -> None:
    """Search with Optuna's SuccessiveHalvingPruner, which ends trials at their rungs or goes on."""
    with multiprocessing.get_context("spawn").Pool(task["workers"]) as pool:
        _study(task, create=True)
        pool.map(_optimize, [(task, worker) for worker in range(task["workers"])], chunksize=1)


def _study(task: Task, *, create: bool = False) -> Any:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    first, eta, _ = task["rungs"]
    storage = JournalStorage(JournalFileBackend(f"{task['folder']}/journal.log"))
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=eta)
    kinds = {"study_name": "s", "storage": storage, "pruner": pruner}
    if not create:
        return optuna.load_study(**kinds)
    study = optuna.create_study(**kinds)
    for trial in range(len(task["configs"])):
        study.enqueue_trial({"trial": trial})
    return study


def _optimize(order: tuple[Task, int]) -> None:
    import optuna

    task, _ = order
    configs = task["configs"]

    def objective(trial: Any) -> float:
        number, loss = trial.suggest_int("trial", 0, len(configs) - 1), 0.0
        for epoch in range(1, task["rungs"][2] + 1):
            loss = train_epoch(task, number, epoch)
            trial.report(loss, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return loss

    study = _study(task)
    # The pool begins no more trials than were enqueued; each process may begin one that has just been taken.
    from optuna.study import MaxTrialsCallback
    from optuna.trial import TrialState

    ended = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
    study.optimize(objective, callbacks=[MaxTrialsCallback(len(configs), states=ended)])


RIVALS = {"ray": by_ray, "optuna": by_optuna}

if __name__ == "__main__":
    os.environ["RAY_DEDUP_LOGS"] = "0"
    RIVALS[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
