"""TensorBoard reads the epochs of several rounds; without the package nothing is written."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pipelined_run import STAGES

from hetctl.model.training_progress import EpochResult, RankShare
from hetctl.runtime.worker.tensorboard import TensorBoardWriter, rank_figures, stage_figures
from hetctl.storage.paths import tensorboard_file

# TensorBoard reads event files by itself, too, without TensorFlow, whose import takes 4 s.
READ = """
import json, sys
sys.modules["tensorflow"] = None
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
tags = events.Tags()["scalars"]
print(json.dumps({tag: [[e.step, round(e.value, 6)] for e in events.Scalars(tag)] for tag in tags}))
"""


def result(epoch, gpus=2):
    return EpochResult(epoch, {"loss": 1 / epoch, "val_accuracy": 0.5}, 4.0, gpus, 1000.0 + epoch)


def read(folder):
    done = subprocess.run([sys.executable, "-c", READ, str(folder)], capture_output=True, text=True)
    return json.loads(done.stdout)


def test_epochs_of_several_rounds_are_read_as_one_course(tmp_path):
    pytest.importorskip("tensorboard")
    path = tensorboard_file(tmp_path / "m")
    first = TensorBoardWriter(path, 200)
    first.show(result(1))
    first.show(result(2))
    TensorBoardWriter(path, 200).show(result(3, gpus=4))
    assert read(path.parent) == {
        "loss": [[1, 1.0], [2, 0.5], [3, 0.333333]],
        "val_accuracy": [[1, 0.5], [2, 0.5], [3, 0.5]],
        "samples/s": [[1, 50.0], [2, 50.0], [3, 50.0]],
        "gpus": [[1, 2.0], [2, 2.0], [3, 4.0]],
    }
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600


def test_ranks_of_a_balanced_group_have_their_batches_and_times(tmp_path):
    pytest.importorskip("tensorboard")
    path = tensorboard_file(tmp_path / "m")
    ranks = (RankShare("n1:0", 48, 0.25), RankShare("n2:0", 16, 0.5))
    TensorBoardWriter(path, 200, lambda _: rank_figures(ranks)).show(result(1))
    tags = read(path.parent)
    assert (tags["batch/n1:0"], tags["batch/n2:0"]) == ([[1, 48.0]], [[1, 16.0]])
    assert tags["step_s/n2:0"] == [[1, 0.5]]


def test_a_pipeline_has_its_shares_and_bytes_between_nodes(tmp_path):
    pytest.importorskip("tensorboard")
    path = tensorboard_file(tmp_path / "m")
    first = stage_figures(STAGES)
    TensorBoardWriter(path, 200, {1: first, 2: first | {"pipeline/idle": 0.5}}.__getitem__).show(result(2))
    tags = {tag: points for tag, points in read(path.parent).items() if tag.startswith("pipeline/")}
    assert tags == {
        "pipeline/busy": [[2, 0.8]],
        "pipeline/wave_wait": [[2, 0.2]],
        "pipeline/idle": [[2, 0.5]],
        "pipeline/bytes_between_nodes": [[2, 108.0]],
    }


@pytest.mark.parametrize("torn", [1, 13, 40, None])
def test_a_truncated_record_does_not_hide_later_ones(tmp_path, torn):
    """Only some bytes of the last record are on disk, or zeros, as after a crash of the node."""
    pytest.importorskip("tensorboard")
    path = tensorboard_file(tmp_path / "m")
    board = TensorBoardWriter(path, 200)
    board.show(result(1))
    whole = path.read_bytes()
    board.show(result(2))
    record = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + (bytes(len(record)) if torn is None else record[:torn]))
    TensorBoardWriter(path, 200).show(result(3))
    assert [step for step, _ in read(path.parent)["loss"]] == [1, 3]


class Unfit:
    """A package that was made for another version of a package that it needs."""

    def __getattr__(self, name):
        raise RuntimeError("incompatible versions of protobuf")


@pytest.mark.parametrize("module", [None, Unfit()], ids=["missing", "unfit"])
def test_a_tensorboard_that_cannot_be_imported_stops_no_training(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", module)
    TensorBoardWriter(tmp_path / "b" / "file", 200).show(result(1))
    assert list(tmp_path.iterdir()) == []


def test_no_framework_is_imported_for_it():
    code = "import sys; from pathlib import Path;"
    code += "from hetctl.runtime.worker.tensorboard import TensorBoardWriter;"
    code += "from hetctl.model.training_progress import EpochResult; import tempfile;"
    code += "path = Path(tempfile.mkdtemp(), 'file');"
    code += "TensorBoardWriter(path, 1).show(EpochResult(1, {}, 1.0, 1, 0.0)); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"tensorflow", "torch"} & set(done.stdout.split())
