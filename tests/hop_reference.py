"""One process that follows logged visits with a framework's own networks: what hops must equal to the bit."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from hetctl.model.interpreter import frozen_afterwards, skip_last_collections
from hetctl.model.run import RunSpec
from hetctl.model.serialization import decode
from hetctl.runtime.data.batches import Batches, validation_batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import UNSHUFFLED, Stream
from hetctl.runtime.data.sources import as_sources
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import load_functions


def digest_of(arrays):
    """Return the SHA-256 of names, types, shapes and bytes of arrays."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def follow(ensemble, visits, path_of, cores):
    """Return the digest of each member's final arrays.

    Parameters
    ----------
    visits : list of (member, epoch, partition, evaluates)
        All visits in their order.
    """
    # As in ranks: each network's end collects garbage.
    with frozen_afterwards():
        framework, functions = load_framework(ensemble.framework), load_functions(ensemble)
    found = {}
    for member in ensemble.members:
        framework.prepare(cores, None, member.seed)
        own = [visit for visit in visits if visit[0] == member.name]
        network, trained = None, 0
        for _, epoch, partition, evaluates in own:
            training, validation = as_sources(functions.input_fn(ensemble.data, path_of(partition)))
            if network is None:
                sample = training.x[[0]], training.y[[0]]
                network = framework.build(member, functions, Group(), sample)
            if evaluates:
                stream = Stream(len(validation), member.rows_evaluated, UNSHUFFLED)
                network.evaluate(validation_batches(ArrayLoader(validation, stream), epoch, lambda: None))
            else:
                trained += 1
                loader = ArrayLoader(training, Stream(len(training), member.batch_size, member.seed))
                is_last = trained % ensemble.partitions.count == 0
                network.train(Batches(loader, epoch, 0, Group(), lambda: False, is_last=is_last))
        found[member.name] = digest_of(network.save())
        framework.clear()
    return found


def main(run, log, template, cores):
    """Print the digests for the run with that specification and the visits in a file."""
    spec = decode(RunSpec, json.loads(Path(run).read_text()))
    visits = json.loads(Path(log).read_text())
    print(
        json.dumps(follow(spec.ensemble, visits, lambda k: template.format(partition=k), tuple(range(cores))))
    )


if __name__ == "__main__":
    skip_last_collections()
    main(*sys.argv[1:4], int(sys.argv[4]))
