"""Logs of visits: an order that can be followed, or a refusal by line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.inputs.visit_times import UnitTimeTable, read_visit_log
from hetctl.model.errors import BadInputError

TABLE = UnitTimeTable(
    ("resnet", "vgg"),
    ("p0", "p1"),
    ("w0", "w1"),
    {(0, 0, 0): 1.0, (1, 0, 0): 1.0, (0, 1, 1): 1.0, (1, 1, 1): 1.0, (0, 0, 1): 1.0, (1, 0, 1): 1.0},
)
VISIT = {
    "config": "vgg",
    "worker": "w1",
    "start": 0.0,
    "end": 2,
    "partition": "p1",
    "epoch": 0,
    "lost": False,
}


def lines(*changes: dict[str, Any]) -> str:
    return "".join(json.dumps(VISIT | change) + "\n" for change in changes)


def read(folder: Path, text: str) -> list[str]:
    (folder / "log.jsonl").write_text(text, encoding="utf-8")
    visits = read_visit_log(folder / "log.jsonl", TABLE)
    return [f"{one.config}/{one.epoch}/{one.partition}@{one.worker}" for one in visits]


def refused(folder: Path, text: str) -> str:
    with pytest.raises(BadInputError) as caught:
        read(folder, text)
    return caught.value.message.replace(f"{folder}/", "")


def test_what_was_done_comes_in_the_order_of_the_starts(tmp_path):
    assert read(
        tmp_path,
        lines(
            {"start": 5, "end": 9},
            {"start": 3, "end": 5, "partition": "p0", "lost": True},
            {"start": 5, "end": 5, "partition": "p0"},
            {"start": 1, "end": 6, "config": "resnet", "worker": "w0", "partition": "p0", "more": 1},
        )
        + "\n",
    ) == ["resnet/0/p0@w0", "vgg/0/p0@w1", "vgg/0/p1@w1"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": "vg"}, "there is no config 'vg'; did you mean 'vgg'?"),
        ({"config": ["vgg"]}, "config: must be text (put it in quotes), got ['vgg']"),
        ({"worker": "w7"}, "there is no worker 'w7'; known: w0, w1"),
        ({"partition": "x"}, "there is no partition 'x'; known: p0, p1"),
        ({"worker": "w0"}, "worker 'w0' does not have partition 'p1'"),
        ({"start": -1}, "start: must be at least 0, got -1"),
        ({"start": True}, "start: must be a number, got True"),
        ({"end": float("inf")}, "end: must be a finite number, got inf"),
        ({"end": float("nan")}, "end: must be"),
        ({"start": 3}, "end is 2, before start, 3"),
        ({"epoch": 1.0}, "epoch: must be a whole number, got 1.0"),
        ({"epoch": 10_000}, "epoch: must be at most 9999, got 10000"),
        ({"lost": 0}, "lost: must be true or false, got 0"),
        (
            {"start": 2, "end": 4, "partition": "p0", "worker": "w0"},
            "the same unit is already done in line 1",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path, change, said):
    text = lines({"partition": "p0"}, {"epoch": 1}, change)
    assert f"log.jsonl:3: {said}" in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "log.jsonl:1: has no visit that was done"),
        (lines({"lost": True}), "log.jsonl:1: has no visit that was done"),
        ("\n{", "log.jsonl:2: is not JSON"),
        ("[" * 100_000, "log.jsonl:1: is not JSON"),
        ("3\n", "log.jsonl:1: must be a mapping, got 3"),
        ('{"config": "vgg"}', "log.jsonl:1: worker: is required"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, text, said):
    assert said in refused(tmp_path, text)


def test_every_wrong_line_is_named_in_one_go(tmp_path):
    assert refused(tmp_path, lines({"lost": 1}, {}, {"epoch": -1}) + "x").count("log.jsonl:") == 3


SCRAPS = st.sampled_from(
    ["{", "}", '"', ":", "null", "-1", "1e999", "\n", "\\ud800", "w1", "vgg", "[]", "\x00"]
)


@settings(max_examples=60)
@given(places=st.lists(st.tuples(st.integers(0, 220), st.integers(0, 9), SCRAPS), min_size=1, max_size=3))
def test_whatever_a_log_holds_it_is_read_or_refused(tmp_path_factory, places):
    text = lines({}, {"config": "resnet"})
    for at, length, scrap in places:
        text = text[:at] + scrap + text[at + length :]
    with contextlib.suppress(BadInputError):
        read(tmp_path_factory.getbasetemp(), text)
