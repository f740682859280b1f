"""``run.json``, which login node and compute nodes share, and ``planner.json``, the state of the planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetctl.model.run import RunSpec
from hetctl.model.serialization import decode, encode
from hetctl.storage.atomic_io import write_json
from hetctl.storage.paths import RunFolder, member_folder


def write_spec(folder: RunFolder, spec: RunSpec) -> None:
    """Write ``run.json``."""
    write_json(folder.spec, encode(spec))


def read_spec(folder: RunFolder) -> RunSpec:
    """Read ``run.json``."""
    return decode(RunSpec, json.loads(folder.spec.read_text(encoding="utf-8")))


def checkpoint_folder(spec: RunSpec, member: str) -> Path:
    """Return the folder of a member's checkpoints."""
    return member_folder(Path(spec.checkpoints), spec.run, member)


def write_planner_state(folder: RunFolder, state: Any) -> None:
    """Write ``planner.json`` if the planner's state differs from the one in the file."""
    if state != read_planner_state(folder):
        write_json(folder.planner_state, state)


def read_planner_state(folder: RunFolder) -> Any:
    """Return the planner's state at the start of the run's newest round; None if there is none."""
    if not folder.planner_state.exists():
        return None
    return json.loads(folder.planner_state.read_text(encoding="utf-8"))
