"""The scheduling of a batch job in which members hop (CEREBRO, section 3.2).

A worker is a GPU, or a group of GPUs of one node where more GPUs than members are left. In the hopper's state
machine the training visits of epoch e, counted from 1, are its epoch 2(e - 1), and the evaluation visits that
follow its epoch 2(e - 1) + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hetctl.methods.hopper.hop_events import (
    Converge,
    FetchState,
    ForgetStates,
    HopProgress,
    MemberStates,
    OpenHops,
    UndoVisits,
)
from hetctl.methods.hopper.hop_plans import HopPlanner, is_evaluation
from hetctl.methods.hopper.state_machine import Hopper
from hetctl.methods.hopper.worker_groups import workers_of
from hetctl.model.events import CLEAN_EXITS
from hetctl.model.hops import (
    HopPlanMade,
    RankEnded,
    StateFetched,
    StateSaved,
    StoreLost,
    StoreOpened,
    Unit,
    Visit,
    VisitEnd,
    gpus_in,
    node_of,
    slots_in,
)
from hetctl.model.plan import HOPPER, Allocation, Placement
from hetctl.model.site import Node
from hetctl.model.training_progress import EpochResult
from hetctl.model.values import dataclass
from hetctl.scheduling import events
from hetctl.scheduling.commands import EndJob, EndRound, ScheduleTick, Start, Task
from hetctl.scheduling.job_scheduler import DEADLINE, FINISHED, JobScheduler, Observer, RunningTask

STATE_LOST = "state lost"
"""Reason for stopping a visit whose state cannot be fetched."""
MOST_FAILURES = 3
"""Failed copies of a state after which it counts as lost."""
WRITE_S = 60.0
"""Seconds for which the end of a job waits for checkpoints of ranks that may have ended."""
OPEN_S = 300.0
"""Seconds for which a job waits for the store of a node that is back, if only that node has a partition."""
PATIENCE_S = 5.0
"""Seconds between two attempts to end a job that waits."""


@dataclass(frozen=True)
class HopRules:
    """Rules of a job in which members hop.

    Parameters
    ----------
    partitions : int
        Number of partitions of the data.
    replay : sequence of Visit
        Visits to repeat, in the order of their starts; empty: the planner's.
    first_number : int
        Number of the job's first visit, larger than those of earlier jobs.
    least_members : int
        Fewest members that hop: if fewer are left, each stops after its epoch. 0: all hop to the end.
    """

    partitions: int
    seed: int = 0
    replay: Sequence[Visit] = ()
    first_number: int = 0
    least_members: int = 0


class HopScheduler(JobScheduler):
    """Scheduling in which each task is a visit of a member to a partition.

    Parameters
    ----------
    progress : sequence of HopProgress
        Members that need training.
    planner : HopPlanner
        Planner of the visits; its times also decide what fits before the deadline.
    observer : Observer
        State of the members; `left` lacks those that have failed for good.
    """

    def __init__(
        self, rules: HopRules, progress: Sequence[HopProgress], planner: HopPlanner, observer: Observer
    ) -> None:
        super().__init__()
        self._rules, self._planner, self._observer = rules, planner, observer
        self._progress = tuple(progress)
        self._members = {each.member.name: each.member for each in progress}
        self._history = {each.member.name: list(each.history) for each in progress}
        self._names = tuple(f"p{number}" for number in range(rules.partitions))
        self._replay = tuple(rules.replay)
        reschedule = None if rules.replay else self._plan
        self._hopper = Hopper(
            self._names,
            seed=rules.seed,
            reschedule=reschedule,
            done=visits_before(progress, self._names),
            started=rules.first_number,
        )
        for each in progress:
            self._hopper.config_joins(each.member.name, 2 * len(each.history) + each.evaluating)
        self._states = {
            each.member.name: MemberStates(number=each.visit, saved_number=each.visit) for each in progress
        }
        self._stores: dict[str, tuple[str, ...]] = {}
        self._awaited: set[str] = set()
        self._opening: dict[str, float] = {}
        self._grouped_for: object = None
        self._regrouping: dict[str, list[str]] = {}
        self._converging: dict[str, str] = {}
        self._may_be_used_up = True
        self._change = "start"
        self._round = 0
        self._handlers |= {
            StoreOpened: self._on_store_opened,
            StoreLost: self._on_store_lost,
            VisitEnd: self._on_visit_done,
            HopProgress: self._on_member_joined,
            StateFetched: self._on_state_fetched,
            StateSaved: self._on_state_saved,
            RankEnded: lambda event: self._end_writer(event.worker),
            events.MembersEdited: self._on_members_edited,
        }

    def _review(self, now_s: float) -> None:
        if self._may_be_used_up and (limit := self._observer.used_up()):
            self._end(limit, now_s)
        self._may_be_used_up = False

    def _start_tasks(self, now_s: float) -> None:
        # A plan without some of the first nodes would be a poor one.
        if self._stores and self._stores.keys() >= self._awaited:
            self._regroup(now_s)
            if self._replay:
                self._hopper.follow(at_workers(self._replay, self._hopper.workers))
                self._replay = ()
            self._start_visits(now_s)
            self._prefetch()
            self._check_end(now_s)

    def _next_s(self, now_s: float) -> float:
        return now_s + PATIENCE_S

    def _regroup(self, now_s: float) -> None:
        """Give each node workers that suit the members left, once none of its present ones is busy."""
        present = frozenset(self._hopper.configs), frozenset(self._stores)
        if present != self._grouped_for and self._may_regroup:
            self._grouped_for = present
            sizes = self._sizes(now_s)
            for node in self._open_nodes:
                wanted = list(dict.fromkeys(worker for size in sizes for worker in workers_of(node, size)))
                self._regrouping.pop(node.name, None)
                if wanted != self._workers_on(node.name):
                    self._regrouping[node.name] = wanted
        busy = set(map(self._node_of, self.running))
        for name in self._regrouping.keys() - busy:
            self._replace_workers(name, self._regrouping.pop(name))

    @property
    def _may_regroup(self) -> bool:
        """True if a member trains: in evaluations, which may be its last visits, new groups gain nothing."""
        trains = any(not is_evaluation(epoch) for epoch in self._hopper.configs.values())
        return trains or not all(map(self._workers_on, self._stores))

    def _replace_workers(self, node: str, wanted: Iterable[str]) -> None:
        before = self._workers_on(node)
        for worker in before:
            self._hopper.worker_fails(worker)
        for worker in wanted:
            self._hopper.worker_joins(worker, self._stores[node])
        if before:
            self._change = "other groups"

    def _workers_on(self, node: str) -> list[str]:
        return [worker for worker in self._hopper.workers if node_of(worker) == node]

    def _sizes(self, now_s: float) -> list[int]:
        """Return the sizes of groups: the one with which the rest is fastest, or those of the replay."""
        if self._rules.replay:
            return sorted({1, *(len(gpus_in(visit.worker)) for visit in self._rules.replay)})
        left = self._observer.left(now_s)
        members = [left[name] for name in self._hopper.configs if name in left]
        return [self._planner.group_size(members, self._names, self._open_nodes, self._stores)]

    @property
    def _open_nodes(self) -> tuple[Node, ...]:
        """Nodes whose agents have opened stores."""
        return tuple(node for node in self.pool.nodes.values() if node.name in self._stores)

    def _on_tick(self, event: events.JobOpened | events.Tick) -> None:
        self._now_s = event.now_s
        super()._on_tick(event)

    def _on_job_opened(self, event: events.JobOpened) -> None:
        super()._on_job_opened(event)
        self._awaited = set(self.pool.nodes)
        self._round, self._next_round = self._next_round, self._next_round + 1
        self._commands.append(OpenHops(self._round, tuple(self._members)))
        self._end_finished_members(self._progress)

    def _end_finished_members(self, progress: Iterable[HopProgress]) -> None:
        """Stop members that have met their stop rules and, if members are too few, all between two epochs."""
        for each in progress:
            name, is_whole = each.member.name, not each.visited and not each.evaluating
            if is_whole and (reason := each.member.stop.reason_to_stop(each.history)):
                self._hopper.config_stops(name)
                self._commands.append(Converge(name, reason))
        few = len(self._hopper.configs) < self._rules.least_members
        for each in progress if few else ():
            if not each.visited and not each.evaluating:
                self._hopper.config_stops(each.member.name)

    def _on_node_joined(self, event: events.NodeJoined) -> None:
        """Note a node that connects late, or returns; its workers join with its store."""
        super()._on_node_joined(event)
        self._opening[event.node.name] = event.now_s + OPEN_S

    def _on_node_lost(self, event: events.NodeLost) -> None:
        self._remove_workers(event.node, f"node {event.node} was lost")
        self._opening.pop(event.node, None)
        super()._on_node_lost(event)

    def _on_store_lost(self, event: StoreLost) -> None:
        """Wait with visits to a node until its next agent has opened a store."""
        if event.node in self._stores:
            self._opening[event.node] = self._now_s + OPEN_S
            self._remove_workers(event.node, f"the agent on {event.node} was lost")

    def _remove_workers(self, node: str, reason: str) -> None:
        self._stores.pop(node, None)
        self._awaited.discard(node)
        self._regrouping.pop(node, None)
        self._grouped_for = None
        self._change = "node lost"
        for worker in self._workers_on(node):
            self._hopper.worker_fails(worker)
        for states in self._states.values():
            states.drop_node(node)
            if states.writer and node_of(states.writer) == node:
                states.writer = None
        for name, running in self.running.items():
            states = self._states[name]
            # Its state was on the way from there; the copy would fail only after some time.
            if states.is_lost and _visit_of(running).state == states.state and not running.stopping:
                self._stop(name, STATE_LOST)
        for member in self._members:
            self._recover(member, reason)

    def _on_store_opened(self, event: StoreOpened) -> None:
        if event.node not in self.pool.nodes:
            return
        self._opening.pop(event.node, None)
        if event.node in self._stores:
            # Its workers are known, and may have visits that only wait for ranks.
            self._drop_states(event.node)
            return
        self._stores[event.node] = tuple(self._names[number] for number in sorted(event.partitions))
        self._grouped_for = None
        if event.node not in self._awaited:
            self._change = "node joined"

    def _drop_states(self, node: str) -> None:
        """Record that a node's agent has restarted with an empty store."""
        for states in self._states.values():
            states.drop_node(node)
        for name, running in self.running.items():
            if self._node_of(name) == node and _visit_of(running).state is not None:
                self._stop(name, STATE_LOST)
        for member in self._members:
            self._recover(member, f"the agent on {node} was started again")

    def _on_member_joined(self, joined: HopProgress) -> None:
        """Let a search's trial hop, a new one or one that goes on after a pause."""
        name = joined.member.name
        if len(self._hopper.configs) + 1 < self._rules.least_members:
            return
        if name not in self._members:
            self._history[name] = list(joined.history)
            self._states[name] = MemberStates(number=joined.visit, saved_number=joined.visit)
        self._members[name] = joined.member
        self._hopper.config_joins(name, 2 * len(self._history[name]))

    def _on_members_edited(self, event: events.MembersEdited) -> None:
        """Judge members by their edited rules, from the end of their present epochs on."""
        for name, member in self._members.items():
            self._members[name] = replace(member, stop=event.rules.get(name, member.stop))

    def _on_task_ended(self, event: events.TaskEnded) -> None:
        ended, member = self.running[event.name], event.name
        super()._on_task_ended(event)
        self._may_be_used_up = True
        visit = _visit_of(ended)
        if not ended.done:
            self._hopper.unit_failed(visit)
        if event.reason not in CLEAN_EXITS:
            for slot in slots_in(visit.worker):
                self._end_writer(slot)
            # It may have failed for good.
            if member not in self._observer.left(event.now_s):
                self._hopper.config_stops(member)
        self._recover(member, "its state was lost")

    def _end_writer(self, worker: str) -> None:
        """Roll back members whose checkpoint only the ended rank could write."""
        for name, states in self._states.items():
            if states.writer == worker:
                states.writer = None
                if name in self._converging:
                    self._roll_back(name, "the rank that was to write its checkpoint ended")

    def _on_visit_done(self, event: VisitEnd) -> None:
        """Note a visit whose new state is in the store of its worker's node; the end of its task follows."""
        running = self.running.get(event.member)
        if running is None or _visit_of(running).number != event.number:
            return
        visit, states = _visit_of(running), self._states[event.member]
        running.done = self._hopper.unit_done(visit)
        if self._planner.note(visit, self._now_s - running.since_s):
            self._hopper.drop_plan()
            self._change = "first visits"
        old = states.state
        held_by = states.renew(visit)
        if old is not None and held_by:
            self._commands.append(ForgetStates(tuple(sorted(held_by)), (old,)))
        if self._hopper.has_finished(event.member):
            self._on_pass_done(visit, event.result)

    def _on_pass_done(self, visit: Visit, result: EpochResult | None) -> None:
        """Begin the evaluation after the training visits of an epoch, and the next epoch after it."""
        member, rule = visit.config, self._members[visit.config].stop
        if result is not None:
            self._history[member].append(result.metrics[rule.metric])
            if reason := rule.reason_to_stop(tuple(self._history[member])):
                self._converging[member] = reason
            if reason or len(self._hopper.configs) < self._rules.least_members:
                self._hopper.config_stops(member)
                return
        self._hopper.config_joins(member, visit.epoch + 1)

    def _on_state_saved(self, event: StateSaved) -> None:
        states = self._states[event.member]
        states.saved(event.number)
        if states.is_saved and event.member in self._converging:
            self._commands.append(Converge(event.member, self._converging.pop(event.member)))
            self._free(event.member)

    def _on_state_fetched(self, event: StateFetched) -> None:
        member = next((name for name, own in self._states.items() if own.state == event.state), None)
        if member is None:
            self._commands.append(ForgetStates((event.node,), (event.state,)))
            return
        states = self._states[member]
        states.coming.discard(event.node)
        if not event.error:
            states.nodes.add(event.node)
            return
        states.failures += 1
        if states.failures >= MOST_FAILURES:
            # No node that has the state can send it there, but every node can read the checkpoint.
            self._commands.append(ForgetStates(tuple(sorted(states.nodes)), (event.state,)))
            states.nodes.clear()
            self._recover(member, f"its state cannot be copied to {event.node}")
        for name, running in self.running.items():
            waits = _visit_of(running).state == event.state and self._node_of(name) == event.node
            if waits and not running.stopping:
                self._stop(name, STATE_LOST)

    def _recover(self, member: str, reason: str) -> None:
        """Return to the newest checkpoint if no store has the member's state, and no visit works with it."""
        if self._states[member].is_lost and member not in self.running:
            self._roll_back(member, reason)

    def _roll_back(self, member: str, reason: str) -> None:
        states = self._states[member]
        if states.state is not None and states.nodes:
            self._commands.append(ForgetStates(tuple(sorted(states.nodes)), (states.state,)))
        undone = states.roll_back()
        if not undone:
            return
        self._converging.pop(member, None)
        epochs = {visit.epoch for visit in undone}
        lost = sum(1 for epoch in range(min(epochs), max(epochs) + 1) if self._ends_epoch(undone, epoch))
        del self._history[member][len(self._history[member]) - lost :]
        self._hopper.undo(undone)
        numbers = tuple(visit.number for visit in undone)
        self._commands.append(UndoVisits(member, numbers, reason))

    def _free(self, member: str) -> None:
        """Forget the state of a member that trains no more; one that goes on later has its checkpoint."""
        states = self._states[member]
        if states.state is not None and (holding := states.nodes | states.coming):
            self._commands.append(ForgetStates(tuple(sorted(holding)), (states.state,)))
        states.roll_back()

    def _ends_epoch(self, undone: Iterable[Visit], epoch: int) -> bool:
        """Return true if some visits of a complete evaluation pass are now undone."""
        of_pass = [visit for visit in undone if visit.epoch == epoch]
        if epoch % 2 == 0 or not of_pass:
            return False
        done = {visit.partition for visit in self._hopper.log if visit.unit[:2] == of_pass[0].unit[:2]}
        return done.issuperset(self._names)

    def _end_job(self, now_s: float) -> None:
        if self._is_writing and now_s < self._ended_s + WRITE_S:
            self._commands.append(ScheduleTick(self._ended_s + WRITE_S))
            return
        self._commands.append(EndRound(self._round, self.ending or FINISHED))
        self._commands.append(EndJob(self.ending or FINISHED))

    @property
    def _is_writing(self) -> bool:
        return any(states.writer for states in self._states.values())

    def _check_end(self, now_s: float) -> None:
        """End a job in which nothing runs and nothing can start."""
        if self.running or self._is_writing:
            return
        if self._hopper.is_over:
            self._end(FINISHED, now_s)
        elif self._hopper.stranded and any(now_s < limit_s for limit_s in self._opening.values()):
            # A node that is back imports the framework before its store opens.
            return
        elif self._hopper.stranded:
            self._end("no node has " + ", ".join(self._hopper.stranded), now_s)
        else:
            self._end(DEADLINE, now_s)

    def _start_visits(self, now_s: float) -> None:
        def may_start(unit: Unit, worker: str) -> bool:
            place = _place_of(worker)
            # Ranks report their states shortly before they have ended. In a replay, groups of several sizes
            # share the GPUs.
            is_free = unit.config not in self.running and self.pool.can_hold(place)
            if not is_free or node_of(worker) in self._regrouping:
                return False
            if now_s + self._planner.seconds(unit, worker) > self._opened.deadline_s:
                return False
            self.pool.take(place)
            return True

        started = self._hopper.dispatch(now_s, may_start)
        # Only if visits start, as it may read files.
        left = self._observer.left(now_s) if started else {}
        for visit in started:
            place, workload = _place_of(visit.worker), left[visit.config]
            gpus, states = len(place[0].gpus), self._states[visit.config]
            rate = workload.rates.get(gpus, workload.least_rate)
            allocation = Allocation(visit.config, gpus, HOPPER, rate, place)
            self._fetch(visit.config, place[0].node)
            task = Task(allocation, replace(visit, state=states.state, checkpoint=states.saved_number))
            self._run(task, self._round, now_s)
            self._commands.append(Start(self._round, (task,)))

    def _prefetch(self) -> None:
        """Copy the states that busy workers need next to their nodes while they train."""
        for worker in self._hopper.running:
            unit = self._hopper.next_turn(worker)
            if unit is not None and unit.config not in self.running:
                self._fetch(unit.config, node_of(worker))

    def _fetch(self, member: str, node: str) -> None:
        states = self._states[member]
        if states.state is None or node in states.nodes or node in states.coming:
            return
        states.coming.add(node)
        self._commands.append(FetchState(node, states.state, min(states.nodes)))

    def _plan(self, hopper: Hopper, now_s: float) -> tuple[Visit, ...]:
        """Make a plan for the present workers, and report it."""
        left = self._observer.left(now_s)
        cluster = tuple(self.pool.nodes.values())
        visits, predicted_s, lower_bound_s = self._planner.plan(hopper, left, cluster, now_s)
        workers = dict(hopper.workers)
        self._commands.append(
            HopPlanMade(self._planner.scheduler, predicted_s, lower_bound_s, workers, self._change)
        )
        self._change = "used up"
        return visits

    def _node_of(self, member: str) -> str:
        return node_of(_visit_of(self.running[member]).worker)


