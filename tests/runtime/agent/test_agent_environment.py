"""An environment that comes to a node from sources that a driver names, as processes of this machine."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from workbench import small_environment

from hetctl.model.serialization import encode
from hetctl.model.site import Queue, Site
from hetctl.runtime.agent.environment import UnusableError, provide
from hetctl.runtime.agent.joining import DriverAddress
from hetctl.runtime.agent.messages import ENVIRONMENT, SourceRequest
from hetctl.runtime.driver.broadcast import BroadcastTree, archive_of
from hetctl.runtime.transport import Address, Listener, connect

FILLER = 3 * 2**20


@pytest.fixture
def driver(tmp_path):
    """A driver that names the sources in `sources`, and keeps what it was asked; its address in `address`."""
    made = Driver(tmp_path)
    yield made
    made.listener.close()


class Driver:
    def __init__(self, folder):
        run = folder / "project" / ".hetctl" / "runs" / "r"
        run.mkdir(parents=True)
        small_environment(folder / "project", FILLER)
        site = Site(*("s", "slurm", "srun", 1, 1, 1, 1, (Queue("q"),)), stage="environment.tar.zst")
        self.archive = archive_of(replace(site, stage_folder=str(folder / "node")), run.parent)
        self.listener = Listener("key")
        self.address = DriverAddress(**vars(self.listener.address), orphaned_s=60.0, environment=self.archive)
        self.sources, self.asked = [], []
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self):
        while True:
            try:
                facts, connection = self.listener.wait(60.0)
            except TimeoutError:
                return
            self.asked.append(facts[ENVIRONMENT])
            source = self.sources.pop(0) if self.sources else None
            connection.send({ENVIRONMENT: source and encode(source)})
            connection.close()


def test_a_node_goes_on_where_a_killed_source_has_ended_and_serves_others(driver):
    dying = Listener("key")
    driver.sources = [dying.address]
    content = Path(driver.archive.path).read_bytes()

    def die():
        start, connection = dying.wait(60.0)
        assert start == 0
        for block in (b"", content[: 2**20]):
            connection.send(len(block))
            connection.send_bytes(memoryview(block))
        connection.close()
        dying.close()

    threading.Thread(target=die, daemon=True).start()
    found = provide(driver.address)
    first, second = driver.asked
    assert (first["failed"], second["failed"]) == ("", dying.address.name)
    assert (found.root / "bin" / "python").exists()
    assert (found.packages / "hetctl" / "model" / "site.py").exists()
    # The rest came from the shared file system, and all of it can be had from here.
    own = Address(**second["address"])
    reader = connect(own, FILLER, 10.0)
    block, received = memoryview(bytearray(2**20)), b""
    while len(received) < len(content) - FILLER:
        if count := reader.receive(10.0):
            reader.receive_bytes(block[:count])
            received += block[:count]
    assert received == content[FILLER:]
    # A second agent of this machine brings nothing, and the last one removes it.
    other = provide(driver.address)
    assert (other.folder, len(driver.asked)) == (found.folder, 2)
    other.leave()
    assert found.root.exists()
    os.close(other.lock)
    found.leave()
    assert not found.root.exists()


def test_an_unusable_archive_says_why(driver, tmp_path):
    bad = tmp_path / "bad.tar.gz"
    bad.write_bytes(b"no archive")
    archive = replace(driver.archive, path=str(bad), bytes=10, key="bad")
    with pytest.raises(UnusableError, match=r"cannot be unpacked: .*gzip"):
        provide(replace(driver.address, environment=archive))
    (tmp_path / "node" / f"hetctl-{os.geteuid()}").chmod(0o777)
    with pytest.raises(UnusableError, match="another user's: change stage_folder"):
        provide(driver.address)


def asks(tree, name, failed=""):
    found = tree.source_for(SourceRequest(Address("h", 1, "key", name), failed))
    return found and found.name


@pytest.mark.parametrize(("nodes", "sources"), [(4, "-abc"), (65, "-aab")])
def test_few_nodes_form_a_chain_and_many_a_tree(nodes, sources):
    tree = BroadcastTree(nodes)
    assert [asks(tree, name) or "-" for name in "abcd"] == list(sources)


def test_a_node_does_not_read_from_one_that_reads_from_it():
    tree = BroadcastTree(4)
    for name in "abcd":
        asks(tree, name)
    # c is lost, then the root; d and b have the most that is left.
    assert asks(tree, "d", failed="c") == "b"
    assert asks(tree, "b", failed="a") is None
    assert asks(tree, "e") == "d"
    # A source that cannot be reached is named no more, and the one that it read is free.
    assert asks(tree, "e", failed="d") == "b"
