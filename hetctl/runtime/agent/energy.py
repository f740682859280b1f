"""Energy of the GPUs or slots of a node, by the counters of GPUs or, without these, of its processors.

Counters only grow, so that no power is sampled: NVML and AMD SMI have one for each GPU, Linux one for each
processor and its memory (RAPL, https://docs.kernel.org/power/powercap/powercap.html), which begins anew at
its largest value and which often only root may read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from hetctl.model.values import dataclass
from hetctl.runtime.agent.gpus import Gpu, energy

POWERCAP = Path("/sys/class/powercap")
JOULES_PER_UNIT = 1e-6
"""RAPL counts microjoules."""


@dataclass
class Counter:
    """Counter of energy, and what it has counted since the first reading.

    Parameters
    ----------
    read : callable
        Function that returns its value in joules, or None at present.
    range_j : float
        Value at which it begins anew.
    """

    read: Callable[[], float | None]
    range_j: float = math.inf
    last_j: float | None = None
    used_j: float = 0.0

    def update(self) -> None:
        """Read it; do so more often than it begins anew."""
        now_j = self.read()
        if now_j is None:
            return
        if self.last_j is not None:
            # A counter of a GPU begins at 0 if the driver was loaded again.
            rest_j = self.range_j - self.last_j if math.isfinite(self.range_j) else 0.0
            self.used_j += now_j - self.last_j if now_j >= self.last_j else now_j + rest_j
        self.last_j = now_j


class EnergyMeter:
    """Energy of each of an agent's GPUs or slots since the meter began.

    If a GPU has no counter, each GPU or slot counts with its share of the node's processors and memory.

    Parameters
    ----------
    numbers : sequence of int
        Numbers of the GPUs or slots in plans.
    gpus : sequence of Gpu
        GPUs that processes see, in the order of the numbers; other counts of GPUs are ignored.
    of_node : int
        Number of all GPUs or slots of the node.
    """

    def __init__(
        self, numbers: Sequence[int], gpus: Sequence[Gpu], of_node: int, powercap: Path = POWERCAP
    ) -> None:
        own = [Counter(partial(energy, gpu)) for gpu in gpus]
        all_count = len(own) == len(numbers) and all(counter.read() is not None for counter in own)
        self._own = dict(zip(numbers, own, strict=True)) if all_count else {}
        self._node = [] if all_count else list(_counters_in(powercap))
        self._numbers, self._of_node = numbers, of_node
        self.used_j()

    def used_j(self) -> dict[int, float]:
        """Return the joules by GPU or slot; empty if nothing can be measured."""
        for counter in (*self._own.values(), *self._node):
            counter.update()
        if self._own:
            return {number: counter.used_j for number, counter in self._own.items()}
        read = [counter for counter in self._node if counter.last_j is not None]
        share_j = sum(counter.used_j for counter in read) / self._of_node
        return dict.fromkeys(self._numbers, share_j) if read else {}


def _counters_in(powercap: Path) -> Iterator[Counter]:
    """Yield the counters of processors and of their memory; others contain these or are parts of them."""
    for zone in sorted(powercap.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text(encoding="ascii").strip()
            range_j = int((zone / "max_energy_range_uj").read_text(encoding="ascii")) * JOULES_PER_UNIT
        except (OSError, ValueError):
            continue
        if name.startswith("package-") or name == "dram":
            yield Counter(partial(_read, zone / "energy_uj"), range_j)


def _read(file: Path) -> float | None:
    try:
        return int(file.read_text(encoding="ascii")) * JOULES_PER_UNIT
    except (OSError, ValueError):
        return None
