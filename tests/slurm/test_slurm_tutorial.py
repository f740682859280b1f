"""The tutorial: its files are written, for a shorter run, and its commands run, as they stand in the page."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from tiny_networks import ENSEMBLES
from workbench import ProjectFolder

pytestmark = [pytest.mark.slurm, pytest.mark.training]
PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.splitlines()]
SHORTER = {
    "nets.py": ("from sklearn.datasets", "from handwriting"),
    "ensemble.yaml": ("max_epochs: 6", "max_epochs: 2"),
    "site-configs/mycluster.yaml": ("cores_per_node: 8", "cores_per_node: 2"),
}
"""The same digits, without each rank importing scikit-learn; preprocessing is measured on fewer cores."""


def test_commands_of_the_tutorial_lead_to_a_report(slurm_cluster, tmp_path):
    project = ProjectFolder(tmp_path / "digits", environment=slurm_cluster.environment())
    for name, text in FILES.items():
        old, new = SHORTER[name]
        assert old in text
        (project.path / name).parent.mkdir(parents=True, exist_ok=True)
        (project.path / name).write_text(text.replace(old, new))
    shutil.copy(ENSEMBLES / "handwriting.py", project.path)
    for program, *arguments in COMMANDS:
        done = project.here(*arguments)
        assert (program, done.code) == ("hetctl", 0), (arguments, done)
    status = project.here("status", "--json").json
    assert (status["state"], len(status["members"])) == ("finished", 4)
    assert (project.path / "report.html").stat().st_size > 10_000
