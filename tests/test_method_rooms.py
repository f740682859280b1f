"""Methods are whole: each can be deleted with its rooms and entries, and the rest still loads and trains."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from workbench import new_project, python_without_training

PACKAGE = Path(__file__).parent.parent / "hetctl"

ROOMS = {
    "automl": (
        "methods/automl",
        "runtime/driver/trial_queue.py",
        "app/simulated_search.py",
        "app/run/search_status.py",
        "cli/cmd_search.py",
    ),
    "balance": (
        "methods/balance",
        "runtime/worker/balancing.py",
        "runtime/worker/background_training.py",
        "app/balance.py",
    ),
    "hopper": (
        "methods/hopper",
        "methods/hop_phase.py",
        "runtime/driver/hop_job.py",
        "runtime/driver/hop_history.py",
        "runtime/worker/visiting.py",
        "runtime/worker/hop_resources.py",
        "runtime/data/state_file.py",
        "app/hopper.py",
        "app/plan/hop_phases.py",
        "app/run/hop_trace.py",
        "cli/cmd_hopper.py",
    ),
    "pipeline": (
        "methods/pipeline",
        "runtime/driver/pipeline_job.py",
        "runtime/stages",
        "app/pipeline.py",
        "app/plan/pipeline_phases.py",
        "app/run/wave_checks.py",
        "cli/cmd_pipeline.py",
    ),
}
"""Files and folders that are a method's alone: decisions, its part in a job, use cases and commands."""

TASKS = "the table of a rank's tasks, which are imported once on a node and not in each rank"
COMPARED = "with --mode auto, the modes are compared by what they would cost"
ENTRIES = {
    "automl": {
        "app/simulate.py": "trials can be simulated instead of members: types alone",
    },
    "balance": {},
    "hopper": {
        "app/plan/multi_mode_plan.py": COMPARED,
        "runtime/worker/worker.py": TASKS,
    },
    "pipeline": {
        "app/plan/multi_mode_plan.py": COMPARED,
        "runtime/worker/worker.py": TASKS,
    },
}
"""Other modules that import a method's rooms when they are imported themselves, each with the reason."""

REGISTRIES = ("cli/main.py", "cli/cmd_simulate.py", "runtime/driver/job_modes.py", "runtime/worker/worker.py")
"""Modules whose tables have an entry for each method, which goes with the method."""


def lies_in(path: str, room: str) -> bool:
    return path == room or path.startswith(f"{room}/")


def module_of(path: str) -> str:
    return ".".join(("hetctl", *Path(path).with_suffix("").parts))


def imported_at_once(path: Path) -> Iterator[str]:
    """Yield the modules that a module imports outside of functions, also those for its types alone."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.FunctionDef):
            nodes.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("method", ROOMS)
def test_a_method_is_imported_by_its_entries_alone(method: str) -> None:
    rooms = [module_of(room) for room in ROOMS[method]]
    found = set()
    for path in PACKAGE.glob("**/*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not any(lies_in(name, room) for room in ROOMS[method]):
            modules = [module for module in imported_at_once(path) if module.startswith("hetctl.")]
            if any(f"{module}.".startswith(f"{room}.") for module in modules for room in rooms):
                found.add(name)
    assert found == set(ENTRIES[method])


def without(method: str, folder: Path) -> Path:
    """Return a copy of the package without a method's rooms, and without its entries in tables."""
    package = shutil.copytree(PACKAGE, folder / "hetctl")
    for room in ROOMS[method]:
        path = package / room
        assert path.exists(), room
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for registry in REGISTRIES:
        path = package / registry
        path.write_text(without_entries(path.read_text(), method))
    return package


def commands_of(method: str) -> list[str]:
    return [Path(room).stem.removeprefix("cmd_") for room in ROOMS[method] if room.startswith("cli/")]


