"""Whatever hetctl's own files hold, reading them gives a value or a ValueError."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

import pytest
from fuzzing import fuzzed, mutations
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.job import Job, JobState
from hetctl.model.plan import Plan
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode, parse
from hetctl.model.site import Queue, Site
from hetctl.model.training_progress import LiveMetrics
from hetctl.storage.event_files import read_events
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_files import CatalogRecord, read_live_metrics, read_record

MEMBER = Member("a", {"width": 3, "of": [1, None]}, 16, 5, StopRule("val_loss", "min", 3, max_epochs=4))
ENSEMBLE = Ensemble("e", "pytorch", Functions("nets:f", "nets:g"), (MEMBER,), "/project")
SITE = Site("l", "local", "local", 1, 2, 2, 2**30, (Queue("local"),))
PLAN = Plan("fluid", "makespan", 2, 1, 9.0, 8.0, 1.1, ())
VALUES = {
    "run": (RunSpec, RunSpec("r", ENSEMBLE, SITE, "fluid", 1, "local", 60, 10, (), "/c")),
    "record": (
        CatalogRecord,
        CatalogRecord("id", 5.0, "running", "", PLAN, (Job(0, "j", "7", JobState.RUNNING, 1, 60, 4.0),)),
    ),
    "live": (Mapping[str, LiveMetrics], {"a": LiveMetrics(5.0, 1, 2, 3, 3.5)}),
}
TEXTS = {name: json.dumps(encode(value)).encode() for name, (_, value) in VALUES.items()}
EVENT = b'{"kind":"stopped","time":5.0,"reason":"deadline","part_samples":64}\n'


@pytest.mark.parametrize("name", VALUES)
def test_the_originals_are_read_back(name):
    kind, value = VALUES[name]
    assert parse(kind, TEXTS[name]) == value


@pytest.mark.parametrize("name", VALUES)
@fuzzed()
@given(data=st.data())
def test_a_damaged_file_is_read_or_a_value_error(name, data):
    with contextlib.suppress(ValueError):
        parse(VALUES[name][0], data.draw(mutations(TEXTS[name])))


@fuzzed()
@given(data=st.data())
def test_damaged_files_beside_the_run_count_as_missing(tmp_path, data):
    folder = RunFolder(tmp_path)
    folder.record.write_bytes(data.draw(mutations(TEXTS["record"])))
    assert isinstance(read_record(folder), CatalogRecord | None)
    (tmp_path / "live.json").write_bytes(data.draw(mutations(TEXTS["live"])))
    assert isinstance(read_live_metrics(tmp_path / "live.json", 6.0), dict)


@fuzzed()
@given(data=st.data())
def test_damaged_lines_of_events_are_left_out(tmp_path, data):
    (tmp_path / "a.jsonl").write_bytes(data.draw(mutations(EVENT * 3)) + b"\n" + EVENT)
    assert [event.kind for event in read_events(tmp_path / "a.jsonl")][-1:] == ["stopped"]
