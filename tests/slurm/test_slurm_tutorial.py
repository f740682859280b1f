"""The tutorial: its files are written, for fewer epochs, and its commands run, as they stand in the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from workbench import ProjectFolder

pytestmark = [pytest.mark.slurm, pytest.mark.training]
PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.splitlines()]


def test_commands_of_the_tutorial_lead_to_a_report(slurm_cluster, tmp_path):
    project = ProjectFolder(tmp_path / "digits", environment=slurm_cluster.environment())
    assert "max_epochs: 6" in FILES["ensemble.yaml"]
    for name, text in FILES.items():
        (project.path / name).parent.mkdir(parents=True, exist_ok=True)
        (project.path / name).write_text(text.replace("max_epochs: 6", "max_epochs: 2"))
    for program, *arguments in COMMANDS:
        done = project.hetctl(*arguments)
        assert (program, done.code) == ("hetctl", 0), (arguments, done)
    status = project.hetctl("status", "--json").json
    assert (status["state"], len(status["members"])) == ("finished", 4)
    assert (project.path / "report.html").stat().st_size > 10_000
