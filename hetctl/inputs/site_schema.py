"""Keys of the site file, with their types and meanings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.cluster.launchers import LAUNCHERS
from hetctl.inputs.interconnect_schema import LinksModel
from hetctl.inputs.quantities import format_duration, parse_bytes, parse_duration
from hetctl.inputs.validation import Matching, Strict
from hetctl.model.errors import BadInputError
from hetctl.model.site import USUAL_TIMEOUTS

T = TypeVar("T")

BREAKS = r"\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029"
Line = Annotated[
    str,
    Matching(
        rf"[^{BREAKS}]*[^\s{BREAKS}][^{BREAKS}]*", "must be one line of text without control characters"
    ),
]
Value = Annotated[str, Matching(rf"[^{BREAKS}]*", "must be one line of text without control characters")]
Directive = Annotated[
    str,
    Matching(
        rf"[^#\s{BREAKS}][^{BREAKS}]*",
        "must be one line as the batch system takes it, without #SBATCH or #BSUB",
    ),
]
Word = Annotated[
    str,
    Matching(
        r"[A-Za-z0-9_][A-Za-z0-9._@:+/-]*",
        "must be one word of A-Z a-z 0-9 . _ @ : + / - that starts with no sign",
    ),
]
Variable = Annotated[str, Matching(r"[A-Za-z_][A-Za-z0-9_]*", "must be the name of an environment variable")]
Template = Annotated[
    str, Matching(r"[A-Za-z0-9][A-Za-z0-9._-]*\.j2", "must be the file name of a template, NAME.j2")
]
Interface = Annotated[
    str,
    Matching(
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
    """A queue (a partition in Slurm's words) and its limits."""

    name: Word = Field(description="The queue's name at the batch system.")
    max_nodes: int | None = Field(
        default=None, ge=1, description="The most nodes of one job; null for no limit."
    )
    max_wall: Duration = Field(
        default=None,
        description="The longest wall-clock time of one job, as 2h, 90m or 2:00:00; null for no limit.",
    )


class NodeTypeModel(Strict):
    """Nodes with the same type of GPU, at a machine that has several."""

    gpu_type: Line = Field(description="The type, as `hetctl profile` names it.")
    nodes: int = Field(ge=1, description="How many nodes have it.")
    hosts: list[Line] = Field(
        min_length=1, description="Names of these nodes, * for any text; they tell a job's nodes apart."
    )
    gpu_memory: MaybeBytes = Field(default=None, description="Memory of each GPU; null for the site's.")


class NetworkModel(Strict):
    """Network interfaces of the nodes, as names or patterns; the first that a node has is used."""

    control: list[Interface] = Field(
        default_factory=list,
        description="For connections between driver and compute nodes; [] for the one of the host name.",
    )
    gloo: list[Interface] = Field(
        default_factory=list,
        description="For Gloo; [] for the one by which a rank reaches the others of its group.",
    )


def _timeout(name: str, meaning: str) -> Any:
    usual = format_duration(getattr(USUAL_TIMEOUTS, f"{name}_s"))
    return Field(default=None, description=f"{meaning}; null for {usual}.")


class TimeoutsModel(Strict):
    """Time limits of waits."""

    hang: Duration = _timeout("hang", "A group of which no rank gives a sign of life for so long hangs")
    meeting: Duration = _timeout("meeting", "For the ranks of a group to meet")
    join: Duration = _timeout("join", "For the agent of a node to connect to the driver after its launch")
    silence: Duration = _timeout("silence", "An agent that sends nothing for so long is lost with its node")
    ending: Duration = _timeout("ending", "For the ranks of a group that has failed to end by themselves")
    orphaned: Duration = _timeout("orphaned", "For the script of a job to see that its driver is gone")
    samples: Duration = _timeout("samples", "For preprocessors to prepare a batch")
    lockstep: Duration = _timeout("lockstep", "For members and leaders that share in lockstep to begin")
    leaders: Duration = _timeout("leaders", "For the leaders of nodes to load the data and connect")


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
    """A machine: its batch system, nodes and queues, and how programs are started on it."""

    extends: SiteRef | None = Field(
        default=None, description="Another site, by name or file: its keys hold where this file has none."
    )
    batch_system: BatchSystemName = Field(description="What takes the jobs.")
    launcher: LauncherName = Field(description="What starts a job's steps.")
    launch: Literal["nodes", "members"] = Field(
        default="nodes",
        description="nodes: one step a job, for all nodes. members: one for each member and round.",
    )
    nodes: int = Field(ge=1, description="Compute nodes of the machine.")
    gpus_per_node: int = Field(ge=1, description="GPUs of each node, or slots where device is slot.")
    cores_per_node: int = Field(ge=1, description="Cores of each node that jobs may use.")
    memory_per_node: Bytes = Field(description="Memory of each node: 512GB, 480GiB or a number of bytes.")
    device: Literal["gpu", "slot"] = Field(
        default="gpu", description="slot at a machine without GPUs, where a slot stands for a GPU."
    )
    gpu_type: Line | None = Field(default=None, description="Model of the GPUs, as V100.")
    gpu_memory: MaybeBytes = Field(
        default=None, description="Memory of each GPU, as 16GB; null if it is not to be counted with."
    )
    links: LinksModel | None = Field(
        default=None, description="How fast GPUs send to one another, for pipelines; null if it is not known."
    )
    network: NetworkModel = Field(
        default_factory=NetworkModel, description="Network interfaces for control connections and for Gloo."
    )
    timeouts: TimeoutsModel = Field(
        default_factory=TimeoutsModel,
        description="Times after which what has not come by then is given up, each as 30s or 15m.",
    )
    visible_devices: Variable = Field(
        default="CUDA_VISIBLE_DEVICES",
        description="The variable that names the GPUs which a process sees; ROCR_VISIBLE_DEVICES for AMD.",
    )
    node_types: list[NodeTypeModel] = Field(
        default_factory=list,
        description="The types of GPU of a machine that has several; their nodes must add up to `nodes`.",
    )
    queues: Annotated[list[QueueModel], Field(min_length=1), AfterValidator(_limits_rise)] = Field(
        description="The queues; several entries of one name, max_nodes rising, are its bins by size."
    )
    queue: Word | None = Field(default=None, description="The queue to use; null for the first one.")
    queue_option: Literal["partition", "qos"] = Field(
        default="partition", description="How Slurm is told the queue: --partition, or --qos as at NERSC."
    )
    account: Word | None = Field(default=None, description="Who pays: the project or account of the jobs.")
    submit_by: Literal["file", "stdin"] = Field(
        default="file", description="Whether the submit command takes the script as a file or reads it."
    )
    max_queued_jobs: int | None = Field(
        default=None, ge=1, description="The most jobs that a user may have queued; null for no limit."
    )
    template: Template | None = Field(
        default=None, description="The script's template; null for the batch system's own."
    )
    directives: list[Directive] = Field(
        default_factory=list, description="More options for the batch system, without #SBATCH or #BSUB."
    )
    setup: list[Line] = Field(
        default_factory=list, description="Shell lines that prepare the environment of every script."
    )
    environment: dict[Variable, Value] = Field(
        default_factory=dict, description="Variables that every step gets; values are text."
    )
    mpi: Word | None = Field(default=None, description="The launcher's MPI plugin, as in srun --mpi=pmix.")
    python: Line | None = Field(
        default=None, description="The Python on the compute nodes; null for the one that submits."
    )
    host_patterns: list[Line] = Field(
        default_factory=list, description="Host names of the login nodes, * for any text; they tell the site."
    )
