"""A round in lockstep on nodes that are folders of one machine: real leaders, and readers as trainers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.run import LOCKSTEP
from hetctl.model.site import Timeouts
from hetctl.runtime.data.loaders import LockstepLoader, PreprocessorPool
from hetctl.runtime.data.preprocessors import Preprocessors
from hetctl.runtime.data.round_inputs import RoundInputs, append_round
from hetctl.runtime.data.sampler import Stream, epoch_order
from hetctl.runtime.data.sharing import node_folder
from hetctl.runtime.data.sharing.node_folder import folder_of
from hetctl.runtime.data.sources import MapSource

SAMPLES = 200
PATIENCE_S = 60.0
PREFETCH_SAMPLES = 24
FORK = get_context("fork")
CODE = Path(__file__).parents[1]

LEADER = f"""
import os, sys, types
from pathlib import Path
from hetctl.runtime.data import loaders, node_exchange
from hetctl.runtime.data.sharing import node_folder
folder = Path(sys.argv[1]).parent
node_folder.MEMORY = folder / "memory"
loaders.PREFETCH_SAMPLES = {PREFETCH_SAMPLES}
node_exchange.load_framework = lambda name: types.SimpleNamespace(prepare=lambda cores, device, seed: None)
(folder / f"leader-{{os.environ['OMPI_COMM_WORLD_RANK']}}").write_text(str(os.getpid()))
sys.exit(node_exchange.main())
"""

DATA = """
import os, time
import numpy as np
class Rows:
    def __len__(self):
        return {samples}
    def __getitem__(self, number):
        if number == {bad}:
            raise ValueError(f"sample {{number}} is rotten")
        with open({log!r}, "a") as log:
            log.write(f"{{os.getpid()}} {{number}}\\n")
        return np.full(8, number, np.float32), np.int64(number)
def input_fn(data):
    rows = Rows()
    return {returned}
"""


class LedRound:
    """A round whose members have a GPU each; `nodes` has the batch sizes on each node."""

    def __init__(self, folder, nodes, *, bad=None, returned="rows, rows", **timeouts):
        self.folder, self.nodes, self.log = folder, nodes, folder / "log"
        patience = {"lockstep_s": PATIENCE_S, "samples_s": 2 * PATIENCE_S, "leaders_s": PATIENCE_S}
        self.timeouts = Timeouts(**patience | timeouts)
        (folder / "leader.py").write_text(LEADER)
        (folder / "rows.py").write_text(
            DATA.format(samples=SAMPLES, bad=bad, log=str(self.log), returned=returned)
        )
        self.inputs = self._inputs()
        append_round(folder / "lineups.jsonl", self.inputs)
        self.results = FORK.Queue()
        self.read = {
            (node, reader): FORK.Value("q", 0) for node in nodes for reader in range(len(nodes[node]))
        }
        self.readers = {}
        self.leaders = None

    def lead(self):
        """Start the leaders of all nodes."""
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        command = [*mpirun, "-np", str(len(self.nodes)), sys.executable, str(self.folder / "leader.py")]
        self.leaders = subprocess.Popen(
            [*command, str(self.folder / "lineups.jsonl"), "--round", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{CODE}"},
        )

    def start(self, node, reader, **how):
        """Start a reader, which goes through so many epochs."""
        process = FORK.Process(target=self._read, args=(node, reader), kwargs=how, daemon=True)
        process.start()
        self.readers[node, reader] = process

    def start_all(self, **how):
        for node, reader in self.read:
            self.start(node, reader, **how)

    def seen(self):
        """Return what each reader that has not been killed saw of each epoch."""
        alive = [process for process in self.readers.values() if process.exitcode != -signal.SIGKILL]
        return dict(self.results.get(timeout=PATIENCE_S) for _ in alive)

    def ended(self):
        """Return exit code and output of the leaders, once they have ended."""
        output, _ = self.leaders.communicate(timeout=PATIENCE_S)
        return self.leaders.returncode, output

    def ring(self, node):
        base = self.folder / "memory" / f"hetctl-{os.getuid()}"
        return base / folder_of("r", node) / self.inputs.lockstep_on(node).name

    def leader(self, rank):
        """Return the process number of a leader."""
        return int((self.folder / f"leader-{rank}").read_text())

    def prepared(self):
        """Return the samples that each process has prepared, in order."""
        by_process = defaultdict(list)
        for line in self.log.read_text().splitlines():
            process, number = map(int, line.split())
            by_process[process].append(number)
        return by_process

    def stop(self):
        for process in self.readers.values():
            process.kill()
            process.join()
        if self.leaders is not None:
            self.leaders.terminate()  # mpirun ends its ranks first
            print(self.leaders.communicate(timeout=PATIENCE_S)[0])

    def _inputs(self):
        placed = [
            (node, index, size) for node, sizes in self.nodes.items() for index, size in enumerate(sizes)
        ]
        members = tuple(Member(f"{node}-{index}", batch_size=size) for node, index, size in placed)
        functions = Functions("rows:input_fn", "rows:input_fn")
        return RoundInputs(
            run="r",
            run_key="r",
            index=0,
            ensemble=Ensemble("e", "none", functions, members, str(self.folder)),
            allocations=tuple(
                Allocation(f"{node}-{index}", 1, DATA_PARALLEL, 1.0, (Placement(node, (index,)),))
                for node, index, _ in placed
            ),
            sharing=LOCKSTEP,
            timeouts=self.timeouts,
        )

    def _read(self, node, reader, epochs=2, pause_s=0.0):
        lockstep = replace(self.inputs.lockstep_on(node), reader=reader)
        with node_folder.node_folder(folder_of("r", node)) as folder:
            pool = PreprocessorPool(Nobody(Rows(), 0), folder, check_s=0.1)
            batch = Stream(SAMPLES, self.nodes[node][reader], seed=1)
            loader = LockstepLoader(batch, pool, lockstep)
            seen = [self._epoch(loader, epoch, self.read[node, reader], pause_s) for epoch in range(epochs)]
            loader.close()
        self.results.put(((node, reader), seen))

    @staticmethod
    def _epoch(loader, epoch, progress, pause_s):
        seen = []
        for (x, y), chunk in loader.batches(epoch + 1, 0):
            assert y.tolist() == chunk.numbers.tolist()
            assert np.array_equal(x, np.repeat(y.astype(np.float32)[:, None], 8, axis=1))
            seen += y.tolist()
            progress.value += len(y)
            time.sleep(pause_s)
        return seen


class Nobody(Preprocessors):
    """The preprocessors of trainers for whom others prepare."""

    def prepare(self, *_):
        pass


class Rows(MapSource):
    """What the leaders' data are, too."""

    def __init__(self):
        super().__init__(self, "training")

    def __len__(self):
        return SAMPLES

    def _read(self, number):
        return np.full(8, number, np.float32), np.int64(number)


def orders(inputs, epochs):
    seed = inputs.lockstep_on("n1").seed
    return [epoch_order(SAMPLES, seed, epoch + 1).tolist() for epoch in range(epochs)]


def wait_until(condition):
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)
