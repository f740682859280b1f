from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.inputs.yaml_source import read_yaml
from hetctl.model.errors import BadInputError


def refused(folder: Path, data: bytes | str) -> str:
    path = folder / "f.yaml"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(BadInputError) as caught:
        read_yaml(path)
    return caught.value.message.replace(f"{folder}/", "")


def test_values_and_their_lines(tmp_path: Path):
    path = tmp_path / "f.yaml"
    path.write_text("\ufeffa: 1\nb:\n  - x: {y: 2:00:00}\n  - 1e-3\nc: &c [no, 2026-01-01]\nd: *c\n", "utf-8")
    source = read_yaml(path)
    assert source.values == {
        "a": 1,
        "b": [{"x": {"y": "2:00:00"}}, 0.001],
        "c": ["no", "2026-01-01"],
        "d": ["no", "2026-01-01"],
    }
    at = [("a",), ("b", 0, "x", "y"), ("b", 1), ("b", 1, "missing"), ("missing",)]
    assert [source.place(location).line for location in at] == [1, 3, 4, 4, 1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("-5", -5),
        ("1.", 1.0),
        (".5", 0.5),
        ("True", True),
        ("~", None),
        ("", None),
        ("!!str 12", "12"),
        ("'12'", "12"),
    ],
)
def test_scalars_of_the_core_schema(tmp_path: Path, text: str, value: object):
    (tmp_path / "f.yaml").write_text(f"a: {text}\n")
    read = read_yaml(tmp_path / "f.yaml").values["a"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "f.yaml:1: must be a mapping (key: value)"),
        ("- 1\n", "f.yaml:1: must be a mapping (key: value)"),
        ("a: 1\nb: {c: 1,\n   c: 2}\n", "f.yaml:3: key 'c' is given twice, first in line 2"),
        ("a: 1\nb: [1\n", "f.yaml:3: not YAML: while parsing a flow sequence expected ',' or ']'"),
        ("a: 1\n--- \nb: 1\n", "f.yaml:2: not YAML: expected a single document in the stream"),
        (b"a: 1\nb: \xff\n", "f.yaml:2: byte 0xff is not UTF-8"),
        ("a: 1\nb: \x01\n", "f.yaml:2: not YAML: special characters are not allowed"),
        ("a: 1\n2: 1\n", "f.yaml:2: key '2' must be text; put it in quotes"),
        ("? [a]\n: 1\n", "f.yaml:1: key 'a list or mapping' must be text; put it in quotes"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "f.yaml:3: key '<<' must be text; put it in quotes"),
        ("a: !!python/object/apply:os.system [ls]\n", "f.yaml:1: !!python/object/apply:os.system is not"),
        ("a: !x 1\n", "f.yaml:1: !x is not supported; write the value out"),
        ("a: !!int x\n", "f.yaml:1: 'x' invalid literal for int()"),
        ("a: 99999999999999999999\n", "f.yaml:1: '99999999999999999999' does not fit into 64 bits"),
        ("a: -.inf\n", "f.yaml:1: '-.inf' is not a finite number"),
        ('a: "\\0"\n', "f.yaml:1: '\\x00' has an invalid character"),
        ('a: "\\ud800"\n', "f.yaml:1: '\\ud800' has an invalid character"),
        ('a: "\\UFFFFFFFF"\n', "f.yaml:1: not YAML: "),
        ("a: &x [*x]\n", "f.yaml:1: nested too deeply"),
        ("a: " + "[" * 5000, "f.yaml:1: nested too deeply"),
    ],
)
def test_text_that_is_no_plain_yaml_is_refused_at_its_line(tmp_path: Path, data: bytes | str, message: str):
    assert refused(tmp_path, data).startswith(message)


def test_aliases_that_explode_are_refused(tmp_path: Path):
    lines = ["a0: &a0 [" + ",".join("x" * 10) + "]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "must have at most 200,000 values, with aliases expanded" in refused(tmp_path, "\n".join(lines))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path):
    with pytest.raises(BadInputError, match=r"none\.yaml: cannot be read: No such file or directory"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(BadInputError, match="cannot be read: Is a directory"):
        read_yaml(tmp_path)
