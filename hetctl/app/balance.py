"""Simulation of balanced batches: an algorithm sets the shares of unequal workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetctl.inputs.input_errors import refusal, suggestion
from hetctl.inputs.worker_table import WorkerPoints, read_workers
from hetctl.methods.balance.cpu_manager import CpuManager
from hetctl.methods.balance.curve_manager import CurveManager
from hetctl.methods.balance.gpu_manager import GpuManager
from hetctl.methods.balance.manager import BatchSizeManager, equal_batches
from hetctl.methods.balance.predictors import PREDICTORS
from hetctl.methods.balance.simulate import Conditions, ConditionSpan, Iteration, iterate, phases
from hetctl.methods.balance.step_time import TimeCurve
from hetctl.model.errors import BadInputError, InfeasibleError


@dataclass(frozen=True)
class BalanceRequest:
    """Input of a simulation of balanced batches.

    Parameters
    ----------
    workers : Path
        File of batch times by worker.
    batch : int
        Samples of all workers together per iteration.
    predictor : str
        Name of the predictor of speeds; only Algorithm 1 (``cpu``) has one.
    changes : sequence of (int, Path)
        Iterations from which on the workers in a file have the times given there.
    jitter : float
        Standard deviation of a worker's time, as a share of it.
    seed : int
        Seed of jitter and predictor.
    """

    workers: Path
    batch: int
    iterations: int
    algorithm: str = "curve"
    predictor: str = "ema"
    changes: Sequence[tuple[int, Path]] = ()
    jitter: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Balancing:
    """Result of a simulation of balanced batches; `t_star_s`, `ratio`, `reached_at` are of its last phase.

    Parameters
    ----------
    predictor : str or None
        Name of the predictor; None if the algorithm has none.
    total_s : float
        Time of all iterations in seconds.
    """

    algorithm: str
    predictor: str | None
    batch: int
    workers: tuple[str, ...]
    total_s: float
    t_star_s: float
    ratio: float
    reached_at: int | None
    phases: tuple[ConditionSpan, ...]
    iterations: tuple[Iteration, ...]
    warnings: tuple[str, ...]


Caps = Sequence[int | None]
MANAGERS: Mapping[str, Callable[[BalanceRequest, Caps], BatchSizeManager]] = {
    "cpu": lambda request, caps: CpuManager(
        equal_batches(request.batch, caps), PREDICTORS[request.predictor](len(caps), request.seed), caps
    ),
    "gpu": lambda request, caps: GpuManager(equal_batches(request.batch, caps), caps),
    "curve": lambda request, caps: CurveManager(equal_batches(request.batch, caps), caps),
}


def simulate_balancing(request: BalanceRequest) -> Balancing:
    """Simulate iterations, starting with equal batches.

    Raises
    ------
    BadInputError
        If a file or an option is wrong, or there are fewer samples than workers.
    InfeasibleError
        If the workers' memory has no room for the batch.
    """
    _check(request)
    workers = read_workers(request.workers)
    _check_room(request, workers)
    conditions = _conditions(request, workers)
    manager = MANAGERS[request.algorithm](request, [worker.max_batch for worker in workers])
    iterations = tuple(iterate(manager, conditions, request.iterations, request.jitter, request.seed))
    found = phases(iterations, conditions)
    return Balancing(
        algorithm=request.algorithm,
        predictor=request.predictor if request.algorithm == "cpu" else None,
        batch=request.batch,
        workers=tuple(worker.name for worker in workers),
        total_s=iterations[-1].start_s + iterations[-1].duration_s,
        t_star_s=found[-1].t_star_s,
        ratio=found[-1].ratio,
        reached_at=found[-1].reached_at,
        phases=found,
        iterations=iterations,
        warnings=tuple(f"worker {workers[number].name} {what}" for number, what in manager.warnings),
    )


def _check(request: BalanceRequest) -> None:
    numbers = [number for number, _ in request.changes]
    for number in numbers:
        if not 0 < number < request.iterations:
            raise BadInputError(
                f"--change {number}: must be after iteration 0 and before iteration {request.iterations}"
            )
        if numbers.count(number) > 1:
            raise BadInputError(f"--change {number}: is given twice", "merge both files")
    if not 0 <= request.jitter <= 1:
        raise BadInputError(f"--jitter {request.jitter}: must be from 0 to 1")


def _check_room(request: BalanceRequest, workers: Sequence[WorkerPoints]) -> None:
    if request.batch < len(workers):
        raise BadInputError(
            f"{request.workers}: names {len(workers)} workers, and --batch is {request.batch}",
            "each takes at least one sample",
        )
    caps = [worker.max_batch for worker in workers if worker.max_batch is not None]
    if len(caps) == len(workers) and sum(caps) < request.batch:
        raise InfeasibleError(
            f"{request.workers}: max_batch: the workers have room for {sum(caps)} samples,"
            f" --batch is {request.batch}",
            "lower --batch, or add workers",
        )


def _conditions(request: BalanceRequest, workers: Sequence[WorkerPoints]) -> list[Conditions]:
    now = {worker.name: worker for worker in workers}
    found = [Conditions(0, _curves(workers))]
    for number, path in sorted(request.changes):
        now |= _changed(path, now)
        found.append(Conditions(number, _curves(now.values())))
    return found


def _changed(path: Path, known: Mapping[str, WorkerPoints]) -> dict[str, WorkerPoints]:
    """Read the workers that change; their memory limits do not."""
    changed = {worker.name: worker for worker in read_workers(path)}
    problems = [
        (worker.place, f"worker: there is no '{name}'" + suggestion(name, known))
        for name, worker in changed.items()
        if name not in known
    ]
    problems += [
        (worker.place, f"max_batch: must be left out, or as in {known[name].place}")
        for name, worker in changed.items()
        if name in known and worker.max_batch not in (None, known[name].max_batch)
    ]
    if problems:
        raise refusal(problems)
    return {name: replace(worker, max_batch=known[name].max_batch) for name, worker in changed.items()}


def _curves(workers: Iterable[WorkerPoints]) -> tuple[TimeCurve, ...]:
    return tuple(TimeCurve(worker.points, worker.max_batch) for worker in workers)
