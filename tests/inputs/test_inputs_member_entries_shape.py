from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.errors import BadInputError

HEAD = "name: e\nfunctions: {input_fn: nets:input_fn, model_fn: nets:model_fn}\n"
A = "  - {name: a, config: {units: 1, lr: 0.1}}\n"


def problems(folder: Path, text: str) -> list[str]:
    (folder / "nets.py").write_text("input_fn = model_fn = print\n")
    (folder / "e.yaml").write_text(HEAD + text)
    with pytest.raises(BadInputError) as caught:
        read_ensemble(folder / "e.yaml")
    return caught.value.message.replace(f"{folder}/", "").splitlines()


def test_keys_and_members_are_read(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("input_fn = model_fn = print\n")
    grid = "  - grid: {name: g, profile_as: a, over: {units: [2, 3]}}\n"
    drawn = "  - random: {name: r, profile_as: g-units-2, count: 1, over: {units: {integer: [1, 9]}}}\n"
    (tmp_path / "e.yaml").write_text(f"{HEAD}rate_keys: [units]\nmembers:\n{A}{grid}{drawn}")
    ensemble = read_ensemble(tmp_path / "e.yaml")
    assert ensemble.rate_keys == ("units",)
    assert [member.profile_as for member in ensemble.members] == [None, "a", "a", "g-units-2"]


def test_an_unknown_member_is_refused_with_its_line(tmp_path: Path) -> None:
    text = f"members:\n{A}  - {{name: b, profile_as: aa}}\n  - {{name: c, profile_as: b}}\n"
    assert problems(tmp_path, text) == [
        "e.yaml:5: members[1].profile_as: there is no member 'aa'; did you mean 'a'?"
    ]


def test_a_circle_is_refused_at_each_of_its_members(tmp_path: Path) -> None:
    text = f"members:\n{A}  - {{name: b, profile_as: c}}\n  - {{name: c, profile_as: b}}\n"
    rule = "profile_as: must lead to a member that is measured, not in a circle:"
    assert problems(tmp_path, text) == [
        f"e.yaml:5: members[1].{rule} b -> c -> b",
        f"e.yaml:6: members[2].{rule} c -> b -> c",
    ]


def test_a_member_profiled_as_itself_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "members:\n  - {name: a, profile_as: a}\n")
    assert problem.endswith("not in a circle: a -> a")


def test_rate_keys_that_no_member_has_are_refused(tmp_path: Path) -> None:
    text = f"rate_keys:\n  - unit\n  - units\n  - size\nmembers:\n{A}"
    assert problems(tmp_path, text) == [
        "e.yaml:4: rate_keys[0]: no member has 'unit' in its config; did you mean 'units'?",
        "e.yaml:6: rate_keys[2]: no member has 'size' in its config; known: lr, units",
    ]


@pytest.mark.parametrize("keys", ["[]", "[units, units]", "units", "[1]"])
def test_rate_keys_are_a_list_of_distinct_names(tmp_path: Path, keys: str) -> None:
    (problem,) = problems(tmp_path, f"rate_keys: {keys}\nmembers:\n{A}")
    assert problem.startswith("e.yaml:3: rate_keys")
