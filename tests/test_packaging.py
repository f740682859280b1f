"""Wheel, sdist and editable installs find the templates and the site files."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ["ddp", "digits", "hugging-face", "hydra", "lightning"]
LOOK = """
import importlib.resources as resources, hetctl
from pathlib import Path
from hetctl.inputs.site_file import list_sites
from hetctl.app.init_project import examples
print(Path(hetctl.__file__).parent.parent)
names = [path.name for path in resources.files("hetctl_templates").iterdir()]
print(sorted(name for name in names if name.endswith(".j2")))
print([name for name, _ in list_sites(project=None, home=None)])
print(examples())
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Build from a copy of what git knows, as a release is."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def look(python_path):
    environment = {**os.environ, "PYTHONPATH": str(python_path)}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, cwd="/", env=environment, check=True
    )
    return done.stdout.splitlines()


def expected():
    templates = sorted(path.name for path in (ROOT / "templates").glob("*.j2"))
    sites = sorted(path.stem for path in (ROOT / "site-configs").glob("*.yaml"))
    return [str(templates), str(sites), str(EXAMPLES)]


def test_an_installed_wheel_is_complete(distributions, tmp_path):
    wheel, _ = distributions
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path),
        str(wheel),
    ]
    subprocess.run(install, check=True, timeout=300)
    where, *found = look(tmp_path)
    assert where == str(tmp_path)
    assert found == expected()


def test_the_editable_install_is_complete():
    where, *found = look("")
    assert where == str(ROOT)
    assert found == expected()


def test_the_sdist_holds_what_the_wheel_holds(distributions):
    wheel, sdist = distributions
    with zipfile.ZipFile(wheel) as archive:
        modules = {name for name in archive.namelist() if name.startswith("hetctl/")}
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert modules <= files
    assert {"LICENSE", "README.md", "setup.py", "templates/base.sh.j2", "site-configs/local.yaml"} <= files


def test_the_plain_install_is_light(distributions):
    wheel, _ = distributions
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not [
        line for line in needed for heavy in ("tensorflow", "torch", "horovod", "mpi4py") if heavy in line
    ]
    assert "License-Expression: Apache-2.0" in lines or "License: Apache-2.0" in lines
