"""Broadcast of the agents' environment from node to node: which node reads it from which."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

from hetctl.cluster.launchers.container import project_of
from hetctl.cluster.launchers.launch_spec import Launcher
from hetctl.model.errors import BadInputError
from hetctl.model.site import Site
from hetctl.runtime.agent.messages import Archive, SourceRequest
from hetctl.runtime.job_logs import log_line
from hetctl.runtime.transport import Address
from hetctl.storage.patience import PATIENT

LONGEST_CHAIN = 64
"""Most nodes that read one from another in a row, so that each sends once, which is fastest.

Behind more, a slow or lost node would hold up too many, and each node serves two.
"""


class BroadcastTree:
    """Nodes that have, or are getting, the archive.

    Parameters
    ----------
    nodes : int
        Number of nodes of the job.
    """

    def __init__(self, nodes: int) -> None:
        self._fan_out = 1 if nodes <= LONGEST_CHAIN else 2
        self._serving: dict[str, Address] = {}
        # Those that can serve another one.
        self._open: dict[str, Address] = {}
        self._sources: dict[str, str] = {}
        self._readers: Counter[str] = Counter()

    def source_for(self, request: SourceRequest) -> Address | None:
        """Return from where a node is to read; None: the shared file system.

        A node that asks again reads from no node that reads from it, directly or not.
        """
        name = request.address.name
        for gone in {name, request.failed}:
            source = self._sources.pop(gone, None)
            if source in self._serving:
                self._readers[source] -= 1
                self._open[source] = self._serving[source]
        self._serving.pop(request.failed, None)
        self._open.pop(request.failed, None)
        found = next((one for one in self._open.values() if not self._reads_from(one.name, name)), None)
        if found:
            self._sources[name] = found.name
            self._readers[found.name] += 1
            if self._readers[found.name] >= self._fan_out:
                del self._open[found.name]
        self._serving[name] = request.address
        if self._readers[name] < self._fan_out:
            self._open[name] = request.address
        return found

    def _reads_from(self, node: str | None, source: str) -> bool:
        while node is not None and node != source:
            node = self._sources.get(node)
        return node is not None


def archive_of(site: Site, folder: Path) -> Archive | None:
    """Return the archive of a site's environment; None if agents start from the shared file system.

    Parameters
    ----------
    folder : Path
        Folder of the run, of a profiling job or of a test.

    Raises
    ------
    BadInputError
        If there is no such file.
    """
    if site.stage is None:
        return None
    path = project_of(folder) / os.path.expandvars(site.stage)
    try:
        found = PATIENT.call(path.stat)
    except (FileNotFoundError, NotADirectoryError):
        raise BadInputError(
            f"there is no {path}, which `stage` of site {site.name!r} names",
            "make it: tar --zstd -cf FILE -C ENVIRONMENT .",
        ) from None
    key = hashlib.sha256(f"{path} {found.st_size} {found.st_mtime_ns}".encode()).hexdigest()[:16]
    # Which is the same on all nodes, and sbcast expands no variables of a node.
    home = site.stage_folder.replace("$USER", os.environ.get("USER", "$USER"))
    return Archive(str(path), home, found.st_size, key, site.network.control)


def broadcast(archive: Archive, launcher: Launcher, limit_s: float) -> None:
    """Have the launcher's own program bring the archive to all nodes, if there is one on this machine.

    Where it fails, as where one node is lost, nodes read from one another.

    Parameters
    ----------
    limit_s : float
        Time limit in seconds.
    """
    if not launcher.broadcast or "$" in archive.folder or shutil.which(launcher.broadcast[0]) is None:
        return
    command = (*launcher.broadcast, archive.path, f"{archive.folder}/{archive.name}")
    began = time.monotonic()
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=limit_s, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip() or error
        log_line(f"environment: {command[0]} has failed, and nodes read it from one another: {said}")
    else:
        log_line(f"environment: {command[0]} brought it to all nodes in {time.monotonic() - began:.1f} s")
