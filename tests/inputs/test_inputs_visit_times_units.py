from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.inputs.visit_times import UnitTimeTable, read_unit_times
from hetctl.model.errors import BadInputError

TIMES = st.floats(min_value=0, max_value=1e9)
ROWS = st.integers(1, 4).flatmap(
    lambda columns: st.lists(st.lists(TIMES, min_size=columns, max_size=columns), min_size=1, max_size=4)
)


def read(folder: Path, text: str) -> UnitTimeTable:
    path = folder / "t.csv"
    path.write_bytes(text.encode())
    return read_unit_times(path)


def refused(folder: Path, text: str) -> str:
    with pytest.raises(BadInputError) as caught:
        read(folder, text)
    return caught.value.message.replace(f"{folder}/", "")


def matrix(rows: list[list[float]]) -> dict[tuple[int, int, int], float]:
    return {(i, j, j): value for i, row in enumerate(rows) for j, value in enumerate(row)}


@settings(max_examples=30)
@given(rows=ROWS)
def test_a_matrix_is_read_in_all_its_forms(tmp_path_factory: pytest.TempPathFactory, rows: list[list[float]]):
    folder = tmp_path_factory.getbasetemp()
    lines = [",".join(map(str, row)) for row in rows]
    sizes = f"{len(rows)} {len(rows[0])}\n" + "\n".join(" ".join(map(str, row)) for row in rows)
    workers = tuple(f"gpu {j}" for j in range(len(rows[0])))
    named = "\n".join(f"net-{i},{line}" for i, line in enumerate(lines))
    for text in ("\n".join(lines), sizes):
        table = read(folder, text)
        assert table.seconds == matrix(rows)
        assert table.configs == tuple(f"c{i}" for i in range(len(rows)))
        assert table.workers == tuple(f"w{j}" for j in range(len(rows[0])))
    assert read(folder, ",".join(workers) + "\n" + "\n".join(lines)).workers == workers
    for corner in ("config", "model", ""):
        table = read(folder, f"{corner},{','.join(workers)}\n{named}")
        assert (table.workers, table.seconds) == (workers, matrix(rows))
        assert table.configs == tuple(f"net-{i}" for i in range(len(rows)))
        assert table.partitions == tuple(f"p{j}" for j in range(len(workers)))


def test_names_may_be_numbers_below_the_word_config(tmp_path: Path):
    table = read(tmp_path, "config,0,1\n7,1.5,2\n8,3,4\n")
    assert (table.configs, table.workers) == (("7", "8"), ("0", "1"))
    assert table.seconds == matrix([[1.5, 2.0], [3.0, 4.0]])


def test_blank_lines_a_byte_order_mark_tabs_and_crlf(tmp_path: Path):
    assert read(tmp_path, "\ufeff2\t2 \r\n\r\n1 2\r\n3\t4\r\n").seconds == matrix([[1, 2], [3, 4]])
    assert read(tmp_path, "\ufeff1 , 2\r\n\r\n3,4\r\n").seconds == matrix([[1, 2], [3, 4]])


def test_a_list_has_copies_of_partitions(tmp_path: Path):
    text = "partition,config,worker,seconds\np,a,w,3\np,a,v,1e1\nq,a,v,4\np,a,u,inf\nq,a,u,2\n"
    table = read(tmp_path, text)
    assert (table.configs, table.partitions, table.workers) == (("a",), ("p", "q"), ("w", "v", "u"))
    assert table.seconds == {(0, 0, 0): 3.0, (0, 0, 1): 10.0, (0, 1, 1): 4.0, (0, 1, 2): 2.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv:1: is empty: it must have a row of seconds for each configuration"),
        ('""\n', "t.csv:1: is empty: it must have a row of seconds for each configuration"),
        ("1,2\n3\n", "t.csv:2: has 1 cells, line 1 has 2"),
        ("a,b\n1,2,3\n", "t.csv:2: has 3 cells, the header has 2"),
        ("1,2\n3,-4\n", "t.csv:2: worker 'w1': seconds must be a number from 0 to 1e12, got '-4'"),
        ("1,nan\n", "t.csv:1: worker 'w1': seconds must be a number from 0 to 1e12, got 'nan'"),
        ("1,2\n3,x\n", "t.csv:2: worker 'w1': seconds must be a number from 0 to 1e12, got 'x'"),
        ("1,1e999\n", "t.csv:1: worker 'w1': seconds must be a number from 0 to 1e12, got '1e999'"),
        ("a,b\n1,inf\n2,inf\n", "t.csv:2: worker 'b' has no partition: all its times are inf"),
        ("1,\n2,\n", "t.csv:1: worker 'w1' has no partition: all its times are inf"),
        (
            "1,2\n2,inf\n",
            "t.csv:2: worker 'w1': no time is given; every configuration must visit every partition, and no"
            " other worker has this one",
        ),
        ("a,2\n1,2\n", "t.csv:1: '2' is a number among names"),
        ("a,a\n1,2\n", "t.csv:1: worker: 'a' is given twice"),
        ("a,\n1,2\n", "t.csv:1: worker: must be printable text, got ''"),
        ("config,a\nn,1\nn,2\n", "t.csv:3: config: 'n' is given twice"),
        ("config\nn\n", "t.csv:1: has no seconds below its header, or names no worker"),
        ("config,a\n", "t.csv:1: has no seconds below its header, or names no worker"),
        ('1,"2\n', "t.csv:1: not CSV: unexpected end of data"),
        ("2 2\n1 2\n", "t.csv:1: gives 2 rows, but 1 follow"),
        ("1 2\n1 2\n3 4\n", "t.csv:1: gives 1 rows, but 2 follow"),
        ("2 2\n1 2\n1 2 3\n", "t.csv:3: has 3 cells, line 1 gives 2 columns"),
        ("0 2\n", "t.csv:1: sizes must be at least 1 row and 1 column, got 0 and 2"),
        ("1 2\n1 -2\n", "t.csv:2: worker 'w1': seconds must be a number from 0 to 1e12, got '-2'"),
    ],
)
def test_a_wrong_matrix_is_refused_by_line_and_rule(tmp_path: Path, text: str, message: str):
    assert refused(tmp_path, text) == message


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "t.csv:1: has no rows below its header"),
        ("a,p,w\n", "t.csv:2: has 3 cells, the header has 4"),
        ("a,p,w,-1\n", "t.csv:2: seconds: must be a number from 0 to 1e12, got '-1'"),
        (",p,w,1\n", "t.csv:2: config: must be printable text, got ''"),
        ("a,p,w,1\na,p,w,2\n", "t.csv:3: the same unit on the same worker is already in line 2"),
        ("a,p,w,1\na,p,v,inf\n", "t.csv:3: worker 'v' has no partition: it has no seconds, or only inf"),
        ("a,p,w,1\na,q,w,\n", "t.csv:3: partition 'q' is on no worker"),
        (
            "a,p,w,1\nb,p,v,1\n",
            "t.csv:2: config 'b' has no seconds on partition 'p' of worker 'w', unlike other configs\n"
            "t.csv:3: config 'a' has no seconds on partition 'p' of worker 'v', unlike other configs",
        ),
    ],
)
def test_a_wrong_list_is_refused_by_line_and_rule(tmp_path: Path, rows: str, message: str):
    assert refused(tmp_path, f"config,partition,worker,seconds\n{rows}") == message


@given(st.text(alphabet='01 ,.\n-aeinf"config', max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str):
    with contextlib.suppress(BadInputError):
        table = read(tmp_path_factory.getbasetemp(), text)
        assert table.configs
        assert table.workers
        assert all(value >= 0 for value in table.seconds.values())
