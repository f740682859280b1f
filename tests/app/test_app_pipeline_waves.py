"""Staleness of a run's pipelines beside the bounds of the layouts that they had."""

from __future__ import annotations

import json
from dataclasses import replace

from pipelined_run import ALONE, LAYOUT, task_started

from hetctl.app.pipeline import read_waves, wave_checks
from hetctl.model.events import DRIVER
from hetctl.model.pipelines import WaveRecord
from hetctl.model.serialization import encode
from hetctl.runtime.stages.pipeline_trainer import WaveRecorder
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import RunFolder

RECORD = WaveRecord(1, 0, 0, 0, 4, (1, 3, 4), (0, 0, 0))
OTHER = WaveRecord(1, 0, 0, 1, 3, (1, 2), (0, 1))


def run_with(tmp_path, *layouts):
    """Return the folder of a run with a round for each layout."""
    folder = RunFolder(tmp_path)
    folder.create()
    for number, layout in enumerate(layouts):
        EventWriter(folder.events, DRIVER, number).write("task_started", **task_started(layout))
    return folder


def found_in(folder):
    return [
        (one.in_flight, one.minibatches, one.local, one.overall, len(one.violations))
        for one in wave_checks(folder)
    ]


def test_each_layout_has_bounds_of_its_own(tmp_path):
    folder = run_with(tmp_path, LAYOUT, replace(LAYOUT, in_flight=2, distance=0))
    for number in (0, 1):
        WaveRecorder(folder.waves / "a-000.jsonl", number).write(RECORD)
    (short, long) = wave_checks(folder)
    assert (short.local_bound, short.overall_bound) == (1, 2)
    assert (long.local_bound, long.overall_bound) == (2, 7)
    assert found_in(folder) == [(2, 3, 2, 5, 4), (3, 3, 2, 5, 0)]
    assert "minibatch 4" in short.violations[0]


def test_a_single_virtual_worker_misses_nothing_of_others(tmp_path):
    folder = run_with(tmp_path, ALONE)
    WaveRecorder(folder.waves / "a-000.jsonl", 0).write(replace(RECORD, pulled=(0, 1, 1)))
    assert found_in(folder) == [(3, 3, 2, None, 0)]


def test_records_without_a_layout_and_other_modes_are_left_out(tmp_path):
    folder = run_with(tmp_path, None)
    WaveRecorder(folder.waves / "a-000.jsonl", 0).write(RECORD)
    assert found_in(folder) == []


def test_the_records_of_all_ranks_of_a_member_are_read(tmp_path):
    folder = RunFolder(tmp_path)
    WaveRecorder(folder.waves / "a-000.jsonl", 0).write(RECORD)
    WaveRecorder(folder.waves / "a-001.jsonl", 0).write(OTHER)
    WaveRecorder(folder.waves / "a-000-000.jsonl", 0).write(OTHER)
    assert list(read_waves(folder, "a")) == [RECORD, OTHER]
    assert list(read_waves(folder, "a-000")) == [OTHER]
    assert list(read_waves(folder, "b")) == []


def test_damaged_lines_of_a_log_are_left_out(tmp_path):
    folder = RunFolder(tmp_path)
    folder.waves.mkdir()
    unequal = json.dumps(encode(RECORD) | {"pulled": [0]})
    log = folder.waves / "a-000.jsonl"
    log.write_text(f'{unequal}\n[]\n\xff\n{{"epoch": "x"}}\n{{"epoch": 1, "pos', encoding="latin-1")
    WaveRecorder(log, 0).write(RECORD)
    assert list(read_waves(folder, "a")) == [RECORD]
