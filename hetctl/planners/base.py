"""The shape of every planner: from what is free and what is left to do, to allocations."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from hetctl.core.errors import BadInputError
from hetctl.core.plan import Allocation
from hetctl.core.profile import Candidate
from hetctl.core.site import Node


@dataclass(frozen=True)
class Options:
    """What a person may set; every planner reads what it knows.

    Parameters
    ----------
    delta : float or None
        How far apart, in samples/s, the rates in a flotilla may be (FLEET, Equation 3).
    relative_delta : float
        The same as a share of the fastest member's single-GPU rate; used where `delta` is None.
        The paper's 20 images/s are about this share of its fastest member's 176.
    alpha : float
        A flotilla stops when less than this share of its GPUs is active.
    max_permutations : int
        Orders that packing tries.
    """

    delta: float | None = None
    relative_delta: float = 0.12
    alpha: float = 0.8
    max_permutations: int = 1024
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One question to a planner.

    Parameters
    ----------
    candidates : tuple of Candidate
        Members that hold no GPU now and need training, with a rate for every number of GPUs from 1 up.
    nodes : tuple of Node
        With their free GPUs only.
    gpus : int
        GPUs of the whole cluster, M in the papers.
    """

    candidates: tuple[Candidate, ...]
    nodes: tuple[Node, ...]
    gpus: int
    round_index: int
    options: Options

    @property
    def free_gpus(self) -> int:
        """Free GPUs on all nodes."""
        return sum(len(node.gpus) for node in self.nodes)


@dataclass(frozen=True)
class Planner:
    """A published method, or one of ours.

    Parameters
    ----------
    paradigm : str
        ``global``: asked when all GPUs are free; ``local``: asked whenever some are (FLEET, section 4.1).
    allocate : callable
        A pure function; gives at least one allocation whenever there are a candidate and a free GPU.
    shares : bool
        Whether the members of a round train as a group, which stops as one (`Options.alpha`).
    """

    name: str
    paradigm: Literal["global", "local"]
    allocate: Callable[[Request], tuple[Allocation, ...]]
    shares: bool


def ask(
    planner: Planner, request: Request, fits: Callable[[Allocation], bool]
) -> tuple[tuple[Allocation, ...], tuple[str, ...]]:
    """Ask until all that is given is of use; return it, and the members that were left out.

    Near the wall-clock limit a member may be given so few GPUs that its next epoch would not fit. The
    later half of such members is left out and the planner asked again, so that others take the GPUs;
    one by one at the end, so that nobody is left out who would have fitted with all GPUs to itself.
    """
    candidates, left_out = request.candidates, set[str]()
    while candidates:
        allocations = planner.allocate(replace(request, candidates=candidates))
        unfit = [allocation.member for allocation in allocations if not fits(allocation)]
        if not unfit:
            return allocations, tuple(sorted(left_out))
        left_out.update(unfit[len(unfit) // 2 :])
        candidates = tuple(c for c in candidates if c.name not in left_out)
    return (), tuple(sorted(left_out))


def options_from(values: Mapping[str, Any]) -> Options:
    """Check options that a person wrote; those that are missing take their defaults.

    Raises
    ------
    BadInputError
        On an unknown name, a wrong type or a value out of range.
    """
    for name, value in values.items():
        if name not in _RULES:
            raise BadInputError(f"unknown planner option {name!r}", hint=nearest(name, _RULES))
        holds, rule = _RULES[name]
        if not holds(value):
            raise BadInputError(f"planner option {name} is {value!r}, but must be {rule}")
    return Options(**values)


def nearest(name: str, known: Mapping[str, Any]) -> str:
    """Return a hint that names the nearest known word, or all of them if none is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"one of: {', '.join(known)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "delta": (lambda v: v is None or (_is_number(v) and v > 0), "a number of samples/s above 0"),
    "relative_delta": (lambda v: _is_number(v) and v > 0, "a number above 0"),
    "alpha": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "max_permutations": (lambda v: _is_whole(v) and v >= 1, "a whole number, at least 1"),
    "seed": (_is_whole, "a whole number"),
}
assert set(_RULES) == {field.name for field in fields(Options)}
