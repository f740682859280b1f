"""blaunch: runs a command on another host of the job, here or there, and passes its arguments as ssh does."""

from __future__ import annotations

import os
from pathlib import Path

from .client import RefusedError, parse

SESSION_FOLDER = "OMPI_MCA_orte_tmpdir_base"


def main(arguments) -> int:
    options, words = parse(arguments, {"-n": 0, "-z": 1}, "Usage: blaunch [-n] [-z host] [host] command ...")
    host = dict(options).get("-z") or words.pop(0)
    if host not in os.environ.get("LSB_HOSTS", "").split():
        raise RefusedError(f"{host}: Host is not in the job's allocation")
    os.environ["LSF_STANDIN_HOST"] = host
    # As on hosts with disks of their own: daemons of Open MPI that make the same folder at once may end.
    os.environ[SESSION_FOLDER] = str(folder_of(host))
    os.execvp("sh", ["sh", "-c", " ".join(words)])


def folder_of(host: str) -> Path:
    """Return the host's folder for temporary files."""
    folder = Path(os.environ["LSF_STANDIN"]) / "tmp" / host
    folder.mkdir(parents=True, exist_ok=True)
    return folder
