from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.inputs.quantities import format_duration, parse_bytes, parse_duration, parse_gpus, parse_interval
from hetctl.model.errors import BadInputError
from hetctl.model.training_settings import EPOCHS, SECONDS, STEPS, CheckpointInterval


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200),
        ("90m", 5400),
        ("45s", 45),
        ("1h30m", 5400),
        ("1h00m05s", 3605),
        ("2:00:00", 7200),
        ("0:30", 1800),
        (" 12H ", 43200),
        ("100:00:01", 360001),
    ],
)
def test_durations_are_read_in_seconds(text: str, seconds: int):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "2", "-2h", "1.5h", "1:60", "1:2", "30m1h", "2d", "٣h", "inf"])
def test_texts_that_are_no_duration_are_refused(text: str):
    with pytest.raises(BadInputError, match="is not a duration such as 2h"):
        parse_duration(text)


def test_a_number_alone_is_ambiguous():
    with pytest.raises(BadInputError) as caught:
        parse_duration("90")
    assert caught.value.hint == "write 90s, 90m or 90h"
    for text in ("0s", "0:00", "0h0m"):
        with pytest.raises(BadInputError, match="must be longer than 0 s"):
            parse_duration(text)


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("10m", (600, SECONDS)),
        ("1h30m", (5400, SECONDS)),
        ("500 steps", (500, STEPS)),
        ("1 step", (1, STEPS)),
        ("1 epoch", (1, EPOCHS)),
        ("12epochs", (12, EPOCHS)),
    ],
)
def test_intervals_are_read_with_their_unit(text: str, interval: tuple[int, str]):
    assert parse_interval(text) == CheckpointInterval(*interval)


@pytest.mark.parametrize(
    "text", ["", "10", "epoch", "1.5 epochs", "-3 steps", "2:00", "5 minutes", "3 EPOCHS"]
)
def test_texts_that_are_no_interval_are_refused(text: str):
    with pytest.raises(BadInputError, match="is not an interval such as 10m, 500 steps or 2 epochs"):
        parse_interval(text)


@pytest.mark.parametrize("text", ["0 steps", "0 epochs", "0m"])
def test_an_interval_of_nothing_is_refused(text: str):
    with pytest.raises(BadInputError, match="must be longer than 0"):
        parse_interval(text)


@given(st.integers(1, 10**7))
def test_what_is_formatted_is_parsed_as_the_same(seconds: int):
    assert parse_duration(format_duration(seconds)) == seconds


def test_durations_are_written_in_their_largest_units():
    seconds = [0, 3.21, 45, 65.4, 60, 3600, 5400, 3605, 86400]
    texts = ["0s", "3.2s", "45s", "1m05s", "1m", "1h", "1h30m", "1h00m05s", "24h"]
    assert [format_duration(value) for value in seconds] == texts


def test_sizes_are_read_in_bytes_and_need_a_unit():
    texts = ["512GB", "480GiB", "1.5 kB", "7B", "2TiB", 5]
    assert [parse_bytes(text) for text in texts] == [512 * 10**9, 480 * 2**30, 1500, 7, 2**41, 5]
    for wrong in ("512", "512G", "0GB", "-1GB", "1e3GB", "", 0, -5, True, 1.5, None, [1]):
        with pytest.raises(BadInputError, match="is not a size such as 512GB"):
            parse_bytes(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("80", {"": 80}),
        ("v100:40,p100:40", {"v100": 40, "p100": 40}),
        (" Tesla V100 : 4 , p100: 8", {"Tesla V100": 4, "p100": 8}),
    ],
)
def test_gpus_are_read_as_people_write_them(text: str, gpus: Mapping[str, int]) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize(
    "text", ["", "0", "-4", "v100", "v100:", ":4", "v100:x", "v100:0", "v100:4,,p100:4", "v100:4,v100:4"]
)
def test_other_gpus_are_refused_with_what_was_written(text: str) -> None:
    with pytest.raises(BadInputError) as caught:
        parse_gpus(text)
    assert repr(text) in caught.value.message or f"'{text}'" in caught.value.message
