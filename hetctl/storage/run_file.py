"""``run.json``: the specification that login node and compute nodes share."""

from __future__ import annotations

import json
from pathlib import Path

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