def _visit_of(running: RunningTask) -> Visit:
    assert running.task.visit is not None
    return running.task.visit


def _place_of(worker: str) -> tuple[Placement, ...]:
    return (Placement(node_of(worker), gpus_in(worker)),)


def at_workers(visits: Sequence[Visit], homes: Mapping[str, Sequence[str]]) -> tuple[Visit, ...]:
    """Return visits at the present workers: those of the same names, or others like them.

    A worker is like another one if it has as many GPUs and all partitions that are visited there.

    Parameters
    ----------
    homes : mapping of str to sequence of str
        Partitions by worker.
    """
    visited: dict[str, set[str]] = {}
    for visit in visits:
        visited.setdefault(visit.worker, set()).add(visit.partition)
    places = {worker: worker for worker in visited if visited[worker].issubset(homes.get(worker, ()))}
    for worker in visited.keys() - places.keys():
        free = (
            w
            for w in homes
            if w not in places.values()
            and visited[worker].issubset(homes[w])
            and len(gpus_in(w)) == len(gpus_in(worker))
        )
        places[worker] = next(free, worker)
    return tuple(replace(visit, worker=places[visit.worker]) for visit in visits)


def visits_before(progress: Iterable[HopProgress], names: Sequence[str]) -> Iterator[Visit]:
    """Yield the visits of the present epochs that earlier jobs have done."""
    for each in progress:
        epoch = 2 * len(each.history)
        trained = names if each.evaluating else [names[number] for number in each.visited]
        evaluated = [names[number] for number in each.visited] if each.evaluating else ()
        for later, visited in enumerate((trained, evaluated)):
            yield from (Visit(-1, each.member.name, epoch + later, name, "") for name in visited)
