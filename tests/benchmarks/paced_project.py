"""Projects whose members train on digits with four paced workers, on as many slots of this machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paced_bench import hetctl

from hetctl.storage.paths import Home, RunFolder

HERE = Path(__file__).parent
MODULES = {"tensorflow": "paced_keras", "pytorch": "paced_torch"}
SHARED = (HERE / "paced_digits.py", HERE.parent / "ensembles" / "handwriting.py")
WORKERS, BATCH = 4, 32
"""Samples of each worker at the start."""
SITE = f"extends: local\ngpus_per_node: {WORKERS}\ncores_per_node: {WORKERS}\n"


@dataclass(frozen=True)
class PacedProject:
    """An ensemble with a member for each config, ``s0``, ``s1``, ..

    Parameters
    ----------
    balance : str
        Key `balance` of the ensemble's file.
    stop : mapping
        Key `stop`; has `max_epochs`.
    """

    framework: str
    train_fn: str
    balance: str
    stop: Mapping[str, Any]
    configs: Sequence[Mapping[str, Any]]

    def train(self, folder: Path) -> RunFolder:
        """Train the members one after another; return the folder of the run."""
        module = MODULES[self.framework]
        for file in (HERE / f"{module}.py", *SHARED):
            shutil.copy(file, folder)
        functions = {"input_fn": "paced_digits:input_fn", "model_fn": f"{module}:model_fn"}
        functions["train_fn"] = f"{module}:{self.train_fn}"
        members = [{"name": f"s{n}", "config": config} for n, config in enumerate(self.configs)]
        (folder / "ensemble.yaml").write_text(
            f"name: paced\nframework: {self.framework}\nrescale_learning_rate: false\n"
            f"functions: {json.dumps(functions)}\nbatch_size: {BATCH}\nbalance: {self.balance}\n"
            f"stop: {json.dumps(self.stop)}\nmembers: {json.dumps(members)}\n"
        )
        (folder / "site-configs").mkdir()
        (folder / "site-configs" / "lab.yaml").write_text(SITE)
        rates = [f"{m['name']},{gpus},{100 * gpus},1000\n" for m in members for gpus in (1, 2, WORKERS)]
        (folder / "rates.csv").write_text(f"member,gpus,rate,samples\n{''.join(rates)}")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HETCTL_")}
        environment = {**kept, "HETCTL_SITE": "lab"}
        hetctl(folder, environment, "profile", "import", "rates.csv")
        size = ("--gpus", str(WORKERS), "--time", "20m", "--planner", f"fixed-{WORKERS}")
        hetctl(folder, environment, "submit", *size, "--wait")
        return Home(folder / ".hetctl").run("paced-001")
