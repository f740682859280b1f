"""Make the pictures anew from a finished project: ``python docs/images/make.py demo`` (needs chromium)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from hetctl.app.project import Project
from hetctl.app.run.status import compared_status
from hetctl.reports.run_page import render_page
from hetctl.reports.status_table import status_table

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT = 1200, 1480
"""Of the screenshot, in pixels: the page from its top to the end of the learning curves."""
COLUMNS = 110
"""Of the terminal: those of the table with all rounds of the example."""
# Rich would have viewers fetch a font from a server.
SVG_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
CHROMIUM = (
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", f"--window-size={WIDTH},{HEIGHT}"),
)


def main(project: str) -> None:
    """Write ``status.svg`` and ``report.png`` beside this file."""
    os.chdir(project)
    status = compared_status(Project.here(), None)
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, highlight=False)
        console.print(status_table(status, COLUMNS))
    svg = console.export_svg(title="hetctl status", code_format=SVG_FORMAT)
    (HERE / "status.svg").write_text(svg, encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(render_page(status), encoding="utf-8")
        own = f"--user-data-dir={folder}/chromium", f"--screenshot={HERE / 'report.png'}"
        subprocess.run([*CHROMIUM, *own, page.as_uri()], check=True, timeout=120)


if __name__ == "__main__":
    main(sys.argv[1])
