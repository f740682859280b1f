"""What TensorBoard reads is what was written, over several rounds; without it nothing is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hetctl.core.profile import EpochResult
from hetctl.runtime.board import Board

READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
tags = events.Tags()["scalars"]
print(json.dumps({tag: [[e.step, round(e.value, 6)] for e in events.Scalars(tag)] for tag in tags}))
"""


def result(epoch, gpus=2):
    return EpochResult(epoch, {"loss": 1 / epoch, "val_accuracy": 0.5}, 4.0, gpus, 1000.0 + epoch)


def test_epochs_of_several_rounds_are_read_as_one_course(tmp_path):
    pytest.importorskip("tensorboard")
    first, second = Board(tmp_path / "b", 200), Board(tmp_path / "b", 200)
    first.show(result(1))
    first.show(result(2))
    second.show(result(3, gpus=4))
    read = subprocess.run([sys.executable, "-c", READ, str(tmp_path / "b")], capture_output=True, text=True)
    assert json.loads(read.stdout) == {
        "loss": [[1, 1.0], [2, 0.5], [3, 0.333333]],
        "val_accuracy": [[1, 0.5], [2, 0.5], [3, 0.5]],
        "samples/s": [[1, 50.0], [2, 50.0], [3, 50.0]],
        "gpus": [[1, 2.0], [2, 2.0], [3, 4.0]],
    }
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "b").iterdir()} == {0o600}


def test_without_tensorboard_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    Board(tmp_path / "b", 200).show(result(1))
    assert list(tmp_path.iterdir()) == []


def test_no_framework_is_imported_for_it():
    code = "import sys; from pathlib import Path; from hetctl.runtime.board import Board;"
    code += "from hetctl.core.profile import EpochResult; import tempfile;"
    code += "Board(Path(tempfile.mkdtemp()), 1).show(EpochResult(1, {}, 1.0, 1, 0.0)); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"tensorflow", "torch"} & set(done.stdout.split())
