"""The recipes of CONTRIBUTING.md, each carried out in a copy of the repository by what it says alone."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from workbench import TINY, ProjectFolder, new_project, python_without_training

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "CONTRIBUTING.md"
COPIED = (
    "hetctl",
    "templates",
    "site-configs",
    "tests",
    "docs",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
)
FOLDERS = ("hetctl", "tests", "docs", "templates", "site-configs", ".ci")
PATH = re.compile(r"(?<![\w./-])[\w.-]+(?:/[\w.-]+)+")
BLOCK = re.compile(r"((?:[^\n]+\n)+)\n```(\w+) ?(\S*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code for a file, or for a table or section of it, with the paragraph that introduces it."""

    introduction: str
    kind: str
    file: str
    place: str
    text: str


def recipe(heading: str) -> list[Block]:
    found = re.search(rf"^### {heading}\n(.*?)(?=^##|\Z)", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{GUIDE.name} has no recipe {heading}"
    blocks = [Block(*parts) for parts in BLOCK.findall(found[1])]
    assert len(blocks) > 2
    for block in blocks:  # the page as it is rendered has no names in the first lines of blocks
        assert f"`{block.file}`" in block.introduction or not block.file
        assert re.search(rf"[`\"]{block.place}[`\"]", block.introduction) or not block.place
    return blocks


def is_test(line: str) -> bool:
    return line.startswith("python -m pytest ")


@dataclass
class Repository:
    """A copy of this repository, which commands import in place of it."""

    path: Path
    written: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "HETCTL_SITE"))}
        return inherited | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.path),
            "PYTEST_ADDOPTS": f"-q -p no:cacheprovider --basetemp={self.path.parent / 'pytest'}",
        }

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", command], cwd=self.path, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def follow(self, heading: str) -> None:
        """Carry out a recipe but for its tests."""
        for block in recipe(heading):
            self._apply(block)

    def test(self, heading: str) -> str:
        """Run the tests that a recipe names; return what they printed."""
        lines = [line for block in recipe(heading) for line in block.text.splitlines() if is_test(line)]
        return "".join(map(self.run, lines))

    def _apply(self, block: Block) -> None:
        if block.kind == "bash":
            for line in block.text.splitlines():
                if not is_test(line):
                    self.run(line)
            return
        path = self.path / block.file
        assert path.exists() is bool(block.place), block.file
        if not block.place:
            path.write_text(block.text)
        else:
            enter = enter_into_table if path.suffix == ".py" else enter_into_section
            path.write_text(enter(path.read_text(), block.place, block.text))
        if path.suffix == ".py" and not block.place:
            self.written.append(block.file)


