"""``hetctl partition``: partitions of the user's data, made by the real command in its own process."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import yaml
from workbench import ProjectFolder

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.partitions import read
from hetctl.runtime.data.partitioned_data import load_partitions
from hetctl.runtime.worker.user_functions import load_functions

SAMPLES, HELD_OUT = 103, 11
ENSEMBLE = """\
name: parted
functions: {{input_fn: {module}:input_fn, model_fn: {module}:model_fn}}
members: [{{name: a}}]
{more}
"""
MODULE = """\
import numpy as np
from hetctl import partitions
from hetctl.images import ImageFolder, scale
from hetctl.samples import Collated

class Rows:
    def __init__(self, samples):
        self.samples = samples
    def __len__(self):
        return self.samples
    def __getitem__(self, number):
        return np.full(3, number, np.float32), number

def arrays(samples):
    y = np.arange(samples)
    return np.stack([y, y, y], axis=1).astype(np.float32), y

def input_fn(data, path=None):
    if path is not None:
        return partitions.read(path)
    print("samples are read")
    return {returned}

def model_fn(config): ...
"""
ARRAYS = f"arrays({SAMPLES}), arrays({HELD_OUT})"
KEYS = {
    "schema_version", "ensemble", "folder", "seed", "samples", "validation_samples", "files", "written",
    "partitions",
}  # fmt: skip


def project_of(tmp_path, returned=ARRAYS, more=""):
    """Make a project; a module of the same name from another test would stay imported in this process."""
    module = f"nets_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]}"
    (tmp_path / f"{module}.py").write_text(MODULE.format(returned=returned))
    (tmp_path / "ensemble.yaml").write_text(ENSEMBLE.format(module=module, more=more))
    return ProjectFolder(tmp_path)


@pytest.mark.parametrize("returned", [ARRAYS, f"Rows({SAMPLES}), Rows({HELD_OUT})"], ids=["arrays", "rows"])
def test_partitions_have_each_sample_once(tmp_path, returned):
    project = project_of(tmp_path, returned)
    done = project.here("partition", "partitions", "--count", "4", "--seed", "5", "--json")
    made = done.json
    assert (done.code, set(made), made["written"]) == (0, KEYS, [0, 1, 2, 3])
    assert (made["samples"], made["validation_samples"], made["seed"]) == (SAMPLES, HELD_OUT, 5)
    pairs = [read(tmp_path / "partitions" / f"{number}.npz") for number in range(4)]
    for pair, partition in zip(pairs, made["files"], strict=True):
        assert [len(y) for _, y in pair] == [partition["samples"], partition["validation_samples"]]
        for x, y in pair:
            np.testing.assert_array_equal(x, np.stack([y, y, y], axis=1))
    for index, samples in enumerate((SAMPLES, HELD_OUT)):
        assert sorted(np.concatenate([pair[index][1] for pair in pairs]).tolist()) == list(range(samples))
    for number, partition in enumerate(made["files"]):
        content = (tmp_path / "partitions" / f"{number}.npz").read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        assert (len(content), digest) == (partition["bytes"], partition["sha256"])
    manifest = json.loads((tmp_path / "partitions" / "partitions.json").read_text())
    assert manifest == {"seed": 5, "partitions": made["files"]}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "partitions").iterdir())


def test_people_see_partitions_and_lines_for_their_file(tmp_path):
    project = project_of(tmp_path)
    done = project.hetctl("partition", "partitions", "--count", "4")
    assert done.code == 0
    table, _, lines = done.stdout.partition("for the ensemble file:\n")
    assert [line.split()[:3] for line in table.splitlines()[2:6]] == [
        ["0", "26", "3"], ["1", "26", "3"], ["2", "26", "3"], ["3", "25", "2"],
    ]  # fmt: skip
    assert "samples are read" in done.stderr
    assert yaml.safe_load(lines)["samples_per_epoch"] == SAMPLES
    (tmp_path / "ensemble.yaml").write_text((tmp_path / "ensemble.yaml").read_text() + lines)
    ensemble = read_ensemble(tmp_path / "ensemble.yaml")
    data = load_partitions(ensemble.partitions, None, load_functions(ensemble).input_fn)
    assert sum(len(source) for source in data.training.values()) == SAMPLES


def test_replicas_are_lines_that_copy_to_so_many_nodes(tmp_path):
    project = project_of(tmp_path)
    done = project.here("partition", "partitions", "--count", "4", "--replicas", "2")
    lines = done.stdout.partition("for the ensemble file:\n")[2]
    (tmp_path / "ensemble.yaml").write_text((tmp_path / "ensemble.yaml").read_text() + lines)
    partitions = read_ensemble(tmp_path / "ensemble.yaml").partitions
    assert (partitions.count, partitions.replicas) == (4, 2)
    assert partitions.sources() == tuple(str(tmp_path / "partitions" / f"{n}.npz") for n in range(4))
    assert partitions.paths() == tuple(f"$TMPDIR/partitions/{n}.npz" for n in range(4))


def test_what_is_there_is_kept_and_damage_repaired(tmp_path):
    project = project_of(tmp_path, more="partitions: 4")
    assert project.here("partition", "partitions").code == 0
    partitions = tmp_path / "partitions"
    before = {path.name: path.read_bytes() for path in partitions.iterdir()}
    (partitions / "1.npz").unlink()
    (partitions / "2.npz").write_bytes(before["2.npz"][:-1] + b"?")
    (partitions / "partitions.json").touch()
    kept = (partitions / "3.npz").stat()
    done = project.here("partition", "partitions", "--json")
    assert (done.code, done.json["written"]) == (0, [1, 2])
    assert {path.name: path.read_bytes() for path in partitions.iterdir()} == before
    assert (partitions / "3.npz").stat().st_mtime_ns == kept.st_mtime_ns
    (partitions / "partitions.json").unlink()
    assert project.here("partition", "partitions", "--json").json["written"] == []
    assert {path.name: path.read_bytes() for path in partitions.iterdir()} == before


def test_an_interrupted_division_goes_on(tmp_path):
    project = project_of(tmp_path)
    whole = project.here("partition", "partitions", "--count", "3", "--json").json
    for name in ("partitions.json", "2.npz"):
        (tmp_path / "partitions" / name).unlink()
    again = project.here("partition", "partitions", "--count", "3", "--json").json
    assert again == {**whole, "written": [2]}


@pytest.mark.parametrize(
    ("returned", "arguments", "message"),
    [
        (ARRAYS, ("--count", "12"), "11 validation samples cannot be divided into 12 partitions"),
        (ARRAYS, (), "has no `partitions`"),
        (ARRAYS, ("--count", "0"), "0 is not in the range"),
        ("7", ("--count", "2"), "input_fn returned int, not (training, validation)"),
        ("1 / 0", ("--count", "2"), "ZeroDivisionError: division by zero ("),
        ("open('gone')", ("--count", "2"), "FileNotFoundError: [Errno 2]"),
        ("([None] * 9, arrays(9)[1]), arrays(9)", ("--count", "2"), "object, which has no fixed size"),
        ("(arrays(9)[0], arrays(8)[1]), arrays(9)", ("--count", "2"), "9 training inputs and 8 targets"),
        ("ImageFolder('.', augment=scale), arrays(9)", ("--count", "2"), "an augment, which arrays cannot"),
        ("Collated([7, 8], lambda y: (y, y)), arrays(9)", ("--count", "2"), "training have a collate_fn"),
        ("exit(3)", ("--count", "2"), "ended with code 3"),
    ],
)
def test_wrong_input_is_refused_and_nothing_written(tmp_path, returned, arguments, message):
    project = project_of(tmp_path, returned)
    if "ImageFolder" in returned:
        pillow = pytest.importorskip("PIL.Image")
        (tmp_path / "class").mkdir()
        pillow.new("RGB", (8, 8)).save(tmp_path / "class" / "0.png")
    before = project.tree()
    done = project.here("partition", "partitions", *arguments, "--json")
    assert done.code == (1 if "exit" in returned else 2)
    assert message in done.error["message"]
    assert project.tree() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--count", "3"), "has 4 partitions, not 3"),
        (("--count", "4", "--seed", "1"), "has partitions of seed 0, not 1"),
    ],
)
def test_a_folder_of_other_partitions_stays_as_it_is(tmp_path, arguments, message):
    project = project_of(tmp_path)
    assert project.here("partition", "partitions", "--count", "4").code == 0
    refused(project, arguments, message)


def test_partitions_of_other_data_stay_as_they_are(tmp_path):
    project = project_of(tmp_path)
    assert project.here("partition", "partitions", "--count", "4").code == 0
    project_of(tmp_path, f"arrays({SAMPLES}), arrays({HELD_OUT} - 1)")
    refused(project, ("--count", "4"), "has partitions of other data than input_fn returns now")
    (tmp_path / "partitions" / "partitions.json").unlink()
    refused(project, ("--count", "4"), "has 0.npz, which is no partition of these data")


def refused(project, arguments, message):
    before = project.tree()
    done = project.here("partition", "partitions", *arguments, "--json")
    assert (done.code, done.error["hint"]) == (2, "choose another folder, or delete this one first")
    assert message in done.error["message"]
    assert project.tree() == before


def test_samples_that_change_are_refused(tmp_path):
    project = project_of(tmp_path, f"Rows({SAMPLES}), Rows({HELD_OUT})")
    module = next(tmp_path.glob("nets_*.py"))
    module.write_text(module.read_text().replace("np.full(3, number", "np.full(3, np.random.rand()"))
    done = project.here("partition", "partitions", "--count", "2", "--json")
    assert done.code == 2
    assert "the samples of partition 0 were others when they were read again" in done.error["message"]
    assert list((tmp_path / "partitions").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    project = project_of(tmp_path)
    (tmp_path / "file").touch()
    done = project.here("partition", "file/partitions", "--count", "2", "--json")
    wanted = f"the partitions cannot be written to {tmp_path}/file/partitions: Not a directory"
    assert (done.code, done.error["message"]) == (2, wanted)


def test_a_broken_manifest_is_refused(tmp_path):
    (tmp_path / "partitions").mkdir()
    (tmp_path / "partitions" / "partitions.json").write_text("{}")
    done = project_of(tmp_path).here("partition", "partitions", "--count", "2", "--json")
    assert (done.code, done.error["hint"]) == (2, "delete it; `hetctl partition` writes it anew")


def test_a_step_for_each_member_copies_no_partitions(tmp_path):
    partitions = "{count: 2, path: '/d/{partition}.npz', source: '/s/{partition}.npz'}"
    project = project_of(tmp_path, more=f"samples_per_epoch: 9\npartitions: {partitions}")
    done = project.here("plan", "--site", "local", "--launch", "members", "--json")
    assert done.code == 2
    assert "parted: partitions.source does not go with --launch members" in done.error["message"]
