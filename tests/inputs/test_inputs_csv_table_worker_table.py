from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.inputs.csv_table import read_workers
from hetctl.model.errors import BadInputError

HEAD = "worker,batch,seconds\n"
CAPPED = "worker,batch,seconds,max_batch\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "w.csv"
    path.write_text(text)
    return path


def refused(folder: Path, text: str) -> list[str]:
    with pytest.raises(BadInputError) as caught:
        read_workers(written(folder, text))
    return caught.value.message.replace(f"{folder}/", "").splitlines()


def test_workers_come_in_the_order_of_their_first_lines(tmp_path: Path):
    text = "seconds, max_batch ,worker,batch\n0.5,64,v100,8\n2,,k80,8\n\n0.75,64,v100,32\n"
    fast, slow = read_workers(written(tmp_path, text))
    assert (fast.name, fast.points, fast.max_batch, fast.place.line) == (
        "v100",
        ((8, 0.5), (32, 0.75)),
        64,
        2,
    )
    assert (slow.name, slow.points, slow.max_batch, slow.place.line) == ("k80", ((8, 2.0),), None, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "w.csv:1: is empty; the first line must be worker,batch,seconds"),
        (HEAD, "w.csv:1: has no rows below its header"),
        ("worker,batch\na,1\n", "w.csv:1: column 'seconds' is missing"),
        (
            "worker,batch,seconds,second\na,1,1,1\n",
            "w.csv:1: unknown column 'second'; did you mean 'seconds'?",
        ),
        ("worker,batch,seconds,batch\na,1,1,1\n", "w.csv:1: column 'batch' is given twice"),
        (HEAD + "a,1\n", "w.csv:2: has 2 cells, the header has 3"),
        (HEAD + "a b,1,1\n", "w.csv:2: worker: must be 1 to 64 of A-Z a-z 0-9 . _ - and start"),
        (HEAD + "a,-4,1\n", "w.csv:2: batch: must be a whole number of at least 1, got '-4'"),
        (HEAD + "a,0,1\n", "w.csv:2: batch: must be a whole number of at least 1, got '0'"),
        (HEAD + "a,1.5,1\n", "w.csv:2: batch: must be a whole number of at least 1, got '1.5'"),
        (HEAD + "a,1,-1\n", "w.csv:2: seconds: must be a number from 1e-09 to 1e+09, got '-1'"),
        (HEAD + "a,1,nan\n", "w.csv:2: seconds: must be a number from 1e-09 to 1e+09, got 'nan'"),
        (HEAD + "a,1,1e999\n", "w.csv:2: seconds: must be a number from 1e-09 to 1e+09, got '1e999'"),
        (HEAD + "a,1,1e10\n", "w.csv:2: seconds: must be a number from 1e-09 to 1e+09, got '1e10'"),
        (CAPPED + "a,1,1,0\n", "w.csv:2: max_batch: must be a whole number of at least 1, got '0'"),
        (
            HEAD + "a,8,1\nb,4,1\na,4,1\n",
            "w.csv:4: batch: must ascend for worker 'a', got 4 after 8 in line 2",
        ),
        (HEAD + "a,8,1\na,8,1\n", "w.csv:3: batch: worker 'a' with 8 is already in line 2"),
        (
            CAPPED + "a,1,1,\na,2,1,64\n",
            "w.csv:3: max_batch: must be the same in all rows of worker 'a', got 64 here and none in line 2",
        ),
        (CAPPED + "a,65,1,64\n", "w.csv:2: batch: 65 is above the worker's max_batch of 64"),
        (HEAD + 'a,"1,1\n', "w.csv:2: not CSV: unexpected end of data"),
    ],
)
def test_what_is_wrong_is_refused_by_file_line_and_rule(tmp_path: Path, text: str, message: str):
    assert refused(tmp_path, text)[0].startswith(message)


def test_all_that_is_wrong_is_named_at_once(tmp_path: Path):
    lines = refused(tmp_path, CAPPED + "a,8,1,9\nb,0,-1,9\na,4\na,2,1,9\n")
    assert [line.split(" ")[0] for line in lines] == ["w.csv:3:", "w.csv:3:", "w.csv:4:", "w.csv:5:"]


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(BadInputError, match=r"none\.csv: cannot be read"):
        read_workers(tmp_path / "none.csv")
