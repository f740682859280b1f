"""Submission of a job so that a crash at any instruction neither loses nor doubles it.

A job first enters the catalog, with state SUBMITTING and a unique name. Each submission begins with a search
for that name, and so does the next command if a crash or a doubt leaves the job in that state. A job that the
batch system has is adopted; any other is submitted.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path

from hetctl.app.plan.job_request import job_size
from hetctl.app.project import Project
from hetctl.app.run.changes import Change
from hetctl.app.run.job_states import excluded_nodes, shortest_job_s, used_at_most
from hetctl.app.run.select_run import record_of
from hetctl.catalog.catalog import Catalog
from hetctl.cluster.batch.base import BatchSystem, JobRequest, SubmissionInDoubtError
from hetctl.cluster.batch.command import CommandRunner
from hetctl.cluster.batch.queues import parse_start
from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.cluster.launchers import LaunchSpec
from hetctl.cluster.launchers.agents import agents_step, hop_lines, packing_lines, round_prefix, sets_by_step
from hetctl.cluster.render import JobScript, render_job, submit_command
from hetctl.model.errors import BatchSystemError, InfeasibleError
from hetctl.model.job import Job, JobState, RunReason, check_job_removal, check_run_removal, moved
from hetctl.model.plan import DATA_PARALLEL, HOPPER, Allocation, Placement, Plan
from hetctl.model.run import NOTHING_USED, RunSpec, Usage
from hetctl.model.site import NODES, Cluster, Node, Queue, Site
from hetctl.model.values import dataclass
from hetctl.scheduling.job_size import grace_of
from hetctl.storage.atomic_io import write_private
from hetctl.storage.paths import RunFolder
from hetctl.storage.purge import remove_files
from hetctl.storage.run_files import keep_spec, read_claim
from hetctl.storage.run_state import state_in


@dataclass(frozen=True)
class Submission:
    """Job of a run, ready to be submitted.

    Parameters
    ----------
    request : JobRequest
        Its script's file and the command that submits it.
    script : str
        Text of the script.
    steps : tuple of LaunchSpec
        Steps that start the agents of the first round, on nodes with placeholder names. With ``launch:
        members``, if no round is known, a member on one GPU is an example.
    packing : tuple of str
        A line for each node of the first round, if that is known.
    alternatives : mapping of str to str
        The script for each queue that takes the job, if there are several; its own is the first.
    """

    run: str
    request: JobRequest
    script: str
    steps: tuple[LaunchSpec, ...]
    packing: tuple[str, ...] = ()
    alternatives: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NextJob:
    """Next job of a run, or first one of a new run, ready to be submitted.

    Parameters
    ----------
    spec : RunSpec
        Specification of the run from then on.
    jobs : tuple of Job
        The jobs of the run, this one included.
    plan : Plan or None
        Plan of its rounds; None if that is unknown.
    changed : tuple of Change
        Changes that the run would have.
    behind : str
        Job that must be over first, as far as known; empty if all are over.
    """

    spec: RunSpec
    jobs: tuple[Job, ...]
    submission: Submission
    plan: Plan | None = None
    changed: tuple[Change, ...] = ()
    behind: str = ""


def identity_of(project: Project, catalog: Catalog) -> str:
    """Return the identity of a project, which no other has, not even a copy of its folder."""
    return f"{catalog.identity}{project.home.path}"


def new_job(spec: RunSpec, identity: str, number: int, used: Usage = NOTHING_USED) -> Job:
    """Return a job that is about to be submitted; its time keeps the run within its node-hours.

    Parameters
    ----------
    identity : str
        Identity of the project; the same job of the same project always has the same name.
    used : Usage
        Resources that the run has used or may still use in other jobs.
    """
    wall_s = int(min(spec.wall_s, spec.budget.wall_left_s(used, spec.nodes)))
    if wall_s < shortest_job_s(spec):
        raise InfeasibleError(
            f"--node-hours {spec.budget.node_hours:g} permit {max(wall_s, 0)} s on {spec.nodes} nodes;"
            f" at least {shortest_job_s(spec)} s are needed",
            "give more with --node-hours, or ask for fewer nodes with --gpus",
        )
    # A job whose submission was cut short is found by this name.
    token = hashlib.sha256(f"{identity}/{spec.run}/{number}".encode()).hexdigest()[:8]
    return Job(
        number=number,
        name=f"hetctl-{spec.run}-{number}-{token}",
        batch_id="",
        state=JobState.SUBMITTING,
        nodes=spec.nodes,
        wall_s=wall_s,
        submitted_at=time.time(),
    )


def next_job_of(spec: RunSpec, folder: RunFolder, identity: str, jobs: Sequence[Job]) -> Job:
    """Return the job after a run's jobs; one in doubt is rendered again with the present options."""
    number = jobs[-1].number if in_submission(jobs) else len(jobs)
    if spec.budget.node_hours is None:
        return new_job(spec, identity, number)
    return new_job(spec, identity, number, used_at_most(spec, state_in(folder, spec), jobs[:number]))


