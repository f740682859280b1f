"""Logs of pipelines, as they are read back from the files of all ranks."""

from __future__ import annotations

import json

from hetctl.app.run.wave_checks import read_waves
from hetctl.model.pipelines import WaveRecord
from hetctl.model.serialization import encode
from hetctl.runtime.stages.stage_training import WaveRecorder
from hetctl.storage.paths import RunFolder

RECORD = WaveRecord(1, 0, 0, 0, 1, (0, 0), (0, 0))
LATER = WaveRecord(1, 0, 0, 1, 3, (1, 2), (0, 1))


def test_the_records_of_all_ranks_of_a_member_are_read(tmp_path):
    folder = RunFolder(tmp_path)
    WaveRecorder(folder.waves / "a-000.jsonl", 0).write(RECORD)
    WaveRecorder(folder.waves / "a-001.jsonl", 0).write(LATER)
    WaveRecorder(folder.waves / "a-000-000.jsonl", 0).write(LATER)
    assert list(read_waves(folder, "a")) == [RECORD, LATER]
    assert list(read_waves(folder, "a-000")) == [LATER]
    assert list(read_waves(folder, "b")) == []


def test_damaged_lines_of_a_log_are_left_out(tmp_path):
    folder = RunFolder(tmp_path)
    folder.waves.mkdir()
    unequal = json.dumps(encode(RECORD) | {"pulled": [0]})
    log = folder.waves / "a-000.jsonl"
    log.write_text(f'{unequal}\n[]\n\xff\n{{"epoch": "x"}}\n{{"epoch": 1, "pos', encoding="latin-1")
    WaveRecorder(log, 0).write(RECORD)
    assert list(read_waves(folder, "a")) == [RECORD]
