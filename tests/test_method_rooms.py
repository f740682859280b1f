"""Methods are whole: each has rooms of its own, which few others import."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

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
        "runtime/worker/visiting.py",
        "runtime/worker/hop_resources.py",
        "runtime/data/state_file.py",
        "app/hopper.py",
        "app/plan/hop_phases.py",
        "cli/cmd_hopper.py",
    ),
    "pipeline": (
        "methods/pipeline",
        "runtime/driver/pipeline_job.py",
        "runtime/stages",
        "app/pipeline.py",
        "app/plan/pipeline_phases.py",
        "cli/cmd_pipeline.py",
    ),
}
"""Files and folders that are a method's alone: decisions, its part in a job, use cases and commands."""

TASKS = "the table of a rank's tasks, which are imported once on a node and not in each rank"
COMPARED = "with --mode auto, the modes are compared by what they would cost"
ENTRIES = {
    "automl": {
        "app/simulate.py": "trials can be simulated instead of members: types alone",
        "app/plan/planning.py": "a plan asks for trials as the search does: its type alone",
        "runtime/driver/driver.py": "a run may have a search: its type alone",
        "runtime/driver/run_members.py": "a run may have a search: its type alone",
    },
    "balance": {
        "runtime/worker/training.py": "a group may be balanced: its type alone",
    },
    "hopper": {
        "app/plan/multi_mode_plan.py": COMPARED,
        "runtime/worker/context.py": "a rank keeps what visits need: its type alone",
        "runtime/worker/worker.py": TASKS,
    },
    "pipeline": {
        "app/plan/multi_mode_plan.py": COMPARED,
        "runtime/worker/worker.py": TASKS,
    },
}
"""Other modules that import a method's rooms when they are imported themselves, each with the reason."""


def lies_in(path: str, room: str) -> bool:
    return path == room or path.startswith(f"{room}/")


def module_of(path: str) -> str:
    return ".".join(("hetctl", *Path(path).with_suffix("").parts))


@cache
def imported_at_once(path: Path) -> frozenset[str]:
    """Return the modules that a module imports outside of functions, also those for its types alone."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif not isinstance(node, ast.FunctionDef):
            nodes.extend(ast.iter_child_nodes(node))
    return frozenset(found)


@pytest.mark.parametrize("method", ROOMS)
def test_a_method_is_imported_by_its_entries_alone(method: str) -> None:
    assert [room for room in ROOMS[method] if not (PACKAGE / room).exists()] == []
    rooms = [module_of(room) for room in ROOMS[method]]
    found = set()
    for path in PACKAGE.glob("**/*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not any(lies_in(name, room) for room in ROOMS[method]):
            modules = [module for module in imported_at_once(path) if module.startswith("hetctl.")]
            if any(f"{module}.".startswith(f"{room}.") for module in modules for room in rooms):
                found.add(name)
    assert found == set(ENTRIES[method])


COMPARING = ("app/plan/multi_mode_plan.py",)
"""Module of ``--mode auto``, which compares all methods: nothing imports it but plans in that mode."""


def test_plans_in_several_modes_alone_compare_methods() -> None:
    modules = {module_of(name) for name in COMPARING}
    importing = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.glob("**/*.py")
        if modules & imported_at_once(path)
    }
    assert importing <= set(COMPARING)


def test_a_driver_loads_no_method_before_it_needs_one() -> None:
    code = "import hetctl.runtime.driver.driver, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if name.startswith("hetctl.methods")] == []
