"""Networks that a rank keeps built between visits: a framework may take seconds to build and trace one."""

from __future__ import annotations

from collections import OrderedDict

from hetctl.model.ensemble import Member
from hetctl.runtime.frameworks import TrainableNetwork

Settings = tuple[Member, int]
"""Member, and size of the group for which its network was built."""


class KeptNetworks:
    """Networks of members; those that have not been used for longest are released first.

    Parameters
    ----------
    limit_bytes : int
        Sum of the sizes of their states. A network with a larger one is built for each visit.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[str, tuple[Settings, TrainableNetwork, int]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of networks."""
        return len(self._kept)

    def take(self, member: Member, ranks: int) -> TrainableNetwork | None:
        """Return a member's network, which is kept no longer; None if there is none for its settings.

        Parameters
        ----------
        ranks : int
            Size of the group for which it was built.
        """
        known, network, _ = self._kept.pop(member.name, (None, None, 0))
        return network if known == (member, ranks) else None

    def keep(self, member: Member, ranks: int, network: TrainableNetwork, size_bytes: int) -> None:
        """Keep a network; its state has to be restored before it is used again.

        Parameters
        ----------
        ranks : int
            Size of the group for which it was built.
        size_bytes : int
            Size of its state.
        """
        self._kept[member.name] = (member, ranks), network, size_bytes
        self._kept.move_to_end(member.name)
        while sum(size for _, _, size in self._kept.values()) > self._limit_bytes:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Release all networks."""
        self._kept.clear()
