"""The house: imports go downstairs only, heavy packages stay in their rooms, and --help is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hetctl"

# What each package may import of hetctl, besides itself.
PURE = {"core"}
WING = {"core", "launchers", "perf", "control", "planners", "scheduling"}
MAY_IMPORT = {
    "core": set(),
    "perf": PURE,
    "control": PURE | {"perf"},
    "automl": PURE,
    "launchers": PURE,
    "planners": PURE | {"perf", "control"},
    "scheduling": PURE | {"perf", "control", "planners"},
    "simulator": PURE | {"perf", "control", "automl", "planners", "scheduling"},
    "files": PURE,
    "render": PURE,
    "batch": PURE,
    "catalog": PURE,
    "runtime": WING,
    "report": PURE,
    "runner": WING | {"automl", "simulator", "files", "render", "batch", "catalog", "runtime"},
    "cli": {"core", "runner", "report", "files"},
    "examples": set(),
}
ONLY_IN = {
    "sqlalchemy": {"catalog"},
    "alembic": {"catalog"},
    "submitit": {"batch"},
    "click": {"cli"},
    "rich": {"cli", "report"},
    "matplotlib": {"report"},
    "jinja2": {"render", "report"},
    "pydantic": {"files"},
    "yaml": {"files"},
    "tensorflow": {"runtime"},
    "keras": {"runtime", "examples"},
    "torch": {"runtime"},
    "horovod": {"runtime"},
    "mpi4py": {"runtime"},
    "optuna": {"automl"},
    "psutil": {"runtime"},
}


def modules():
    return sorted(path for path in PACKAGE.glob("*/**/*.py") if "versions" not in path.parts)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downstairs(path):
    room = path.relative_to(PACKAGE).parts[0]
    for name in imported(path):
        top, *rest = name.split(".")
        if top == "hetctl" and rest:
            assert rest[0] in MAY_IMPORT[room] | {room}, f"{room} imports {name}"
        elif top in ONLY_IN:
            assert room in ONLY_IN[top], f"{room} imports {name}"


def test_every_package_has_its_rule():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(MAY_IMPORT)


def test_core_imports_the_standard_library_alone():
    for path in (PACKAGE / "core").glob("*.py"):
        tops = {name.split(".")[0] for name in imported(path)} - {"hetctl"}
        assert tops <= sys.stdlib_module_names, path


LOADED = """
import sys
from hetctl.cli.main import main
try:
    main({arguments!r})
except SystemExit:
    print(*sys.modules, file=sys.stderr)
"""


def loaded_by(*arguments):
    code = LOADED.format(arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_imports_nothing_heavy():
    heavy = {
        "sqlalchemy",
        "pydantic",
        "matplotlib",
        "numpy",
        "scipy",
        "submitit",
        "tensorflow",
        "torch",
        "rich",
        "jinja2",
    }
    assert not heavy & loaded_by("--help")
    assert not heavy & loaded_by("plan", "--help")


def test_trainers_import_nothing_of_the_login_side():
    code = "import hetctl.runtime.driver, hetctl.runtime.worker.trainer, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"click", "sqlalchemy", "rich", "tensorflow", "torch", "mpi4py"} & set(done.stdout.split())
