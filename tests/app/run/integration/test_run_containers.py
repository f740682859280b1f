"""A run whose members are trained in a container, of which a stand-in keeps the command line."""

from __future__ import annotations

import shutil

from workbench import pretending, pretending_project

from hetctl.cluster.launchers.container import PACKAGE, package_link
from hetctl.runtime.driver.agent_pool import link_package

RUN = "trio-001"
STAND_IN = """\
#!/bin/bash
# apptainer exec OPTIONS.. IMAGE COMMAND..
echo "$*" >>{calls}
shift
while [[ $1 == -* ]]; do
    case $1 in --pwd=*) cd "${{1#--pwd=}}";; esac
    shift
done
shift
INSIDE=yes exec "$@"
"""
SITE = """\
extends: local
container: {{image: img.sif, engine: apptainer, binds: [/data], gpus: none, python: {python}}}
"""


def test_profile_and_run_train_in_the_container_and_the_driver_outside(tmp_path, monkeypatch):
    calls, shims = tmp_path / "calls", tmp_path / "bin"
    shims.mkdir()
    (shims / "apptainer").write_text(STAND_IN.format(calls=calls))
    (shims / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", str(shims), prepend=":")
    project = pretending_project(tmp_path, pretending(a="{epochs: 2}", b="{epochs: 2}", c="{epochs: 2}"))
    inside = shutil.copy(project.python, tmp_path / "python-inside")
    (project.path / "site-configs").mkdir()
    (project.path / "site-configs/local.yaml").write_text(SITE.format(python=inside))
    assert project.here("profile", "--json").code == 0
    measured = calls.read_text().count("hetctl.runtime.agent")
    assert measured >= 1
    done = project.here("submit", "--wait", "--json")
    assert (done.code, done.json["state"]) == (0, "finished")
    run = project.home.run(RUN)
    assert package_link(run.path).resolve() == PACKAGE
    lines = calls.read_text().splitlines()
    for line in lines:
        assert line.startswith(f"exec --bind={project.path}:{project.path} --bind={PACKAGE}:{PACKAGE}:ro")
        assert f"--bind=/data:/data --pwd={project.path} img.sif env PYTHONPATH=" in line
    assert len([line for line in lines if "hetctl.runtime.agent" in line]) > measured
    assert not any("hetctl.runtime.driver" in line for line in lines)


def test_the_package_is_found_through_a_link_that_follows_an_upgrade(tmp_path) -> None:
    link_package(tmp_path)
    link = package_link(tmp_path)
    assert (link.readlink(), (link / "runtime").is_dir()) == (PACKAGE, True)
    link.unlink()
    link.symlink_to("/gone")
    link_package(tmp_path)
    link_package(tmp_path)
    assert link.readlink() == PACKAGE
