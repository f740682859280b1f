"""Members of runs as runs of Weights & Biases, in files that ``wandb sync`` uploads from any machine.

Weights & Biases appends to a run only while one process goes on. So a member is written once it trains no
more, whole, with all its epochs; if it goes on later, its files are replaced when it ends again.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import wandb

from hetctl.app.run.tracking import BROKEN, GOES_ON, TrackedMember, TrackedRun

FOLDER, KNOWN = "wandb", "hetctl.json"
"""Folder in the project's, and the file in each of its runs with what hetctl has written there."""


class WandbTracker:
    """Runs of Weights & Biases in a project's folder; nothing is uploaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self.target = f"Weights & Biases in {self._folder}"

    def send(self, run: TrackedRun, _sent: Mapping[str, int]) -> None:
        """Write the members that have ended since."""
        for member in run.members:
            known = {"epochs": len(member.epochs), "state": member.state}
            if member.state != GOES_ON and known not in map(_known, self._written(_id(run, member))):
                self._write(run, member, known)

    def _written(self, key: str) -> list[Path]:
        return list(self._folder.glob(f"offline-run-*-{key}"))

    def _write(self, run: TrackedRun, member: TrackedMember, known: Mapping[str, Any]) -> None:
        key = _id(run, member)
        self._folder.mkdir(exist_ok=True)
        with TemporaryDirectory(prefix=".hetctl-", dir=self._folder) as unfinished:
            shown = wandb.init(
                project=run.ensemble,
                group=run.name,
                name=member.name,
                id=key,
                config={**run.params, **member.params},
                mode="offline",
                dir=unfinished,
                reinit="finish_previous",
                settings=wandb.Settings(
                    silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True
                ),
            )
            for done in member.epochs:
                own = {"duration_s": done.duration_s, "rate": done.rate, "gpus": done.gpus}
                values = {**done.metrics, **own, "_timestamp": done.finished_at}
                finite = {
                    name: each for name, each in values.items() if each is not None and math.isfinite(each)
                }
                shown.log(finite, step=done.epoch)
            shown.finish(exit_code=int(member.state == BROKEN))
            (made,) = Path(unfinished, FOLDER).glob(f"offline-run-*-{key}")
            (made / KNOWN).write_text(json.dumps(known), encoding="utf-8")
            # It may have the same name. If this command is killed here, another one writes it.
            for outdated in self._written(key):
                shutil.rmtree(outdated)
            made.rename(self._folder / made.name)


def _id(run: TrackedRun, member: TrackedMember) -> str:
    """Return the id of a member's run, the same in each command."""
    return hashlib.sha256(f"{run.key}/{member.name}".encode()).hexdigest()[:16]


def _known(folder: Path) -> Any:
    try:
        return json.loads((folder / KNOWN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