def enter_into_table(source: str, table: str, text: str) -> str:
    """Enter the last paragraph into a table; imports go to the others, and the rest above the table."""
    *before, entry = text.strip().split("\n\n")
    imports = [one for one in before if one.startswith(("from ", "import "))]
    tree = ast.parse(source)
    last_import = max(node.end_lineno for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    (assignment,) = (node for node in tree.body if table in names_set_by(node))
    last = elements_of(assignment.value)[-1]
    lines = source.splitlines()
    line = lines[last.end_lineno - 1].encode()
    at = last.end_col_offset
    lines[last.end_lineno - 1] = f"{line[:at].decode()}, {entry}{line[at:].decode()}"
    lines.insert(assignment.lineno - 1, "\n\n".join(one for one in before if one not in imports))
    lines.insert(last_import, "\n".join(imports))
    return "\n".join(lines) + "\n"


def names_set_by(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def elements_of(table: ast.expr) -> list[ast.expr]:
    """Return what the outermost collection that is written out holds: the values of a dictionary."""
    for node in ast.walk(table):
        if isinstance(node, ast.Dict):
            return node.values
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return node.elts
    raise AssertionError("no table")


def enter_into_section(page: str, heading: str, text: str) -> str:
    """Put a paragraph at the end of a section."""
    changed, times = re.subn(
        rf"(^## {re.escape(heading)}\n.*?)(?=^## |\Z)",
        lambda found: f"{found[1]}{text}\n",
        page,
        flags=re.MULTILINE | re.DOTALL,
    )
    assert times == 1, heading
    return changed


RECIPES = ("A planner", "A batch system", "A site", "A launcher", "A framework")


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Iterator[Repository]:
    """A copy in which all recipes are followed."""
    path = tmp_path_factory.mktemp("copy") / "repository"
    path.mkdir()
    for name in COPIED:
        # Not copytree(), which would follow the links to templates and site-configs.
        subprocess.run(["cp", "-a", ROOT / name, path / name], check=True)
    made = Repository(path)
    assert made.run("python -c 'import hetctl; print(hetctl.__file__)'") == f"{path}/hetctl/__init__.py\n"
    for heading in RECIPES:
        made.follow(heading)
    files = " ".join(made.written)
    made.run(f"ruff check {files} && ruff format --check {files}")
    yield made
    shutil.rmtree(path)


@pytest.fixture
def project(tmp_path, repository) -> ProjectFolder:
    """A project whose commands are those of the copy; its ranks only pretend to train."""
    return new_project(
        tmp_path / "project",
        python=python_without_training(tmp_path),
        environment={"PYTHONPATH": str(repository.path), "HETCTL_SITE": "local"},
    )


def train_on(project: ProjectFolder, keys: str) -> Path:
    """Train an ensemble on a site that differs from `local` in these keys; return the job's script."""
    (project.path / "site-configs").mkdir()
    (project.path / "site-configs" / "mine.yaml").write_text(f"extends: local\n{keys}\n")
    project.environment["HETCTL_SITE"] = "mine"
    assert project.hetctl("profile", "import", "rates.csv").code == 0
    done = project.hetctl("submit", "--wait", "--json")
    assert done.code == 0, done.stdout + done.stderr
    assert {member["state"] for member in done.json["members"]} == {"converged"}
    (script,) = project.home.path.glob("**/*.sh")
    return script


def test_paths_that_the_guide_names_exist():
    text = GUIDE.read_text()
    written = {file for _, _, file, place, _ in BLOCK.findall(text) if file and not place}
    copied = set(re.findall(r"^cp \S+ (\S+)", text, re.MULTILINE))
    named = {path for path in PATH.findall(text) if path.endswith((".py", ".md", ".j2", ".yaml"))}
    named |= {path for path in PATH.findall(text) if path.split("/")[0] in FOLDERS}
    assert len(named) > 30
    assert sorted(path for path in named - written - copied if not (ROOT / path).exists()) == []


def test_a_planner_that_follows_the_recipe_plans(repository, project):
    assert " passed" in repository.test("A planner")
    assert project.hetctl("profile", "import", "rates.csv").code == 0
    plan = project.hetctl("plan", "--planner", "shortest-first", "--json")
    assert (plan.code, plan.json["planner"]) == (0, "shortest-first")
    assert {share["gpus"] for each in plan.json["rounds"] for share in each["allocations"]} == {1}


def test_a_batch_system_that_follows_the_recipe_trains(repository, project):
    assert " passed" in repository.test("A batch system")
    script = train_on(project, "batch_system: background")
    assert "\nrenice -n 10 $$ >/dev/null\n" in script.read_text()


def test_a_launcher_that_follows_the_recipe_starts_agents(repository, project):
    assert " passed" in repository.test("A launcher")
    train_on(project, "launcher: chrt")
    shown = project.hetctl("submit", "--new", "--dry-run")
    assert (shown.code, shown.stderr.count("chrt --batch 0 ")) == (0, 1)


def test_a_site_that_follows_the_recipe_is_shown(repository, project):
    assert " passed" in repository.test("A site")
    golden = repository.path / "tests/cluster/render/golden/teaching"
    assert sorted(path.name for path in golden.iterdir())
    shown = project.hetctl("sites", "show", "teaching", "--json")
    assert (shown.code, shown.json["site"]["nodes"]) == (0, 12)
    assert project.hetctl("sites", "check", "teaching", "--json").json["site"] == "teaching"


def test_the_house_stands_when_all_recipes_are_followed(repository):
    held = "tests/test_house.py tests/test_docs.py tests/inputs/test_inputs_json_schemas.py"
    assert " passed" in repository.run(f"python -m pytest {held}")


LINEAR = """\
name: linear
framework: linear
functions: {input_fn: tiny_linear:input_fn, model_fn: tiny_linear:model_fn}
stop: {metric: val_accuracy, mode: max, patience: 5, max_epochs: 2}
members:
  - {name: few, max_gpus: 1, config: {units: 32}}
  - {name: all, max_gpus: 1, config: {learning_rate: 0.1}}
"""


@pytest.mark.training
def test_a_framework_that_follows_the_recipe_trains(repository, tmp_path):
    assert " passed" in repository.test("A framework")
    environment = {"PYTHONPATH": str(repository.path), "HETCTL_SITE": "local"}
    project = new_project(tmp_path / "project", LINEAR, environment=environment)
    for module in ("tiny_linear.py", "handwriting.py"):
        shutil.copy(TINY / module, project.path)
    profile = project.hetctl("profile", "--json")
    assert (profile.code, profile.json["measured"]) == (0, 2)
    run = project.hetctl("submit", "--wait", "--json")
    assert (run.code, run.json["state"]) == (0, "finished")
    assert project.epochs("linear-001") == {"few": [1, 2], "all": [1, 2]}
    best = {member["member"]: member["best"] for member in run.json["members"]}
    assert best["all"] > best["few"] > 0.1
