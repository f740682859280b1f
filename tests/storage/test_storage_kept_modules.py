"""Modules of a run as they were submitted: which are copied, and what the copies are beside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.model.ensemble import COMMAND, Ensemble, Functions, Member
from hetctl.model.errors import BadInputError
from hetctl.model.run import RunSpec
from hetctl.model.site import Queue, Site
from hetctl.storage import kept_modules
from hetctl.storage.kept_modules import imported_modules, keep_modules, modules_of, with_kept_modules
from hetctl.storage.paths import RunFolder

SITE = Site("l", "local", "local", 1, 2, 2, 2**30, (Queue("local"),))
FUNCTIONS = Functions("nets:input_fn", "space.deep:model_fn", "pack.sub.train:train_fn")
FILES = {
    "nets.py": "MORE = 1",
    "pack/__init__.py": "",
    "pack/names.json": "[]",
    "pack/sub/__init__.py": "",
    "pack/sub/train.py": "import nets",
    "space/deep.py": "",
    "data/sample.py": "no module: its folder is no package",
    "labels.csv": "a,b",
    ".hidden/secret.py": "",
    "__pycache__/nets.pyc": "",
}
MODULES = ["nets.py", "pack/__init__.py", "pack/sub/__init__.py", "pack/sub/train.py", "space/deep.py"]


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


def spec_of(project):
    ensemble = Ensemble("e", "pytorch", FUNCTIONS, (Member("a"),), str(project))
    spec = RunSpec("r", ensemble, SITE, "fluid", 1, "local", 60, 10, (), "/c")
    return replace(spec, modules=modules_of(ensemble))


def copy_of(spec, folder):
    return with_kept_modules(spec, folder).ensemble.folder


def test_modules_are_copied_and_all_else_is_linked(project):
    spec, folder = spec_of(project), RunFolder(project / "home" / "runs" / "r")
    assert sorted(spec.modules) == MODULES
    folder.create()
    keep_modules(spec, folder)
    copy = folder.modules / next(folder.modules.iterdir()).name
    assert copy_of(spec, folder) == str(copy.resolve())
    links = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_symlink()}
    # Without the home, which would lead back to the copy.
    assert links == {"data", "labels.csv", "pack/names.json"}
    files = {str(path.relative_to(copy)) for path in copy.rglob("*.py") if not path.is_symlink()}
    assert files >= set(MODULES)
    (project / "nets.py").write_text("MORE = 2")
    assert (copy / "nets.py").read_text() == "MORE = 1"
    assert (copy / "labels.csv").read_text() == "a,b"


def test_an_edited_version_lies_beside_the_earlier_one(project):
    folder, first = RunFolder(project / "home"), spec_of(project)
    keep_modules(first, folder)
    (project / "nets.py").write_text("MORE = 2")
    with pytest.raises(BadInputError, match="was edited while it was being submitted"):
        keep_modules(replace(first, modules={**first.modules, "more.py": "0"}), folder)
    assert len(list(folder.modules.iterdir())) == 1
    second = spec_of(project)
    keep_modules(second, folder)
    keep_modules(first, folder)
    assert copy_of(first, folder) != copy_of(second, folder)
    assert len(list(folder.modules.iterdir())) == 2


def test_commands_have_no_copy(project):
    command = replace(spec_of(project).ensemble, framework=COMMAND, functions=Functions("", ""))
    assert modules_of(command) == {}
    spec = replace(spec_of(project), ensemble=command, modules={})
    keep_modules(spec, RunFolder(project / "home"))
    assert with_kept_modules(spec, RunFolder(project / "home")) == spec
    assert not (project / "home").exists()


@pytest.mark.parametrize(("limit", "most"), [("MOST_ENTRIES", 7), ("MOST_BYTES", 10)])
def test_a_folder_with_too_much_is_refused(project, monkeypatch, limit, most):
    monkeypatch.setattr(kept_modules, limit, most)
    with pytest.raises(BadInputError) as caught:
        spec_of(project)
    assert "a run keeps a copy of the modules there" in caught.value.message
    assert "into a folder of their own" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("import pack.names", {"pack/names.py"}),
        ("def f():\n    from pack import names", {"pack/names.py"}),
        ("from .. import other", {"pack/other.py"}),
        ("from ..other import thing", {"pack/other.py"}),
        ("import numpy", set()),
        ("import importlib", {"pack/names.py", "pack/other.py", "notes.py"}),
        ("no python", {"pack/names.py", "pack/other.py", "notes.py"}),
    ],
)
def test_imported_modules_are_those_of_import_statements(project, text, imported):
    for name in ("pack/names.py", "pack/other.py", "notes.py"):
        (project / name).write_text("")
    (project / "pack/sub/train.py").write_text(f"import nets\n{text}")
    ensemble = spec_of(project).ensemble
    assert imported_modules(ensemble, modules_of(ensemble)) == {*MODULES, *imported}
