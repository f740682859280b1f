"""A project that several users share, by the group of its folder."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import textwrap

import pytest
from workbench import new_project

from hetctl.catalog.catalog import Catalog
from hetctl.runtime.transport import Address
from hetctl.runtime.worker.messages import write_address
from hetctl.storage.paths import Home

GROUP, OTHER = 4321, 4322
"""Numbers of the group of the project, and of a user in it."""
SITE = "extends: local\nshared_with: group\n"


# acl(5), and linux/posix_acl_xattr.h: version; owner, owning group, another group, mask and others.
ACL = b"".join(
    [struct.pack("<I", 2)]
    + [
        struct.pack("<HHI", tag, rights, number)
        for tag, rights, number in (
            *((0x01, 7, 2**32 - 1), (0x04, 0, 2**32 - 1), (0x08, 7, GROUP)),
            *((0x10, 7, 2**32 - 1), (0x20, 0, 2**32 - 1)),
        )
    ]
)
"""List that gives a group, which is not a file's, all rights."""


@pytest.fixture(params=["group", "acl"])
def project(tmp_path, request):
    """A project of the group, or one that an access control list opens to it."""
    if os.geteuid() != 0:
        pytest.skip("only root can take another user's place")
    made = new_project(tmp_path / "project")
    if request.param == "group":
        os.chown(made.path, 0, GROUP)
    made.path.chmod(0o2770)
    if request.param == "acl":
        for kind in ("access", "default"):
            os.setxattr(made.path, f"system.posix_acl_{kind}", ACL)
    (made.path / "site-configs").mkdir(exist_ok=True)
    (made.path / "site-configs/lab.yaml").write_text(SITE)
    return made


def modes(folder):
    found = {path: path.lstat() for path in [folder, *folder.rglob("*")]}
    return {(oct(one.st_mode), one.st_gid) for one in found.values()}


def test_another_user_of_the_group_writes_the_catalog_under_the_lock(project):
    home, owner = Home(project.path / ".hetctl"), project.path.stat().st_gid
    home.path.mkdir(mode=0o700)
    (home.path / "before").touch(mode=0o600)
    assert project.here("submit", "--dry-run", "--site", "lab", "--gpus", "1").code == 0
    with Catalog.open(home.catalog):
        pass
    assert modes(home.path) == {(oct(0o42770), owner), (oct(0o100660), owner)}
    address = home.path / "driver.json"
    write_address(address, Address("h", None, "key"))
    assert address.stat().st_mode & 0o777 == 0o600
    # A user of the group, who can reach the folder.
    for folder in project.path.parents:
        if not (mode := folder.stat().st_mode) & 0o001:
            folder.chmod(mode | 0o011)
    code = f"""
        import os
        from hetctl.app.project import Project

        def write(run):
            project = Project.here()
            project.site("lab")
            with project.writing():
                project.home.run(run).create()

        # Load all modules first: the other user may not be able to read this Python.
        write("q")
        os.umask(0o077), os.setgroups([]), os.setgid({GROUP}), os.setuid({OTHER})
        write("r")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "HOME": str(project.path)},
        cwd=project.path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = home.run("r").path
    assert (run.stat().st_uid, run.stat().st_gid, oct(run.stat().st_mode)) == (OTHER, owner, oct(0o42770))
    assert modes(home.path) - {(oct(0o100600), owner)} == {(oct(0o42770), owner), (oct(0o100660), owner)}
