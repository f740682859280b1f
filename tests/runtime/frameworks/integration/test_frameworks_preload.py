"""Imports of a template: without the packages that no rank needs, which the user's code may import later."""

import os
import subprocess
import sys

import pytest

from hetctl.model.training_settings import FRAMEWORKS

pytestmark = pytest.mark.training

PRELOAD = """
import importlib, sys
from hetctl.runtime.frameworks import load_framework, preload_framework
preload_framework({name!r})
load_framework({name!r})
print(*(name for name in {withheld!r} if name in sys.modules))
for name in {withheld!r}:
    importlib.import_module(name)
"""


@pytest.mark.parametrize("name", [name for name, entry in FRAMEWORKS.items() if entry.withheld])
def test_withheld_packages_are_left_to_the_user(name):
    code = PRELOAD.format(name=name, withheld=FRAMEWORKS[name].withheld)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_a_package_that_fails_to_import_ends_no_template(tmp_path):
    (tmp_path / "tensorboard.py").write_text("raise RuntimeError('incompatible versions of protobuf')")
    code = "from hetctl.runtime.frameworks import preload_framework as preload; preload('pytorch'); print(1)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "1\n"
