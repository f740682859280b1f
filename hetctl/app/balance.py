"""Simulation of balanced batches: an algorithm sets the shares of unequal workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetctl.inputs.input_errors import refusal, suggestion
from hetctl.inputs.worker_table import WorkerPoints, read_workers
from hetctl.methods.balance.manager import equal_batches
from hetctl.methods.balance.managers import manager_of
from hetctl.methods.balance.observation_log import (
    AnswerDifference,
    equal_batches_s,
    iteration_s,
    records_in,
    replay,
)
from hetctl.methods.balance.simulate import Conditions, ConditionSpan, Iteration, iterate, phases
from hetctl.methods.balance.step_time import TimeCurve
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.training_settings import ON, BalanceSettings


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
    predictor: str = "narx"
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


@dataclass(frozen=True)
class BalanceReplay:
    """Repetition of the balancing of a member in training, from its log.

    Parameters
    ----------
    iterations, segments : int
        Iterations in the log that count, and starts of managers: one for each start of the member.
    repeated : int
        Iterations that a new manager repeats: those before any that a long log has left out.
    equal : bool
        True if it sets all their batches as the log has them.
    difference : AnswerDifference or None
        First difference, with the number of its iteration.
    first_batches, last_batches : tuple of int
        Batches at the start and at the end.
    iteration_s : float
        Mean time of the slowest worker in seconds, without exchange between workers.
    equal_batches_s : float
        Estimate of it with equal batches.
    gain : float
        `equal_batches_s` / `iteration_s`.
    """

    manager: str
    workers: tuple[str, ...]
    iterations: int
    segments: int
    repeated: int
    equal: bool
    difference: AnswerDifference | None
    first_batches: tuple[int, ...]
    last_batches: tuple[int, ...]
    iteration_s: float
    equal_batches_s: float
    gain: float


def replay_balancing(log: Path) -> BalanceReplay:
    """Repeat the decisions of a manager in training.

    Raises
    ------
    BadInputError
        If the file is no log of a manager, or has no iterations.
    """
    try:
        with log.open(encoding="utf-8") as lines:
            found = replay(records_in(lines))
    except OSError as error:
        raise BadInputError(f"{log}: {error.strerror}", "give a file of the run's folder balance/") from None
    except BadInputError as error:
        raise BadInputError(f"{log}: {error.message}") from None
    if not found.iterations:
        raise BadInputError(f"{log}: the log has no iterations", "wait until the member has trained")
    measured_s, equal_s = iteration_s(found.iterations), equal_batches_s(found.iterations)
    newest = found.segments[-1]
    return BalanceReplay(
        manager=newest.settings.manager,
        workers=newest.workers,
        iterations=len(found.iterations),
        segments=len(found.segments),
        repeated=found.repeated,
        equal=found.difference is None,
        difference=found.difference,
        first_batches=found.iterations[0].batches,
        last_batches=found.iterations[-1].answer,
        iteration_s=measured_s,
        equal_batches_s=equal_s,
        gain=equal_s / measured_s,
    )


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
    caps = [worker.max_batch for worker in workers]
    settings = BalanceSettings(ON, request.algorithm, request.predictor)
    manager = manager_of(settings, equal_batches(request.batch, caps), caps, request.seed)
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
