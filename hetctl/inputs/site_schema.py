"""Keys of the site file, with their types and meanings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.cluster.launchers import LAUNCHERS
from hetctl.inputs.input_errors import shown
from hetctl.inputs.quantities import format_duration, parse_bytes, parse_duration
from hetctl.inputs.validation import Matching, Strict
from hetctl.inputs.yaml_source import Location
from hetctl.model.errors import BadInputError
from hetctl.model.site import USUAL_TIMEOUTS, InterNode, IntraNode, NodeLinks


def _points(value: object) -> object:
    """Convert a point given as a list of two numbers, as in YAML."""
    # The models are strict and would refuse YAML's lists where they have tuples.
    if not isinstance(value, list) or not all(isinstance(point, list) for point in value):
        return value
    return tuple(tuple(float(part) if _is_number(part) else part for part in point) for point in value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Positive = Annotated[float, Field(gt=0)]
_POINT: dict[str, Any] = {
    "type": "array",
    "items": {"type": "number", "exclusiveMinimum": 0},
    "minItems": 2,
    "maxItems": 2,
}
Points = Annotated[
    tuple[tuple[Positive, Positive], ...],
    BeforeValidator(_points),
    WithJsonSchema({"type": "array", "items": _POINT}),
]


class IntraNodeModel(Strict):
    """Links between the GPUs of a node: peak bandwidth, with either scaling or points."""

    bytes_per_s: Positive = Field(description="Peak bandwidth in bytes/s.")
    scaling: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Fraction of the peak bandwidth that is reached."
    )
    points: Points = Field(default=(), description="Measured transfers, each as [bytes, seconds].")


class InterNodeModel(Strict):
    """Links between nodes: either latency_s and bytes_per_s, or points."""

    latency_s: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Latency of a message in seconds."
    )
    bytes_per_s: Positive | None = Field(default=None, description="Bandwidth in bytes/s.")
    points: Points = Field(default=(), description="Measured transfers, each as [bytes, seconds].")


class LinksModel(Strict):
    """Links between GPUs, for pipelines."""

    intra_node: IntraNodeModel = Field(description="Links between the GPUs of a node.")
    inter_node: InterNodeModel = Field(description="Links between nodes.")


def links_problems(links: LinksModel) -> list[tuple[Location, str]]:
    """Return the problems of values that are given twice, or not at all."""
    intra, inter = links.intra_node, links.inter_node
    line = [value for value in (inter.latency_s, inter.bytes_per_s) if value is not None]
    problems: list[tuple[Location, str]] = []
    if (intra.scaling is None) == (not intra.points):
        problems.append((("links", "intra_node"), "must have either scaling or points"))
    if bool(line) == bool(inter.points) or (line and len(line) < 2):
        problems.append((("links", "inter_node"), "must have either latency_s and bytes_per_s, or points"))
    sizes = {size for size, _ in inter.points}
    if len(sizes) == 1:
        rule = f"must be of at least two sizes, got only {shown(sizes.pop())} bytes"
        problems.append((("links", "inter_node", "points"), rule))
    return problems


def links_of(model: LinksModel) -> NodeLinks:
    """Return the links as a value."""
    return NodeLinks(
        IntraNode(**dict(model.intra_node)),
        InterNode(**dict(model.inter_node)),
    )


T = TypeVar("T")

# Control characters and line ends would break out of a line of the script that the value is put into.
BREAKS = r"\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029"
Line = Annotated[
    str,
    Matching(
        rf"[^{BREAKS}]*[^\s{BREAKS}][^{BREAKS}]*", "must be one line of text without control characters"
    ),
]
Value = Annotated[str, Matching(rf"[^{BREAKS}]*", "must be one line of text without control characters")]
# A directive must not begin with '#': the template adds #SBATCH or #BSUB itself.
Directive = Annotated[
    str,
    Matching(
        rf"[^#\s{BREAKS}][^{BREAKS}]*",
        "must be one line of options for the batch system, without #SBATCH or #BSUB",
    ),
]
Word = Annotated[
    str,
    Matching(
        r"[A-Za-z0-9_][A-Za-z0-9._@:+/-]*",
        "must be one word of A-Z a-z 0-9 . _ @ : + / - that starts with a letter, a digit or _",
    ),
]
Variable = Annotated[str, Matching(r"[A-Za-z_][A-Za-z0-9_]*", "must be the name of an environment variable")]
Template = Annotated[
    str, Matching(r"[A-Za-z0-9][A-Za-z0-9._-]*\.j2", "must be the file name of a template, NAME.j2")
]
Interface = Annotated[
    str,
    Matching(
        # The kernel limits names of network interfaces to 15 characters (IFNAMSIZ).
        r"[A-Za-z0-9_.:-]{1,15}|[A-Za-z0-9_.:*?\[\]!-]*[*?\[][A-Za-z0-9_.:*?\[\]!-]*",
        "must be the name of a network interface (at most 15 characters) or a pattern such as hsn*",
    ),
]
SiteRef = Annotated[str, Field(min_length=1), Matching(rf"[^{BREAKS}]+", "must be a site's name or file")]


def _converting(parse: Callable[[Any], T]) -> BeforeValidator:
    def convert(value: Any) -> T:
        try:
            return parse(value)
        except BadInputError as error:
            raise ValueError(f"{error.message}; {error.hint}".rstrip("; ")) from None

    return BeforeValidator(convert)


def _duration(value: Any) -> int | None:
    # As text even if YAML has a number, for the message that says which unit is missing.
    return None if value is None else parse_duration(str(value))


def _size(value: Any) -> int | None:
    return None if value is None else parse_bytes(value)


Bytes = Annotated[
    int,
    _converting(parse_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}], "examples": ["512GB"]}),
]
MaybeBytes = Annotated[
    int | None,
    _converting(_size),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}, {"type": "null"}],
            "examples": ["16GB"],
        }
    ),
]
Duration = Annotated[
    int | None,
    _converting(_duration),
    WithJsonSchema({"type": ["string", "null"], "examples": ["2h", "90m", "2:00:00"]}),
]


class QueueModel(Strict):
    """Queue (a partition in Slurm's words) and its limits."""

    name: Word = Field(description="Name of the queue at the batch system.")
    max_nodes: int | None = Field(
        default=None, ge=1, description="Maximum number of nodes of one job; null: no limit."
    )
    max_wall: Duration = Field(
        default=None,
        description="Maximum wall-clock time of one job, such as 2h, 90m or 2:00:00; null: no limit.",
    )


class NodeTypeModel(Strict):
    """Nodes with the same type of GPU, on a machine with several types."""

    gpu_type: Line = Field(description="Model of the GPUs, as reported by `hetctl profile`.")
    nodes: int = Field(ge=1, description="Number of nodes with this type.")
    hosts: list[Line] = Field(
        min_length=1,
        description="Host names of these nodes, * for any text, by which the type of a job's node is found.",
    )
    gpu_memory: MaybeBytes = Field(
        default=None, description="Memory of each GPU; null: the site's gpu_memory."
    )


class NetworkModel(Strict):
    """Network of the nodes: interfaces as names or patterns, of which the first that a node has is used."""

    control: list[Interface] = Field(
        default_factory=list,
        description="For connections between driver and compute nodes; []: the one of the host name.",
    )
    gloo: list[Interface] = Field(
        default_factory=list,
        description="For Gloo; []: the one by which a rank reaches the other ranks of its group.",
    )
    encrypt_data: bool = Field(
        default=True,
        description="Encrypt tensors, samples and states that hetctl sends between nodes.",
    )


def _timeout(name: str, meaning: str) -> Any:
    usual = format_duration(getattr(USUAL_TIMEOUTS, f"{name}_s"))
    return Field(default=None, description=f"{meaning}; null: {usual}.")


class TimeoutsModel(Strict):
    """Time limits of waits."""

    hang: Duration = _timeout(
        "hang", "Time without a heartbeat from any rank after which a group counts as hung"
    )
    meeting: Duration = _timeout("meeting", "Time limit for the ranks of a group to connect to one another")
    join: Duration = _timeout(
        "join", "Time limit for the agent of a node to connect to the driver after its launch"
    )
    silence: Duration = _timeout(
        "silence", "Time without a message after which an agent and its node count as lost"
    )
    ending: Duration = _timeout("ending", "Time limit for the ranks of a failed group to end by themselves")
    orphaned: Duration = _timeout(
        "orphaned", "Time limit for the script to end a job whose driver has ended; later its agents end it"
    )
    lease: Duration = _timeout(
        "lease", "Time without a sign of life of a job's driver after which the next job counts it as dead"
    )
    samples: Duration = _timeout("samples", "Time limit for preprocessors to prepare a batch")
    lockstep: Duration = _timeout(
        "lockstep", "Time limit for members and leaders that share data in lockstep to start"
    )
    leaders: Duration = _timeout(
        "leaders", "Time limit for the leaders of nodes to load the data and connect"
    )
    command: Duration = _timeout("command", "Time limit for a command of the batch system to answer")


def _limits_rise(queues: list[QueueModel]) -> list[QueueModel]:
    """Check that limits rise: entries of one name are bins by the number of nodes, as on Summit."""
    most: dict[str, float] = {}
    for queue in queues:
        nodes = float("inf") if queue.max_nodes is None else queue.max_nodes
        if nodes <= most.get(queue.name, 0):
            raise ValueError(f"entries of queue '{queue.name}' must have rising max_nodes")
        most[queue.name] = nodes
    return queues


if TYPE_CHECKING:
    BatchSystemName = str
    LauncherName = str
else:
    BatchSystemName = Literal[tuple(BATCH_SYSTEMS)]
    LauncherName = Literal[tuple(LAUNCHERS)]


class SiteModel(Strict):
    """Machine: its batch system, nodes and queues, and the launcher of its jobs."""

    extends: SiteRef | None = Field(
        default=None,
        description="Another site, by name or file, whose keys are used where this file has none.",
    )
    batch_system: BatchSystemName = Field(description="Batch system that runs the jobs.")
    launcher: LauncherName = Field(description="Program that starts the steps of a job.")
    launch: Literal["nodes", "members"] = Field(
        default="nodes",
        description="nodes: one step per job, on all nodes. members: one step per member and round.",
    )
    nodes: int = Field(ge=1, description="Number of compute nodes of the machine.")
    gpus_per_node: int = Field(ge=1, description="Number of GPUs per node; of slots if device is slot.")
    cores_per_node: int = Field(ge=1, description="Number of cores per node that jobs may use.")
    memory_per_node: Bytes = Field(description="Memory per node, such as 512GB, 480GiB or a number of bytes.")
    device: Literal["gpu", "slot"] = Field(
        default="gpu",
        description="slot on a machine without GPUs, where a share of the cores takes the place of a GPU.",
    )
    gpu_type: Line | None = Field(default=None, description="Model of the GPUs, such as V100.")
    gpu_memory: MaybeBytes = Field(
        default=None, description="Memory of each GPU, such as 16GB; null: not taken into account."
    )
    links: LinksModel | None = Field(
        default=None, description="Bandwidth and latency between GPUs, for pipelines; null: unknown."
    )
    network: NetworkModel = Field(
        default_factory=NetworkModel,
        description="Network interfaces for control connections and for Gloo, and encryption.",
    )
    timeouts: TimeoutsModel = Field(
        default_factory=TimeoutsModel,
        description="Time limits of waits, each such as 30s or 15m.",
    )
    visible_devices: Variable = Field(
        default="CUDA_VISIBLE_DEVICES",
        description="Environment variable with the GPUs visible to a process; ROCR_VISIBLE_DEVICES for AMD.",
    )
    node_types: list[NodeTypeModel] = Field(
        default_factory=list,
        description="Types of GPU of a machine with several; their nodes must add up to `nodes`.",
    )
    queues: Annotated[list[QueueModel], Field(min_length=1), AfterValidator(_limits_rise)] = Field(
        description="Queues; several entries of one name, with rising max_nodes, are its limits by job size."
    )
    queue: Word | None = Field(default=None, description="Queue to use; null: the first one.")
    queue_option: Literal["partition", "qos"] = Field(
        default="partition",
        description="Slurm option that takes the queue: --partition, or --qos as at NERSC.",
    )
    account: Word | None = Field(default=None, description="Project or account that jobs are charged to.")
    submit_by: Literal["file", "stdin"] = Field(
        default="file",
        description="Input of the submit command: the file name of the script, or its text on stdin.",
    )
    max_queued_jobs: int | None = Field(
        default=None, ge=1, description="Maximum number of queued jobs per user; null: no limit."
    )
    template: Template | None = Field(
        default=None, description="File name of the script's template; null: the batch system's own."
    )
    directives: list[Directive] = Field(
        default_factory=list, description="Additional options for the batch system, without #SBATCH or #BSUB."
    )
    setup: list[Line] = Field(
        default_factory=list,
        description="Shell lines at the start of every script, which prepare its environment.",
    )
    environment: dict[Variable, Value] = Field(
        default_factory=dict, description="Environment variables of every step; values are text."
    )
    mpi: Word | None = Field(default=None, description="MPI plugin of the launcher, as in srun --mpi=pmix.")
    python: Line | None = Field(
        default=None, description="Python interpreter on the compute nodes; null: the one that submits."
    )
    host_patterns: list[Line] = Field(
        default_factory=list,
        description="Host names of the login nodes, * for any text, by which the site is detected.",
    )
