"""Python that the documentation shows: programs of three tools, and a notebook, run as they stand there."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
DIGITS = ROOT / "hetctl/examples/digits-pytorch/digits.py"
TOOLS = {
    "hetctl": (),
    "Ray Tune": ("ray",),
    "Optuna and submitit": ("optuna", "submitit"),
}
NOTEBOOK = DOCS / "python.ipynb"
WRITE = "%%writefile "


def program_of(tool):
    found = re.search(rf"^## {tool}\n\n```python\n(.*?)^```", (DOCS / "lines.md").read_text(), re.M | re.S)
    return found[1]


def lines_of(tool):
    return len([line for line in program_of(tool).splitlines() if line.strip()])


def environment():
    own = {name: value for name, value in os.environ.items() if name != "HETCTL_HOME"}
    return own | {"HETCTL_SITE": "local", "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}


def test_the_lines_are_counted_right_and_hetctl_needs_the_fewest():
    rows = re.findall(r"^\| \[([^]]+)\]\(\S+\) \| (\d+) \|", (DOCS / "lines.md").read_text(), re.M)
    assert {tool: int(count) for tool, count in rows} == {tool: lines_of(tool) for tool in TOOLS}
    assert min(TOOLS, key=lines_of) == "hetctl"


@pytest.mark.training
@pytest.mark.weekly
@pytest.mark.parametrize("tool", TOOLS)
def test_each_program_trains_the_example_and_leaves_its_best_weights(tmp_path, tool):
    """Submitit finds no Slurm on its path, and so runs its jobs here."""
    if missing := [name for name in TOOLS[tool] if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed")
    shutil.copy(DIGITS, tmp_path)
    (tmp_path / "program.py").write_text(program_of(tool))
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment() | ({"PATH": str(Path(sys.executable).parent)} if "submitit" in tool else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = float(done.stdout.splitlines()[-1])
    assert accuracy_of(tmp_path / "best.pt") == pytest.approx(said, abs=1e-6)
    assert said > 0.85


def accuracy_of(file):
    """Return the validation accuracy of a network with these weights."""
    import torch

    shown: dict[str, object] = {}
    exec(DIGITS.read_text(), shown)
    state = torch.load(file, weights_only=True)
    model = shown["model_fn"]({"filters": len(state["0.bias"]), "learning_rate": 0.1})["model"]
    model.load_state_dict(state)
    _, (x, y) = shown["input_fn"](None)
    with torch.no_grad():
        return float(shown["accuracy"](model.eval()(torch.as_tensor(x)), torch.as_tensor(y)))


def run_cells(cells):
    """Run the code of cells in order, as a notebook would; return the text that each shows."""
    names: dict[str, object] = {"__name__": "notebook"}
    shown = []
    for source in cells:
        if source.startswith(WRITE):
            name, _, text = source.removeprefix(WRITE).partition("\n")
            Path(name).write_text(text)
            shown.append(f"Writing {name}\n")
            continue
        *before, last = ast.parse(source).body
        is_value = isinstance(last, ast.Expr)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(ast.Module(before if is_value else [*before, last], []), "cell", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if is_value else None
            if value is not None:
                print(value)
        shown.append(printed.getvalue())
    return shown


PROGRAM = """\
import json
import sys

sys.path[:0] = ["", sys.argv[1]]
from test_app_python_docs import run_cells

print(json.dumps(run_cells(json.loads(sys.stdin.read()))))
"""


@pytest.mark.training
def test_the_notebook_runs_in_order_and_shows_what_it_shows(tmp_path):
    """HETCTL_REGENERATE=1 writes what the cells show into the notebook."""
    book = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)],
        cwd=tmp_path,
        env=environment(),
        input=json.dumps(["".join(cell["source"]) for cell in cells]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    texts = json.loads(done.stdout.splitlines()[-1])
    if os.environ.get("HETCTL_REGENERATE"):
        for number, (cell, text) in enumerate(zip(cells, texts, strict=True), start=1):
            output = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell |= {"execution_count": number, "outputs": [output] if text else []}
        NOTEBOOK.write_text(json.dumps(book, indent=1) + "\n")
    for cell, text in zip(cells, texts, strict=True):
        kept = "".join(line for output in cell["outputs"] for line in output["text"])
        # Numbers differ with the machine; words and their number do not.
        assert re.findall(r"[A-Za-z_]{3,}", kept) == re.findall(r"[A-Za-z_]{3,}", text)
