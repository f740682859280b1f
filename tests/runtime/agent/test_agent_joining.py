"""Agents that connect to a listener of this process, which answers as a driver does."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from hetctl.model.serialization import encode
from hetctl.runtime.agent.joining import (
    LONGEST_PAUSE_S,
    DismissedError,
    DriverAddress,
    DriverFile,
    OrphanedError,
    join,
    reconnect,
)
from hetctl.runtime.agent.messages import REJECTED, SHUTDOWN, AgentAssignment, AgentFacts
from hetctl.runtime.transport import Listener
from hetctl.runtime.worker.messages import write_address

FACTS = AgentFacts("agents", "n1", {}, (0,))
ASSIGNMENT = AgentAssignment("n1", (0,), "gpu", 1, 2**30, silence_s=30.0)
ATTEMPT_S = 0.1
"""Seconds of an attempt to connect."""


class Driver:
    """The driver's side: a listener, and the file with its address."""

    def __init__(self, path, orphaned_s=60.0):
        self.listener = Listener("key")
        self.path = path
        self.address = DriverAddress(**vars(self.listener.address), orphaned_s=orphaned_s)
        write_address(path, self.address)

    def answer(self, *answers):
        """Answer one agent after another in the background; None: close its connection."""

        def run():
            for answer in answers:
                _, connection = self.listener.wait(60.0)
                self.kept.append(connection)
                if answer is None:
                    connection.close()
                else:
                    connection.send(answer)

        self.kept = []
        threading.Thread(target=run, daemon=True).start()


@pytest.fixture
def driver(tmp_path):
    made = Driver(tmp_path / "driver.json")
    yield made
    made.listener.close()


def test_join_returns_the_assignment_of_the_driver(driver):
    driver.answer(encode(ASSIGNMENT))
    connection, assignment = join(driver.address, FACTS)
    assert assignment == ASSIGNMENT
    driver.kept[0].send({"start": 0})
    assert connection.receive(60.0) == {"start": 0}


def test_an_agent_says_why_the_driver_rejects_it(driver):
    driver.answer({REJECTED: "step agents sees 1 GPUs on n1, and not 4"})
    with pytest.raises(ConnectionError, match="sees 1 GPUs on n1, and not 4"):
        join(driver.address, FACTS)


def test_an_agent_returns_once_the_driver_takes_it(driver):
    """As long as the driver holds the connection of the last agent, it rejects the next one."""
    driver.answer(None, None, encode(ASSIGNMENT))
    _, assignment = reconnect(DriverFile(driver.path), FACTS, ATTEMPT_S)
    assert assignment == ASSIGNMENT


def test_an_agent_that_is_not_needed_does_not_return(driver):
    driver.answer(None, {SHUTDOWN: True})
    with pytest.raises(DismissedError, match="does not need"):
        reconnect(DriverFile(driver.path), FACTS, ATTEMPT_S)


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "another driver's"])
def test_the_file_tells_that_the_driver_has_ended(driver, is_gone):
    file = DriverFile(driver.path)
    driver.listener.close()
    if is_gone:
        driver.path.unlink()
    else:
        write_address(driver.path, replace(driver.address, key="another"))
    with pytest.raises(DismissedError, match="has ended"):
        reconnect(file, FACTS, ATTEMPT_S)


def test_a_driver_is_dead_if_this_machine_refuses(driver):
    driver.listener.close()
    with pytest.raises(OrphanedError) as found:
        reconnect(DriverFile(driver.path), FACTS, ATTEMPT_S)
    assert found.value.silent_s < driver.address.orphaned_s


def test_a_driver_lives_as_long_as_it_touches_its_file(tmp_path):
    """From another machine a refusal proves nothing: its network may be parted."""
    driver = Driver(tmp_path / "driver.json", orphaned_s=20.0)
    driver.listener.close()
    write_address(driver.path, replace(driver.address, host="127.0.0.1"))
    now_s, touches = 0.0, 0

    def sleep(seconds):
        nonlocal now_s, touches
        now_s += seconds
        if now_s < 100.0:
            touches += 1
            os.utime(driver.path, ns=(touches, touches))

    with pytest.raises(OrphanedError) as found:
        reconnect(DriverFile(driver.path), FACTS, ATTEMPT_S, clock=lambda: now_s, sleep=sleep)
    assert found.value.silent_s == pytest.approx(now_s - 100.0, abs=LONGEST_PAUSE_S)
    assert found.value.silent_s > 20.0
