"""Methods of searches, with the keys of `search` that each has beside those of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class MethodKeys(NamedTuple):
    """Keys that a method needs, and those that it may have."""

    needs: frozenset[str] = frozenset()
    may: frozenset[str] = frozenset()


METHOD_KEYS: Mapping[str, MethodKeys] = {
    "grid": MethodKeys(),
    "random": MethodKeys(frozenset({"trials"})),
    "hyperband": MethodKeys(may=frozenset({"eta", "sampler"})),
    "asha": MethodKeys(
        frozenset({"trials"}), frozenset({"min_epochs", "eta", "stop_rate", "variant", "sampler"})
    ),
    "pbt": MethodKeys(frozenset({"trials", "mutate"}), frozenset({"every", "sampler"})),
    "optuna": MethodKeys(frozenset({"trials"}), frozenset({"every", "sampler", "pruner"})),
}
OF_METHODS = frozenset[str]().union(*(keys.needs | keys.may for keys in METHOD_KEYS.values()))
"""Keys of `search` that not every method has."""
