"""Faults of a file system for tests, injected by a library that is preloaded into processes."""

from __future__ import annotations

import functools
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).with_name("disk_faults.c")


@functools.cache
def library() -> Path:
    """Compile the library."""
    built = Path(tempfile.mkdtemp(prefix="hetctl-faults-")) / "disk_faults.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", built, SOURCE, "-ldl"], check=True)
    return built


class Faults:
    """Control of the faults of the processes with this environment."""

    def __init__(self, folder: Path) -> None:
        self._control = folder / "faults"
        self.environment = {"LD_PRELOAD": str(library()), "DISK_FAULTS": str(self._control)}

    def begin(self, seconds: float, *faults: tuple[int, str, str]) -> None:
        """Let operations fail from now on: error, names of operations (or "all") and part of the path."""
        lines = [f"{time.time() + seconds} {number} {names} {part}\n" for number, names, part in faults]
        new = self._control.with_suffix(".new")
        new.write_text("".join(lines))
        new.replace(self._control)

    def hits(self) -> Counter[str]:
        """Number of failures by operation and name of the file."""
        found = self._control.with_name("faults.hits")
        lines = found.read_text().splitlines() if found.exists() else []
        return Counter(f"{line.split()[0]} {Path(line.split()[1]).name}" for line in lines)
