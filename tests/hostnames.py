"""Names of nodes in Slurm's notation, for stand-ins of its commands."""

import re
from pathlib import Path

IMPORT = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom hostnames import hostnames\n"
"""Lines of a stand-in that import `hostnames`."""


def hostnames(text: str) -> list[str]:
    """Return the names that a text such as ``n[1-3,05],login`` stands for."""
    found = []
    for name, numbers in re.findall(r"([^\[,]+)(?:\[([^\]]*)\])?", text):
        spans = [part.split("-") for part in numbers.split(",") if part]
        found += [
            f"{name}{n:0{len(span[0])}d}" for span in spans for n in range(int(span[0]), int(span[-1]) + 1)
        ] or [name]
    return found
