"""Epochs of a run in a tracker, forwarded from its events by commands of the login side.

Jobs forward nothing: compute nodes need no network for it. What a tracker has it is asked itself, so that a
command that was killed, or two at a time, send nothing twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hetctl.app.project import Project
from hetctl.catalog.lock import ProjectLock
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError, LockedError
from hetctl.model.interpreter import load_entry
from hetctl.model.job import FAILED, FINISHED, UNDER_WAY
from hetctl.model.run import RunSpec
from hetctl.model.training_progress import EpochResult, Progress
from hetctl.model.values import dataclass
from hetctl.runtime.data.sharing.node_folder import run_key
from hetctl.storage.atomic_io import write_private
from hetctl.storage.run_files import read_spec
from hetctl.storage.run_state import RunState

TRACKERS = {
    "mlflow": "hetctl.app.run.track_mlflow:MlflowTracker",
    "wandb": "hetctl.app.run.track_wandb:WandbTracker",
}
"""Subclasses of `Tracker` by the names of their packages."""
GOES_ON, DONE, BROKEN, LEFT = "RUNNING", "FINISHED", "FAILED", "KILLED"
"""States of runs and members, in the words of MLflow."""


@dataclass(frozen=True)
class TrackedMember:
    """Member of a run, with its config as parameters and its finished epochs."""

    name: str
    params: Mapping[str, Any]
    epochs: Sequence[EpochResult]
    state: str


@dataclass(frozen=True)
class TrackedRun:
    """Run with its members; `key` distinguishes it from the runs of all other projects."""

    key: str
    name: str
    ensemble: str
    params: Mapping[str, Any]
    state: str
    members: Sequence[TrackedMember]


class Tracker(Protocol):
    """Program that shows runs, with what it has of the project in a folder.

    Attributes
    ----------
    target : str
        The tracker and its place, for messages.
    """

    target: str

    def __init__(self, folder: Path) -> None: ...

    def send(self, run: TrackedRun, sent: Mapping[str, int]) -> None:
        """Send what it lacks.

        Parameters
        ----------
        sent : mapping of str to int
            Epochs by member that the last command is known to have sent.
        """


class Forwarder:
    """Forwarding of one run's epochs, for a command that may look at the run repeatedly."""

    def __init__(self, project: Project, run: str) -> None:
        self._project, self._folder = project, project.home.run(run)
        self._spec = read_spec(self._folder)
        self._state: RunState | None = None
        self._tracker: Tracker | None = None
        self._warned = ""

    def send(self, state: str) -> str:
        """Send what is new; return a warning if the tracker takes nothing at present, once, or an empty text.

        Parameters
        ----------
        state : str
            State of the run, as in `RunStatus`.
        """
        self._state = self._state or RunState(self._folder, self._spec.ensemble, self._spec.retries)
        self._state.refresh()
        run = _tracked(self._spec, self._state, state)
        self._tracker = self._tracker or load_entry(TRACKERS[self._spec.track])(self._project.folder)
        target = self._tracker.target
        now = {"target": target, "state": run.state, "epochs": {m.name: len(m.epochs) for m in run.members}}
        if self._sent(target) == now:
            return ""
        try:
            with ProjectLock(self._folder.tracking_lock, "hetctl: tracking"):
                self._tracker.send(run, self._sent(target).get("epochs", {}))
                write_private(self._folder.tracking, json.dumps(now), durable=False)
        except LockedError:
            # Another command is sending the same.
            return ""
        except BadInputError:
            raise
        # Clients of services raise errors of any kind.
        except Exception as error:
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            warning = f"{target} took nothing: {text}; the next command sends what it lacks"
            told, self._warned = self._warned, warning
            return "" if told == warning else warning
        self._warned = ""
        return ""

    def _sent(self, target: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._folder.tracking.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if found.get("target") == target else {}


def _tracked(spec: RunSpec, state: RunState, run_state: str) -> TrackedRun:
    under_way = run_state in UNDER_WAY
    names = {FINISHED: DONE, FAILED: BROKEN}
    return TrackedRun(
        key=run_key(spec.run, spec.checkpoints),
        name=spec.run,
        ensemble=spec.ensemble.name,
        params={"site": spec.site.name, "planner": spec.planner, "gpus": spec.gpus, "mode": spec.mode},
        state=GOES_ON if under_way else names.get(run_state, LEFT),
        members=tuple(_members(spec.ensemble, state, under_way=under_way)),
    )


def _members(ensemble: Ensemble, state: RunState, *, under_way: bool) -> list[TrackedMember]:
    trials = state.facts.trials
    return [
        TrackedMember(
            member.name,
            {
                **(trials[member.name].record.config if member.name in trials else member.config),
                "seed": member.seed,
                "batch_size": member.batch_size,
            },
            progress.epochs,
            _state_of(progress, under_way=under_way),
        )
        for member in ensemble.members
        # A member, or a trial, that has not begun is not shown.
        if (progress := state.progress[member.name]).epochs or progress.failed
    ]


def _state_of(progress: Progress, *, under_way: bool) -> str:
    if progress.failed:
        return BROKEN
    if progress.converged:
        return DONE
    return GOES_ON if under_way else LEFT
