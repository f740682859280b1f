from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.reports.units import (
    device_word,
    format_bytes,
    format_metric,
    format_percent,
    format_rate,
    format_seconds,
    printable,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1:00 min"),
        (83, "1:23 min"),
        (3599.7, "1:00 h"),
        (7500, "2:05 h"),
        (47 * 3600, "47:00 h"),
        (100 * 3600, "4 d 04 h"),
    ],
)
def test_seconds_have_one_form_per_size(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(0, 86400 * 99))
def test_a_time_fits_its_column(seconds: float) -> None:
    assert len(format_seconds(seconds)) <= 9


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, "-"), (0.5, "0.50"), (9.999, "10.0"), (99.96, "100"), (1234.5, "1,234"), (98765, "98,765")],
)
def test_rates_keep_three_digits(rate: float | None, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (512 << 30, "512 GiB")],
)
def test_sizes_are_written_in_binary_units(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_metrics_percents_and_devices() -> None:
    assert [format_metric(None), format_metric(0.98765), format_metric(0.9)] == ["-", "0.9877", "0.9"]
    assert [format_percent(None), format_percent(0.934)] == ["-", "93 %"]
    assert [device_word("gpu", 1), device_word("gpu"), device_word("slot", 1)] == ["GPU", "GPUs", "slot"]


def test_printable_drops_escapes_and_what_a_bar_drew_over() -> None:
    assert printable("\x1b[32m1/9 [=>]\x1b[0m\r9/9 [==]\x07\r\nnext\tline") == "9/9 [==]\nnext    line"


@given(st.text())
def test_nothing_printable_moves_a_terminal(text: str) -> None:
    assert not {"\x1b", "\r", "\b", "\x9b"} & set(printable(text))
