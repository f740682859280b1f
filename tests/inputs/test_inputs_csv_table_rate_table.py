from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.inputs.csv_table import RateRow, read_rates, write_rates
from hetctl.model.errors import BadInputError

RATES = st.floats(1e-9, 1e12)
SAMPLES = st.floats(0, 1e15, exclude_min=True)
BUSY = st.none() | st.floats(0.001, 1.0)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True).filter(
    lambda name: name != "driver"
)
TYPES = st.none() | st.sampled_from(["V100", "A100, 40 GB", 'a "b"', "Größe"])


@st.composite
def tables(draw: st.DrawFn) -> list[RateRow]:
    samples = draw(st.dictionaries(NAMES, st.none() | SAMPLES, min_size=1, max_size=4))
    keys = st.tuples(st.sampled_from(sorted(samples)), st.integers(1, 10**9 - 1), TYPES)
    points = draw(st.lists(keys, unique=True, min_size=1, max_size=12))
    return [
        RateRow(name, gpus, draw(RATES), kind, samples[name], draw(BUSY) if gpus == 1 else None)
        for name, gpus, kind in points
    ]


def refused(folder: Path, data: bytes | str) -> str:
    path = folder / "r.csv"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(BadInputError) as caught:
        read_rates(path)
    return caught.value.message.replace(f"{folder}/", "")


@given(rows=tables())
def test_what_is_written_is_read_as_the_same(tmp_path_factory: pytest.TempPathFactory, rows: list[RateRow]):
    text = io.StringIO()
    write_rates(rows, text)
    path = tmp_path_factory.getbasetemp() / "round-trip.csv"
    path.write_bytes(text.getvalue().encode())
    assert read_rates(path) == rows


def test_columns_are_read_in_any_order_with_bom_blanks_and_crlf(tmp_path: Path):
    (tmp_path / "r.csv").write_bytes("\ufeffgpus, rate,member\r\n1, 10.5 ,a\r\n\r\n2,2e1,a\r\n".encode())
    assert read_rates(tmp_path / "r.csv") == [RateRow("a", 1, 10.5), RateRow("a", 2, 20.0)]


def test_optional_columns_are_written_where_used():
    text = io.StringIO()
    write_rates([RateRow("a", 1, 2.0, samples=3.0), RateRow("b", 1, 2.0)], text)
    assert text.getvalue() == "member,gpus,rate,samples\na,1,2.0,3.0\nb,1,2.0,\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "r.csv:1: is empty; the first line must be member,gpus,rate"),
        ("member,gpus,rate\n", "r.csv:1: has no rows below its header"),
        ("member,gpus\na,1\n", "r.csv:1: column 'rate' is missing"),
        ("member,gpus,rate,rat\na,1,1,1\n", "r.csv:1: unknown column 'rat'; did you mean 'rate'?"),
        ("member,gpus,rate,rate\na,1,1,1\n", "r.csv:1: column 'rate' is given twice"),
        ("member,gpus,rate\na,1\n", "r.csv:2: has 2 cells, the header has 3"),
        ("member,gpus,rate,busy\na,2,1,0.5\n", "r.csv:2: busy: is of one GPU, got 0.5 on 2 GPUs"),
        ("member,gpus,rate\na,1,0\n", "r.csv:2: rate: must be a number from 1e-9 to 1e12 samples/s, got '0'"),
        (
            "member,gpus,rate\na,1,-1\n",
            "r.csv:2: rate: must be a number from 1e-9 to 1e12 samples/s, got '-1'",
        ),
        (
            "member,gpus,rate\na,1,1e-300\n",
            "r.csv:2: rate: must be a number from 1e-9 to 1e12 samples/s, got '1e-300'",
        ),
        (
            "member,gpus,rate,samples\na,1,1,1e30\n",
            "r.csv:2: samples: must be above 0, and at most 1e15, got '1e30'",
        ),
        (
            "member,gpus,rate\na,1,nan\n",
            "r.csv:2: rate: must be a number from 1e-9 to 1e12 samples/s, got 'nan'",
        ),
        (
            "member,gpus,rate\na,1,inf\n",
            "r.csv:2: rate: must be a number from 1e-9 to 1e12 samples/s, got 'inf'",
        ),
        (
            "member,gpus,rate\na,1,1e999\n",
            "r.csv:2: rate: must be a number from 1e-9 to 1e12 samples/s, got '1e999'",
        ),
        (
            "member,gpus,rate\na,1,1_0\n",
            "r.csv:2: rate: must be a number from 1e-9 to 1e12 samples/s, got '1_0'",
        ),
        ("member,gpus,rate\na,1,\n", "r.csv:2: rate: must be a number from 1e-9 to 1e12 samples/s, got ''"),
        ("member,gpus,rate\na,0,1\n", "r.csv:2: gpus: must be a whole number of at least 1, got '0'"),
        ("member,gpus,rate\na,1.0,1\n", "r.csv:2: gpus: must be a whole number of at least 1, got '1.0'"),
        ("member,gpus,rate\n../a,1,1\n", "r.csv:2: member: must be 1 to 64 of A-Z a-z 0-9 . _ - and start"),
        ("member,gpus,rate\ndriver,1,1\n", "r.csv:2: member: must be 1 to 64 of"),
        (
            "member,gpus,rate,samples\na,1,1,0\n",
            "r.csv:2: samples: must be above 0, and at most 1e15, got '0'",
        ),
        ("member,gpus,rate,gpu_type\na,1,1,a\x07\n", "r.csv:2: gpu_type: must be printable text"),
        ("member,gpus,rate\na,1,1\nb,1,1\na,1,2\n", "r.csv:4: member 'a' on 1 GPUs is already in line 2"),
        (
            "member,gpus,rate,gpu_type\na,2,1,V100\na,2,1,P100\na,2,1,V100\n",
            "r.csv:4: member 'a' on 2 GPUs (V100) is already in line 2",
        ),
        (
            "member,gpus,rate,samples\na,1,1,5\na,2,1,\n",
            "r.csv:3: samples: must be the same in all rows of member 'a', got None here and 5.0 in line 2",
        ),
        (b"member,gpus,rate\n\xff,1,1\n", "r.csv:2: byte 0xff is not UTF-8"),
        ('member,gpus,rate\n"a,1,1\n', "r.csv:2: not CSV: unexpected end of data"),
    ],
)
def test_a_wrong_table_of_rates_is_refused_at_its_line(tmp_path: Path, data: bytes | str, message: str):
    assert refused(tmp_path, data).startswith(message)


def test_every_row_in_question_is_named(tmp_path: Path):
    problems = refused(tmp_path, "member,gpus,rate\na,0,x\nb,1,1\nb,1,1\n").splitlines()
    assert [problem.split(": ")[0] for problem in problems] == ["r.csv:2", "r.csv:2", "r.csv:4"]
    many = refused(tmp_path, "member,gpus,rate\n" + "a,0,1\n" * 50).splitlines()
    assert len(many) == 21
    assert many[-1] == "and 30 more"