def in_submission(jobs: Sequence[Job]) -> bool:
    """Return true if it is unknown whether the batch system has the last one of a run's jobs."""
    return bool(jobs) and jobs[-1].state is JobState.SUBMITTING


def rendered(project: Project, spec: RunSpec, jobs: Sequence[Job], plan: Plan | None = None) -> Submission:
    """Render a run's last job; it waits for the previous one if that is not over.

    Parameters
    ----------
    plan : Plan or None
        Plan of its rounds; None if that is unknown.

    Raises
    ------
    InfeasibleError
        If the first round does not fit the job's nodes as planned.
    """
    *earlier, job = jobs
    alive = [one.batch_id for one in earlier if not one.state.over]
    queue, *others = _queues_for(spec, job)
    script = JobScript(
        folder=project.home.run(spec.run),
        job=job.number,
        name=job.name,
        site=spec.site,
        queue=queue,
        nodes=job.nodes,
        wall_s=job.wall_s,
        grace_s=min(spec.grace_s, grace_of(job.wall_s)),
        home=project.home.path,
        after=alive[-1] if alive else None,
        exclude=excluded_nodes(earlier, spec.site.nodes, job.nodes),
        chain=spec.chain,
        ahead=spec.ahead > 1,
    )
    nodes = Cluster.at(spec.site, spec.gpus).nodes
    hopping = next((one.members for one in plan.phases[:1] if one.mode == HOPPER), ()) if plan else ()
    first = plan.rounds[0].allocations if plan and plan.rounds and not hopping else ()
    packing: Iterable[str] = packing_lines(first, nodes) if first else ()
    if hopping and (partitions := spec.ensemble.partitions):
        packing = hop_lines(hopping, partitions.homes([node.name for node in nodes]), nodes)
    member, place = spec.ensemble.members[0].name, Placement(nodes[0].name, nodes[0].gpus[:1])
    steps = _steps_of(spec, script, nodes, first or [Allocation(member, 1, DATA_PARALLEL, 0.0, (place,))])
    texts = {
        one.name: render_job(replace(script, queue=one), project.template_folders) for one in (queue, *others)
    }
    return Submission(
        *(spec.run, request_of(script, spec.gpus), texts[queue.name], steps, tuple(packing)),
        alternatives=texts if others else {},
    )


def _queues_for(spec: RunSpec, job: Job) -> list[Queue]:
    """Return the queues that take a job: the run's, then others of the site file that behave like it."""
    usual = job_size(spec.site, spec.gpus, spec.wall_s, spec.queue).queue
    found = [usual]
    for name in () if "queue" in spec.given else spec.site.wanted_queues:
        with suppress(InfeasibleError):
            other = job_size(spec.site, spec.gpus, job.wall_s, name).queue
            if other.name != usual.name and other.chain == usual.chain:
                found.append(other)
    return found


