"""Kinds of algorithms that frameworks use for members with and without ``deterministic``."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace

from tiny_networks import ENSEMBLES, functions_of

from hetctl.model.ensemble import Ensemble, Member
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.worker.context import WorkerContext


def of_members(_rank, framework, wishes, path):
    """Prepare a rank for one member after another; write whether the framework was deterministic for each."""
    ensemble, found = Ensemble("tiny", framework, functions_of(framework), (), str(ENSEMBLES)), []
    with ExitStack() as keep:
        context = WorkerContext(Binding("localhost", 0, None, (0,)), keep)
        for wish in wishes:
            context.chain(replace(ensemble, members=(Member("m", {}, deterministic=wish),)))
            found.append(IS_DETERMINISTIC[framework]())
    path.write_text(json.dumps(found))


def _pytorch():
    import torch

    return torch.are_deterministic_algorithms_enabled()


def _tensorflow():
    from tensorflow.python.framework.config import is_op_determinism_enabled

    return is_op_determinism_enabled()


IS_DETERMINISTIC = {"pytorch": _pytorch, "tensorflow": _tensorflow}
