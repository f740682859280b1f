"""Real training on collated samples and on shards: stops and kills, on one rank and on two."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import numpy as np
import pytest
from ensembles.sequences import HELD_OUT, SAMPLES, WRITERS, write_shards
from resumed_ranks import TO_THE_END, train_in_parts
from workbench import TINY, alive, new_project, wait_for

from hetctl.model.ensemble import Functions, Member, StopRule
from hetctl.storage.progress_fold import events_in

pytestmark = pytest.mark.training
NAMES = {"tensorflow": "keras", "pytorch": "torch"}
BATCH, EPOCHS = 12, 2
KILLED_AT = {1: 14, 2: 9}
"""Step in the middle of the second epoch, by the number of GPUs."""
RUN = "sequences-001"


@pytest.mark.parametrize("framework", NAMES)
def test_stops_change_no_bit(tmp_path, framework):
    functions = Functions("sequences:input_fn", f"sequences:{NAMES[framework]}_model_fn")
    member = Member("m", {}, BATCH, 5, StopRule("val_loss", max_epochs=EPOCHS))
    how = framework, functions, member, 1
    whole, (results,) = train_in_parts(tmp_path / "whole", *how, (TO_THE_END,))
    parts, (others,) = train_in_parts(tmp_path / "parts", *how, (4, TO_THE_END))
    assert whole.keys() == parts.keys()
    for name, array in whole.items():
        assert np.array_equal(array, parts[name]), name
    assert [r["val_loss"] for r in results] == [r["val_loss"] for r in others]
    assert results[1]["loss"] < results[0]["loss"]


def test_two_ranks_evaluate_as_one(tmp_path):
    """With a rate of 0, all have the same weights; chunks of validation samples are divided unevenly."""
    functions = Functions("sequences:input_fn", "sequences:torch_model_fn")
    found = []
    for gpus, rows in ((1, HELD_OUT), (2, 9)):
        member = Member(
            "m", {"still": True}, BATCH, 5, StopRule("val_loss", max_epochs=1), validation_batch_size=rows
        )
        _, metrics = train_in_parts(tmp_path / f"{gpus}", "pytorch", functions, member, gpus, (TO_THE_END,))
        found.append(metrics[0][0])
    assert found[1]["val_loss"] == pytest.approx(found[0]["val_loss"], rel=1e-5)
    assert found[1]["val_accuracy"] == pytest.approx(found[0]["val_accuracy"], rel=1e-6)


def project_of(folder, gpus, kind):
    functions = {
        "input_fn": "sequences:input_fn",
        "model_fn": "sequences:torch_model_fn",
        "train_fn": "sequences:noting_train_fn",
    }
    member = {"name": "a", "gpus": gpus, "config": {"killed_at": KILLED_AT[gpus], "folder": str(folder)}}
    ensemble = {
        "name": "sequences",
        "framework": "pytorch",
        "functions": functions,
        "data": data_of(folder, kind),
        "batch_size": BATCH,
        # Each awaits the one before, so that the last but one is there at the kill.
        "checkpoint": {"every": "1 steps"},
        "stop": {"metric": "val_loss", "max_epochs": EPOCHS, "patience": EPOCHS},
        "members": [member],
    }
    project = new_project(folder / "project", json.dumps(ensemble), environment={"HETCTL_SITE": "local"})
    shutil.copy(TINY / "sequences.py", project.path)
    (project.path / "rates.csv").write_text(f"member,gpus,rate,samples\na,{gpus},1000,{SAMPLES * EPOCHS}\n")
    assert project.here("profile", "import", "rates.csv").code == 0
    return project


def data_of(folder, kind):
    """Return the argument of input_fn, with shards where the kind has them."""
    if kind not in WRITERS:
        return f"kind://{kind}"
    write_shards(folder / kind)
    return str(folder / kind)


def seen_by(folder, gpus):
    """The samples of each step as it was trained last, and those of steps that were trained again."""
    kept, repeated = {}, {}
    for rank in range(gpus):
        for line in (folder / f"seen-{rank}").read_text().splitlines():
            epoch, step, *numbers = map(int, line.split())
            place = epoch, step, rank
            if place in kept:
                repeated[place] = kept[place]
            kept[place] = numbers
    return kept, repeated


@pytest.mark.parametrize(("gpus", "kind"), [(1, "huggingface"), (2, "map-style"), (2, "webdataset")])
def test_a_killed_member_goes_on_to_the_sample(tmp_path, gpus, kind):
    project = project_of(tmp_path, gpus, kind)
    done = project.here("submit", "--gpus", str(gpus), "--wait", "--json")
    assert done.code == 0, (done, project.home.run(RUN).log_of("a").read_text())
    assert (tmp_path / "killed").exists()
    starts = [event.data for event in events_in(project.home.run(RUN)) if event.kind == "started"]
    assert len(starts) == 2
    assert starts[1]["part_samples"] > 0
    kept, repeated = seen_by(tmp_path, gpus)
    for epoch in range(1, EPOCHS + 1):
        numbers = [n for (there, *_), numbers in kept.items() if there == epoch for n in numbers]
        assert Counter(numbers) == Counter(range(SAMPLES)), epoch
    assert repeated
    assert all(kept[place] == numbers for place, numbers in repeated.items())
    wait_for(lambda: not alive(str(project.path)))
