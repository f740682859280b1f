"""Reports of commands as events, and what the next start finds of them."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.model.ensemble import COMMAND, Ensemble, Functions, Member
from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.searches import PruneRule, SearchSpec
from hetctl.model.training_settings import KeepSettings
from hetctl.runtime.worker.messages import RUN_COMMAND, TaskMessage, TrainingSpec
from hetctl.runtime.worker.scripts.best_copies import PREDICTIONS, copied_epochs
from hetctl.runtime.worker.scripts.command_training import EpochReports, reported
from hetctl.storage.event_files import EventWriter, read_events

MEMBER = Member("a", command=("train",))


@pytest.fixture
def task(tmp_path):
    ensemble = Ensemble("own", COMMAND, Functions("", ""), (MEMBER,), str(tmp_path))
    allocation = Allocation("a", 1, DATA_PARALLEL, 100.0, (Placement("n1", (0,)),))
    (tmp_path / "events").mkdir()
    spec = TrainingSpec("own-001", "own-001", 0, ensemble, allocation, str(tmp_path), time.time() + 60, ())
    return TaskMessage(RUN_COMMAND, str(tmp_path), "a", spec)


@pytest.fixture
def reports(task):
    return EpochReports(task.training, EventWriter(task.events, task.name, 0), {})


def told(reports, **line):
    reports.read(json.dumps(line).encode())


def events_of(task, kind):
    return [event.data for event in read_events(task.events / "a.jsonl") if event.kind == kind]


def test_the_next_start_finds_the_newest_checkpoint_that_exists(task, reports, tmp_path):
    for epoch in (1, 2, 3):
        (tmp_path / f"{epoch}.pt").touch()
        told(reports, epoch=epoch, val_loss=1.0, checkpoint=f"{epoch}.pt")
    assert reported(task)[1] == str(tmp_path / "3.pt")
    assert sorted(reported(task)[0]) == [1, 2, 3]
    (tmp_path / "3.pt").unlink()
    assert reported(task)[1] == str(tmp_path / "2.pt")
    for epoch in (1, 2):
        (tmp_path / f"{epoch}.pt").unlink()
    assert reported(task)[1] is None


def test_a_checkpoint_may_be_named_alone_but_must_exist(task, reports, tmp_path):
    told(reports, checkpoint=str(tmp_path / "none.pt"))
    (ignored,) = events_of(task, "report_ignored")
    assert "that exists" in ignored["rule"]
    assert events_of(task, "checkpoint_named") == []
    told(reports, checkpoint=str(tmp_path))
    assert events_of(task, "checkpoint_named") == [{"path": str(tmp_path), "epoch": None}]
    assert events_of(task, "epoch") == []


def test_progress_is_noted_and_is_no_epoch(task, reports):
    noted = []
    reports.note = lambda *seen: noted.append(seen)
    told(reports, epoch=1, finished=False, samples=10, loss=0.5)
    told(reports, epoch=1, finished=False, samples=60)
    assert noted == [(1, 10, 0.5), (1, 60, None)]
    assert events_of(task, "started") == events_of(task, "epoch") == events_of(task, "part") == []
    told(reports, epoch=1, samples=100, val_loss=0.5)
    (epoch,) = events_of(task, "epoch")
    # An epoch that began with the start has a rate by the reports within it.
    assert epoch["rate"] > 0
    assert reports.history[1].metrics == {"val_loss": 0.5}


def test_a_metric_within_an_epoch_is_an_event_if_the_search_prunes_by_it(task):
    search = SearchSpec("random", ("a",), {}, 3, prune=PruneRule("val_accuracy", "max"))
    spec = replace(task.training, ensemble=replace(task.training.ensemble, search=search))
    reports = EpochReports(spec, EventWriter(task.events, task.name, 0), {})
    told(reports, epoch=2, finished=False, samples=60, loss=0.5)
    told(reports, epoch=2, finished=False, samples=70, val_accuracy=0.5)
    assert events_of(task, "part") == [{"epoch": 2, "samples": 70, "metrics": {"val_accuracy": 0.5}}]


@pytest.mark.parametrize("seat", [0, 2])
def test_a_command_says_its_rate_within_the_first_epoch_once(task, seat):
    seconds = itertools.count()
    place = (Placement("localhost", (0,), seat),)
    reports = EpochReports(
        replace(
            task.training, allocation=replace(task.training.allocation, placement=place, beside=("b",) * seat)
        ),
        EventWriter(task.events, task.name, 0),
        {},
        clock=lambda: float(next(seconds)),
        busy=lambda: 0.4,
        starts_at=lambda: (0.0, 0.0),
        memory=lambda: 700,
    )
    for samples in range(100, 2100, 100):
        told(reports, epoch=1, finished=False, samples=samples)
    (timed,) = events_of(task, "rate")
    assert (timed["rate"], timed["gpus"], timed["batch_size"]) == (
        *(pytest.approx(100.0), 0 if seat else 1, MEMBER.batch_size),
    )
    # In a container the memory of a GPU in use may be that of others, too.
    (started,) = events_of(task, "first_step")
    assert started["peak_memory_bytes"] == (None if seat else 700)
    # Beside others it tells who they were, from which their slowdown is learned.
    assert (timed["busy"], timed.get("beside")) == (0.4, ["b"] * seat or None)
    told(reports, epoch=1, samples=2100, val_loss=0.5)
    (epoch,) = events_of(task, "epoch")
    assert epoch["samples"] == 2100


def test_the_best_epoch_is_copied_before_the_script_replaces_it(task, reports, tmp_path):
    losses, best = (0.5, 0.3, 0.4, 0.2), []
    for epoch, loss in enumerate(losses, start=1):
        (tmp_path / "last.pt").write_text(f"epoch {epoch}")
        told(reports, epoch=epoch, val_loss=loss, checkpoint="last.pt")
        best.append(Path(events_of(task, "best_checkpoint")[-1]["path"]).read_text())
    assert best == ["epoch 1", "epoch 2", "epoch 2", "epoch 4"]
    assert [event["epoch"] for event in events_of(task, "best_checkpoint")] == [1, 2, 4]
    assert [copy.name for copy in (tmp_path / "best-epochs").iterdir()] == ["epoch-00004"]


def test_a_folder_is_copied_without_what_lies_in_it_already(task, reports, tmp_path):
    """A script may name the folder that it was given, with its own copies in it."""
    (tmp_path / "part").mkdir()
    for epoch in (1, 2):
        (tmp_path / "part" / "weights").write_text(f"epoch {epoch}")
        told(reports, epoch=epoch, val_loss=1 / epoch, checkpoint=str(tmp_path))
    copy = Path(events_of(task, "best_checkpoint")[-1]["path"])
    assert (copy / "part" / "weights").read_text() == "epoch 2"
    assert not (copy / "best-epochs").exists()


def test_a_copy_is_whole_or_there_is_none(task, tmp_path, capfd):
    """The file changes while it is copied, and another rank is killed amid a copy."""
    checkpoint = tmp_path / "last.pt"
    writing = EventWriter(task.events, task.name, 0)
    changing = EpochReports(task.training, writing, {}, heartbeat=lambda: checkpoint.write_text("other text"))
    checkpoint.write_text("text")
    told(changing, epoch=1, val_loss=0.5, checkpoint="last.pt")
    assert "epoch 1 is not kept" in capfd.readouterr().out
    assert events_of(task, "best_checkpoint") == []

    def die():
        raise KeyboardInterrupt

    killed = EpochReports(task.training, writing, {}, heartbeat=die)
    with pytest.raises(KeyboardInterrupt):
        told(killed, epoch=1, val_loss=0.5, checkpoint="last.pt")
    after = EpochReports(task.training, writing, reported(task)[0])
    after.report_best()
    assert [event["epoch"] for event in events_of(task, "best_checkpoint")] == [None]
    told(after, epoch=2, val_loss=0.4, checkpoint="last.pt")
    assert [event["epoch"] for event in events_of(task, "best_checkpoint")] == [None, 2]


def test_predictions_of_the_best_epoch_are_kept_if_they_are_small_enough(task, tmp_path, capfd):
    member = replace(MEMBER, keep=KeepSettings(predictions=3))
    spec = replace(task.training, ensemble=replace(task.training.ensemble, members=(member,)))
    reports = EpochReports(spec, EventWriter(task.events, task.name, 0), {})
    for epoch, (loss, text) in enumerate([(0.9, "one"), (0.5, "two"), (0.7, "bad"), (0.1, "large")], 1):
        (tmp_path / "val.npz").write_text(text)
        told(reports, epoch=epoch, val_loss=loss, predictions="val.npz")
    (copy,) = copied_epochs(tmp_path, PREDICTIONS).items()
    assert (copy[0], copy[1].read_text()) == (2, "two")
    assert "5 bytes" in capfd.readouterr().out
    told(reports, epoch=5, finished=False, predictions="val.npz")
    (ignored,) = events_of(task, "report_ignored")
    assert "finished epoch" in ignored["rule"]
    assert events_of(task, "best_checkpoint") == []


def test_no_copy_is_made_for_a_member_that_keeps_no_best_epoch(task, tmp_path):
    member = replace(MEMBER, keep=KeepSettings(best=0))
    spec = replace(task.training, ensemble=replace(task.training.ensemble, members=(member,)))
    (tmp_path / "last.pt").touch()
    told(
        EpochReports(spec, EventWriter(task.events, task.name, 0), {}),
        epoch=1,
        val_loss=1,
        checkpoint="last.pt",
    )
    assert not (tmp_path / "best-epochs").exists()