def _starting_first(site: Site, alternatives: Mapping[str, str]) -> str:
    """Return the queue that is expected to start a job first, of equals the first; "" if none is known."""
    command, starts = BATCH_SYSTEMS[site.batch_system].dry_run, dict[str, str]()
    for queue, text in alternatives.items() if command else ():
        with tempfile.NamedTemporaryFile("w", prefix="hetctl-", suffix=".sh", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # A queue that does not answer must not keep the job from another one.
            with suppress(BatchSystemError):
                answer = CommandRunner(site.timeouts.command_s).run(command, Path(file.name))
                if answer.code == 0 and (start := parse_start(answer.stdout + answer.stderr)):
                    starts[queue] = start
    return min(starts, key=lambda queue: starts[queue], default="")


def request_of(script: JobScript, gpus: int, submitit: Path | None = None) -> JobRequest:
    """Return the request to submit a script that is in its file; the rest is as in `JobRequest`."""
    return JobRequest(
        name=script.name,
        script=script.files.script,
        command=submit_command(script),
        wall_s=script.wall_s,
        site=script.site,
        gpus=gpus,
        after=script.after,
        submitit=submitit,
    )


def _steps_of(
    spec: RunSpec, script: JobScript, nodes: Sequence[Node], allocations: Sequence[Allocation]
) -> tuple[LaunchSpec, ...]:
    address, python = script.files.agents.address, spec.site.python or script.python
    ensemble, site = spec.ensemble, spec.site
    steps: list[LaunchSpec] = []
    # The step of whole nodes is the same for all members.
    for allocation in allocations[:1] if site.launch == NODES else allocations:
        code = ensemble.member(allocation.member).code or ensemble.code
        frameworks = ensemble.preloaded if site.launch == NODES else code.preloaded
        placement = {allocation.member: allocation.placement}
        for name, sets in sets_by_step(site, nodes, round_prefix(0), placement).items():
            steps.append(agents_step(site, name, sets, address, frameworks, python))
    return tuple(steps)


def submit_last(
    project: Project, catalog: Catalog, spec: RunSpec, jobs: Sequence[Job], submission: Submission
) -> tuple[Job, str]:
    """Submit a run's last job, which is already in the catalog.

    Returns
    -------
    job : Job
        The job with its id.
    what : str
        What has happened to it, in words.

    Parameters
    ----------
    submission : Submission
        That job, as `rendered`.

    Raises
    ------
    SubmissionInDoubtError
        If it is unknown whether the batch system has the job; the next command will look again.
    BatchSystemError
        If it refused; the job, and a run that has no other, is then removed.
    """
    job, folder, batch = jobs[-1], project.home.run(spec.run), project.batch_system(spec.site)
    try:
        # A job that an earlier command has lost would train the run beside the new one.
        claimed = read_claim(folder.job(job.number))
        if batch_id := claimed or batch.find([job.name], recorded=False).get(job.name, ""):
            return _adopted(catalog, folder, job, batch_id), "is found: it had been submitted before"
        keep_spec(folder.create(), catalog.spec_text(spec.run))
        queue = _starting_first(spec.site, submission.alternatives)
        script = submission.alternatives.get(queue, submission.script)
        batch_id, what = submit_once(batch, submission.request, script, project.waits.settle_s)
        what += f" to {queue}, of which the earliest start is expected" if queue else ""
    # A subclass of BatchSystemError: the job may exist, so its entry must stay.
    except SubmissionInDoubtError as doubt:
        raise SubmissionInDoubtError(
            f"{doubt.message}: it is unknown whether the batch system has job {job.name} of run {spec.run}",
            f"`hetctl advance {spec.run}` looks whether the job is there, and submits it if it is not",
        ) from None
    except (BatchSystemError, OSError):
        _forget(project, catalog, spec.run, jobs)
        raise
    # A crash before this line leaves SUBMITTING, and the next command adopts the job by its name.
    submitted = moved(job, JobState.PENDING, batch_id=batch_id, submitted_at=time.time())
    catalog.save_job(spec.run, submitted)
    return submitted, what


def submit_measuring(
    project: Project, batch: BatchSystem, script: JobScript, submitit: Path | None = None
) -> str:
    """Submit a job that trains nothing; return its id. The errors are those of `submit_once`."""
    request = request_of(script, script.nodes * script.site.gpus_per_node, submitit)
    text = render_job(script, project.template_folders)
    return submit_once(batch, request, text, project.waits.settle_s)[0]


def submit_once(batch: BatchSystem, request: JobRequest, script: str, settle_s: float) -> tuple[str, str]:
    """Submit the text of a script as a job, and look for the job if that is in doubt.

    Parameters
    ----------
    settle_s : float
        As in `find_settled`.

    Returns
    -------
    batch_id, what : str
        The job's id, and what has happened, in words.

    Raises
    ------
    SubmissionInDoubtError
        If there is no sign of the job, which may exist nevertheless.
    BatchSystemError
        If the batch system refused it.
    """
    write_private(request.script, script)
    try:
        return batch.submit(request), "submitted"
    except SubmissionInDoubtError as doubt:
        # At once, so that a run that nobody watches goes on.
        with suppress(BatchSystemError):
            if found := find_settled(batch, [request.name], settle_s):
                return found[request.name], f"submitted, although {doubt.message}"
        raise


def find_settled(batch: BatchSystem, names: Sequence[str], settle_s: float) -> Mapping[str, str]:
    """Return the ids of jobs whose submission was interrupted, by name.

    Parameters
    ----------
    settle_s : float
        Time in seconds in which a request of a killed process may still reach the batch system.
    """
    found = batch.find(names)
    if len(found) < len(names):
        time.sleep(settle_s)
        found = batch.find(names)
    return found


def adopt(catalog: Catalog, batch: BatchSystem, folder: RunFolder, job: Job, settle_s: float) -> Job | None:
    """Find a job whose submission was interrupted; return None if the batch system does not have it.

    Parameters
    ----------
    settle_s : float
        Time after the submission, in seconds, until which the job may still appear.
    """
    # Of several jobs with this name, the one that has claimed it; it may be over already, and forgotten.
    batch_id = read_claim(folder.job(job.number))
    if not batch_id:
        # The job is not waited for if its submission was long ago.
        left_s = max(0.0, min(settle_s, job.submitted_at + settle_s - time.time()))
        batch_id = find_settled(batch, [job.name], left_s).get(job.name, "")
    return _adopted(catalog, folder, job, batch_id) if batch_id else None


def _adopted(catalog: Catalog, folder: RunFolder, job: Job, batch_id: str) -> Job:
    adopted = moved(job, JobState.PENDING, batch_id=batch_id)
    catalog.save_job(folder.name, adopted)
    return adopted


def _forget(project: Project, catalog: Catalog, run: str, jobs: Sequence[Job]) -> None:
    if len(jobs) > 1:
        check_job_removal(jobs[-1].state)
        catalog.remove_job(run, jobs[-1].number)
    else:
        check_run_removal(record_of(catalog, run).state, RunReason.REFUSED)
        catalog.remove_run(run)
        with suppress(OSError):
            remove_files(project.home, run)
