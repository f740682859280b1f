"""Wheel, sdist and editable installs find the templates and the site files."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hetctl.cli.main import EXTRAS

ROOT = Path(__file__).parent.parent
EXAMPLES = ["ddp", "digits", "digits-pytorch", "hugging-face", "hydra", "lightning", "script"]
LOOK = """
import importlib.resources as resources, hetctl
from pathlib import Path
from hetctl.inputs.site_file import list_sites
from hetctl.app.project import examples
print(Path(hetctl.__file__).parent.parent)
names = [path.name for path in (resources.files("hetctl") / "templates").iterdir()]
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
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
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
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*install, "--target", str(tmp_path), str(wheel)], check=True, timeout=300)
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
    assert {"hetctl/reports/page.html.j2", "hetctl/py.typed"} <= modules
    assert {"hetctl/templates/base.sh.j2", "hetctl/site-configs/local.yaml"} <= modules
    assert {"LICENSE", "README.md", "setup.py"} <= files


def test_the_plain_install_is_light(distributions):
    wheel, _ = distributions
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(name).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not [
        line
        for line in needed
        for heavy in ("tensorflow", "torch", "horovod", "mpi4py", *EXTRAS)
        if heavy in line
    ]
    of_extras = {
        canonicalize_name(one.name): str(one.marker)
        for line in lines
        if line.startswith("Requires-Dist: ") and (one := Requirement(line.split(": ", 1)[1])).marker
    }
    assert all(extra in of_extras[package] for package, extra in EXTRAS.items())
    assert "License-Expression: Apache-2.0" in lines or "License: Apache-2.0" in lines


PINNED = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>\S+)(?: ; (?P<marker>[^#]*?))?"
    r"(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})*)"
)
WITHOUT_HASH = {"torch": "pip would take the build for GPUs in the place of the one for CPUs"}


def pins():
    """Return what .ci/setup installs with hashes, as it is for this Python, and what without."""
    lines = (ROOT / ".ci/requirements.txt").read_text().splitlines()
    found = [PINNED.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found)
    return [one for one in found if one["marker"] is None or Marker(one["marker"]).evaluate()]


def test_every_package_that_ci_installs_has_hashes():
    assert len(pins()) > 100
    assert {one["name"] for one in pins() if not one["hashes"]} == WITHOUT_HASH.keys()
    setup = (ROOT / ".ci/setup").read_text()
    assert "verified=(--require-hashes --no-deps -r)" in setup
    assert "local_only=(--no-index --no-deps --no-build-isolation)" in setup


def test_what_hetctl_needs_is_among_the_pins():
    versions = {canonicalize_name(one["name"]): one["version"] for one in pins()}
    needed = [Requirement(text) for text in requires("hetctl")]
    assert len(needed) > 30
    wrong = [str(one) for one in needed if versions.get(canonicalize_name(one.name)) not in one.specifier]
    assert wrong == []


def test_actions_are_pinned_and_may_do_as_little_as_possible():
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    assert len(workflows) == 2
    for path in workflows:
        text = path.read_text()
        content = yaml.safe_load(text)
        assert content["permissions"] == {"contents": "read"}
        assert all("permissions" not in job for job in content["jobs"].values())
        uses = re.findall(r"uses: (.*)", text)
        pinned = [re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one) for one in uses]
        assert all(pinned), uses
        steps = [step for job in content["jobs"].values() for step in job["steps"]]
        checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
        assert checkouts
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)