def without_entries(text: str, method: str) -> str:
    """Return a module's text without the lines that name a method's rooms, or what these provide."""
    rooms = "|".join(re.escape(module_of(room)) for room in ROOMS[method])
    entries = [*(f'^    "{name}": ' for name in commands_of(method)), rf"\b({rooms})\b"]
    provided = re.findall(rf"^from (?:{rooms})\b\S* import (\w+)$", text, re.MULTILINE)
    entries += [rf"^    [A-Z_]+: {name},$" for name in provided]
    return "".join(line for line in text.splitlines(True) if not any(re.search(e, line) for e in entries))


COMPARING = ("app/plan/multi_mode_plan.py",)
"""Module of ``--mode auto``, which compares all methods: nothing imports it but plans in that mode."""
APART = ("adapters", "examples", "runtime/frameworks", "catalog/migrations")
"""Rooms that import frameworks or, as migrations, run when they are imported; they know no method."""

LOADED = """
import importlib, sys
import hetctl
from hetctl.cli import main
from hetctl.runtime.driver import job_modes
from hetctl.runtime.worker import worker

for name in sys.argv[1:]:
    importlib.import_module(name)
for mode in job_modes.MODES.values():
    importlib.import_module(mode.partition(":")[0])
for command in main.COMMANDS:
    main.cli.get_command(None, command)
print(hetctl.__file__, len(job_modes.MODES), len(worker.WORK))
main.main(["--help"])
"""


def rest_of(package: Path) -> list[str]:
    """Return the modules of a package that work without one of the methods."""
    paths = [path for path in package.glob("**/*.py") if not path.stem.startswith("__")]
    names = [path.relative_to(package).as_posix() for path in paths]
    return [module_of(name) for name in names if not any(lies_in(name, one) for one in (*COMPARING, *APART))]


def loaded(folder: Path) -> tuple[list[str], str]:
    """Load the modules of the package in a folder; return the figures and the help."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", LOADED, *rest_of(folder / "hetctl")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures, _, text = done.stdout.partition("\n")
    return figures.split(), text


IN_A_JOB = {"automl": (4, 10), "balance": (4, 10), "hopper": (3, 9), "pipeline": (3, 8)}
"""Modes and kinds of tasks that are left without a method."""


def test_plans_in_several_modes_alone_compare_methods() -> None:
    modules = {module_of(name) for name in COMPARING}
    importing = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.glob("**/*.py")
        if modules & set(imported_at_once(path))
    }
    assert importing <= set(COMPARING)


@pytest.mark.parametrize("method", ROOMS)
def test_the_rest_loads_without_a_method(method: str, tmp_path: Path) -> None:
    """Other modes would still be planned and run: no module for them imports anything that is gone."""
    package = without(method, tmp_path)
    (file, *left), text = loaded(tmp_path)
    assert Path(file).parent == package
    assert tuple(map(int, left)) == IN_A_JOB[method]
    assert "Usage: hetctl" in text
    assert all(f"\n  {name} " not in text for name in commands_of(method))
    assert "\n  plan " in text


@pytest.mark.parametrize("method", ROOMS)
def test_the_rest_trains_without_a_method(method: str, tmp_path: Path) -> None:
    """Nor do functions import anything that is gone, as far as data-parallel members need them."""
    package = without(method, tmp_path)
    environment = {"PYTHONPATH": str(package.parent), "HETCTL_SITE": "local"}
    python = python_without_training(tmp_path)
    project = new_project(tmp_path / "project", python=python, environment=environment)
    for line in (
        "profile import rates.csv",
        "plan",
        "simulate --gpus 4",
        "sites show local",
        "submit --wait",
        "status",
        "report",
    ):
        done = project.hetctl(*line.split())
        assert done.code == 0, done.stdout + done.stderr


def test_a_driver_loads_no_method_before_it_needs_one() -> None:
    code = "import hetctl.runtime.driver.driver, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if name.startswith("hetctl.methods")] == []
