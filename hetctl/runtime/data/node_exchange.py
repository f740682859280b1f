"""Leader of a node in lockstep: ``python -m hetctl.runtime.data.node_exchange LINEUPS --round N``.

Each node has one such process: it has the node's share of the samples prepared, and exchanges chunks with the
other leaders. MPI is used only here, so that the death of one trainer does not end the others.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import traceback
import uuid
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hetctl.cluster.launchers.nodes import SLURM_NODE_VARIABLE
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.plan import Allocation
from hetctl.model.profile import PreprocessPoint
from hetctl.perf.preprocessing import preprocessors_needed
from hetctl.runtime.agent.binding import VISIBLE_DEVICES
from hetctl.runtime.data.input_pipeline import first_sample
from hetctl.runtime.data.lineup import Lineup, lockstep_on, nodes_of, read_lineup
from hetctl.runtime.data.loaders import Lockstep, PreprocessorPool
from hetctl.runtime.data.preprocessors import Preprocessors, layout_of
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sharing.broadcast import Exchange, NodeStream
from hetctl.runtime.data.sharing.node_folder import folder_of, node_folder
from hetctl.runtime.data.sharing.ring import Ring
from hetctl.runtime.data.sharing.ring_writer import RingWriter
from hetctl.runtime.data.sources import WITHOUT_STORE, Array, Source, as_sources
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.context import DATA_SEED
from hetctl.runtime.worker.user_functions import load_functions

IBCAST = {"OMPI_MCA_coll_libnbc_ibcast_algorithm": "1"}
"""Setting with which Open MPI sends chunks whole: each segment would wait for the leader's next poll."""


def main() -> int:
    """Serve the trainers of a round until all have left."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.runtime.data.node_exchange", description=__doc__)
    parser.add_argument("lineups", type=Path)
    parser.add_argument("--round", type=int, required=True)
    arguments = parser.parse_args()
    try:
        lead(read_lineup(arguments.lineups, arguments.round))
    except Exception:
        traceback.print_exc()
        _end_the_others()
        return 1
    return 0


def lead(lineup: Lineup) -> None:
    """Lead a node through a round; return at once for samples that are not shared."""
    if lineup.ensemble.reads_partitions:
        return
    source = _training_samples(lineup.ensemble)
    if isinstance(source, WITHOUT_STORE):
        return
    nodes = nodes_of(lineup.allocations)
    count = preprocessors_of_a_node(lineup.allocations, lineup.preprocess, lineup.cores)
    layout, sample = layout_of(source), first_sample(source)
    with ExitStack() as stack:
        preprocessors = Preprocessors(source, layout, count)
        stack.callback(preprocessors.stop)
        # MPI may try to connect without end, and blocks all Python threads while it does.
        faulthandler.dump_traceback_later(lineup.timeouts.leaders_s, exit=True)
        world = _world(len(nodes))
        node = node_here(nodes, world.Get_rank())
        folder = stack.enter_context(node_folder(folder_of(lineup.run_key, node)))
        pool = PreprocessorPool(layout, preprocessors, folder, sample, timeouts=lineup.timeouts)
        exchange = _opened(world, pool, lockstep_on(lineup, node), len(source))
        faulthandler.cancel_dump_traceback_later()
        chunks = exchange.run()
        print(f"leader {world.Get_rank()} of {world.Get_size()}: {chunks} chunks")


def node_here(nodes: Sequence[str], rank: int) -> str:
    """Return the node of a leader; other launchers than Slurm's number ranks in the placement's order."""
    named = os.environ.get(SLURM_NODE_VARIABLE, "")
    return named if named in nodes else nodes[rank]


def preprocessors_of_a_node(
    allocations: Sequence[Allocation], points: Sequence[PreprocessPoint], cores: int
) -> int:
    """Return the preprocessors per node with which all nodes together supply the slowest member.

    Parameters
    ----------
    points, cores
        Parameters of `roles_of`.
    """
    demand = min(allocation.rate for allocation in allocations) / len(nodes_of(allocations))
    return preprocessors_needed(points, demand, cores)


def _training_samples(ensemble: Ensemble) -> Source:
    """Return the same samples as in trainers; hide the GPUs, which are the trainers'."""
    os.environ.update(dict.fromkeys(VISIBLE_DEVICES, ""))
    cores = tuple(sorted(os.sched_getaffinity(0)))
    load_framework(ensemble.framework).prepare(cores, None, DATA_SEED)
    training, _ = as_sources(load_functions(ensemble).input_fn(ensemble.data))
    return training


def _world(nodes: int) -> Any:
    """Start MPI, after all processes have been forked."""
    for name, value in IBCAST.items():
        os.environ.setdefault(name, value)
    try:
        # The import itself calls MPI_Init_thread(), and MPI starts threads: nothing may be forked after it.
        from mpi4py import MPI
    except ImportError as error:
        raise BadInputError(
            f"lockstep on several nodes needs mpi4py: {error}",
            "install it as docs/install.md says, or share with --sharing cached",
        ) from None
    world = MPI.COMM_WORLD
    # A wrong srun --mpi shows here: Open MPI formed one world with pmix, but neither with pmi2 nor with none.
    if world.Get_size() != nodes:
        raise BadInputError(
            f"the launcher started {world.Get_size()} MPI ranks as leaders of {nodes} nodes",
            "check `mpi:` and `launcher:` in the site file",
        )
    return world


def _opened(world: Any, pool: PreprocessorPool, lockstep: Lockstep, samples: int) -> Exchange:
    stream = Stream(samples, lockstep.chunk, lockstep.seed)
    _check_that_all_have_the_same(world, (stream, pool.layout, *map(_checksum, pool.sample)))
    own = NodeStream(samples, lockstep.chunk, lockstep.seed, node=world.Get_rank(), nodes=world.Get_size())
    pool.ring(lockstep.name, lockstep.readers, stream, lockstep.largest).close()
    writer = RingWriter(pool.folder / lockstep.name)
    return Exchange(
        *(world, _outbox(pool, own), writer, stream, pool.layout, pool.preprocessors.check),
        # Less than the trainers wait for a batch: they need time to go on alone.
        stall_s=pool.timeouts.samples_s / 2,
    )


def _outbox(pool: PreprocessorPool, own: NodeStream) -> Ring:
    """Have the node's share prepared in a ring that no other process reads."""
    name = f"{uuid.uuid4().hex}.ring"
    ring = pool.ring(name, 1, own, own.chunk)
    try:
        ring.join(0)
        pool.fill(name, own)
    finally:
        (pool.folder / name).unlink(missing_ok=True)
    return ring


def _check_that_all_have_the_same(world: Any, data: object) -> None:
    """Reject data that differ between nodes: MPI would truncate chunks, or mix them up."""
    seen = world.allgather(data)
    for rank, there in enumerate(seen):
        if there != seen[0]:
            raise BadInputError(
                f"input_fn gives leader {rank} other samples than leader 0: {there}, not {seen[0]}",
                "it must return the same data on every node",
            )


def _checksum(array: Array) -> int:
    return zlib.crc32(array.tobytes())


def _end_the_others() -> None:
    """End the leaders of other nodes, which would otherwise wait for this one without end."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        # MPI_Abort ends this process at once: a traceback in the buffer would be lost.
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    sys.exit(main())
