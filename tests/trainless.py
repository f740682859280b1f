"""A Python that runs every module of hetctl as it is, but for what ranks do: they only pretend to train.

In place of training and of measuring a point they run `train` and `measure` of the workbench, which write the
events and obey the driver as those do, without TensorFlow. A test starts many of these processes, most of
them for commands: whatever takes long to import is imported by the agents alone.
"""

from __future__ import annotations

import os
import runpy
import sys

AGENT, DRIVER = "hetctl.runtime.agent", "hetctl.runtime.driver"
SIGNAL_DELAY = "TEST_SIGNAL_DELAY_S"
"""Variable with the `signal_delay_s` of the driver, for tests on slow machines."""


def main(executable: str) -> None:
    """Run ``[-u] -m MODULE ARGUMENTS`` as Python would, but for the trainer."""
    sys.executable = executable
    arguments = [argument for argument in sys.argv[1:] if argument != "-u"]
    assert arguments.pop(0) == "-m", sys.argv
    sys.argv = arguments
    if arguments[0] == AGENT:
        pretend()
    if arguments[0] == DRIVER:
        drive()
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def pretend() -> None:
    """Have the ranks of this agent pretend."""
    from workbench import measure, measure_layers, on_leader, train

    from hetctl.runtime import frameworks
    from hetctl.runtime.worker import worker
    from hetctl.runtime.worker.messages import MEASURE, MEASURE_LAYERS, TRAIN

    frameworks.preload_framework = lambda _name: None
    pretended = {TRAIN: train, MEASURE: measure, MEASURE_LAYERS: measure_layers}
    worker.WORK |= {kind: on_leader(one) for kind, one in pretended.items()}


def drive() -> None:
    """Run the driver with the test's `signal_delay_s`, and end."""
    from hetctl.runtime.driver.__main__ import SIGNAL_DELAY_S, main

    sys.exit(main(float(os.environ.get(SIGNAL_DELAY, SIGNAL_DELAY_S))))
