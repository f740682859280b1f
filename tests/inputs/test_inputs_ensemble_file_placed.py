"""Files of partitions: what each line says, and lines that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.inputs.ensemble_file import read_ensemble, read_partition_table
from hetctl.model.errors import BadInputError

HEAD = "partition,path,nodes\n"
FROM = "partition,path,nodes,source\n"
GOOD = HEAD + "1,$TMPDIR/b.npz,\n0,/p/a.npz,n1; n7\n"
ENSEMBLE = """\
name: e
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
members: [{name: a}]
"""
WITH_SIZE = "samples_per_epoch: 100\n"


def written(folder: Path, text: str) -> Path:
    (folder / "parts.csv").write_text(text)
    return folder / "parts.csv"


def test_lines_are_read_in_the_order_of_their_numbers(tmp_path):
    partitions = read_partition_table(written(tmp_path, GOOD))
    assert (partitions.files, partitions.nodes) == (("/p/a.npz", "$TMPDIR/b.npz"), (("n1", "n7"), ()))


def test_lines_may_say_from_where_parts_are_copied(tmp_path):
    text = FROM + "0,$TMPDIR/0,n1,$SHARED/0.npz\n1,/p/1,n2,\n2,$TMPDIR/2,,/s/2.npz\n"
    sources = read_partition_table(written(tmp_path, text)).sources()
    assert sources == ("$SHARED/0.npz", "", "/s/2.npz")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "parts.csv:1: is empty"),
        ("partition,path\n0,/a\n", "parts.csv:1: column 'nodes' is missing"),
        (
            HEAD.replace("path", "paths") + "0,/a,\n",
            "parts.csv:1: unknown column 'paths'; did you mean 'path'",
        ),
        (HEAD, "parts.csv:1: has no rows"),
        (HEAD + "0,/a\n", "parts.csv:2: has 2 cells, the header has 3"),
        (HEAD + "0,/a,\n0,/b,\n", "parts.csv:3: partition 0 is already in line 2"),
        (HEAD + "0,/a,\n2,/b,\n", "parts.csv:1: partition 1 is missing"),
        (HEAD + "1000000000,/a,\n", "partition: must be a whole number from 0, got '1000000000'"),
        (HEAD + "999999999,/a,\n", "parts.csv:1: partition 0 is missing"),
        (HEAD + "-1,/a,\n", "parts.csv:2: partition: must be a whole number from 0, got '-1'"),
        (HEAD + "٣,/a,\n", "parts.csv:2: partition: must be a whole number from 0"),
        (HEAD + "0,,n1\n", "parts.csv:2: path: must be printable text, got ''"),
        (HEAD + "0,/a,n1;;n2\n", "parts.csv:2: nodes: must be names separated by ';'"),
        (HEAD + "0,/a,n1 n2\n", "parts.csv:2: nodes: must be names separated by ';'"),
        (HEAD + "0,/a,n1;n1\n", "parts.csv:2: nodes: must be names separated by ';', each once"),
        (FROM + "0,/a,,s/0.npz\n", "parts.csv:2: source: must be absolute, or begin with a variable"),
        (FROM + "0,/a,,/s/0\n1,/a,,\n", "parts.csv:3: path '/a' is already in line 2, and"),
        (HEAD + "x,,;\ny,/a,\n", "parts.csv:2: path: must be"),
    ],
)
def test_wrong_files_are_refused_with_their_lines(tmp_path, text, words):
    with pytest.raises(BadInputError) as caught:
        read_partition_table(written(tmp_path, text))
    assert words in caught.value.message


def test_all_errors_of_a_file_are_said_at_once(tmp_path):
    with pytest.raises(BadInputError) as caught:
        read_partition_table(written(tmp_path, HEAD + "x,,;\n0,/a\n"))
    assert len(caught.value.message.splitlines()) == 4


@pytest.fixture
def ensemble_with(tmp_path):
    def read(keys: str):
        (tmp_path / "nets.py").write_text("def input_fn(): ...\ndef model_fn(): ...\n")
        (tmp_path / "e.yaml").write_text(ENSEMBLE + keys)
        return read_ensemble(tmp_path / "e.yaml")

    written(tmp_path, GOOD)
    return read


def test_an_ensemble_has_the_paths_and_nodes_of_its_file(ensemble_with):
    ensemble = ensemble_with("partitions: {file: parts.csv}\n" + WITH_SIZE)
    partitions = ensemble.partitions
    assert ensemble.reads_partitions
    assert (partitions.count, partitions.paths()) == (2, ("/p/a.npz", "$TMPDIR/b.npz"))
    assert partitions.nodes == (("n1", "n7"), ())
    assert partitions.sources() == ()
    assert partitions.described == "/p/a.npz, $TMPDIR/b.npz"


def test_an_ensemble_has_the_sources_of_its_file(ensemble_with, tmp_path):
    written(tmp_path, FROM + "1,/b,n1,\n0,/a,,/s/0.npz\n")
    partitions = ensemble_with("partitions: {file: parts.csv}\n" + WITH_SIZE).partitions
    assert partitions.sources() == ("/s/0.npz", "")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("partitions: {file: parts.csv}\n", "e.yaml:4: partitions.file: needs samples_per_epoch"),
        ("partitions: {file: none.csv}\n" + WITH_SIZE, "none.csv: cannot be read"),
        ("partitions: {file: parts.csv, count: 2}\n" + WITH_SIZE, "partitions.count: does not go with file"),
        ("partitions: {file: parts.csv, replicas: 2}\n" + WITH_SIZE, "partitions.replicas: does not go with"),
        ("partitions: {path: '/{partition}'}\n" + WITH_SIZE, "e.yaml:4: partitions: needs count, or file"),
    ],
)
def test_keys_that_do_not_go_with_a_file_are_refused(ensemble_with, keys, words):
    with pytest.raises(BadInputError) as caught:
        ensemble_with(keys)
    assert words in caught.value.message
