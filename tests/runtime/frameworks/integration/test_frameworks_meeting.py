"""Ranks of a PyTorch group on one node: what rank 0 gathers, and where it listens."""

from __future__ import annotations

import json

import numpy as np
import psutil
import pytest
from ranks import rank_info_in, run_ranks

from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.group import join_group

pytestmark = pytest.mark.training


def of_rank(rank):
    """Return a value whose length is another one on each rank."""
    return [{"a": np.arange(10.0 * rank), "b": (rank, None)}, "text" * rank]


def work(rank, folder):
    place, publish = rank_info_in(folder, rank, 2)
    group = join_group(place, load_framework("pytorch"), publish)
    # A framework is imported only in the processes of ranks.
    from hetctl.runtime.frameworks.torch_ranks import gather

    values = gather(of_rank(rank))
    if rank == 0:
        found = {
            "arrays": [value[0]["a"].tolist() for value in values],
            "rest": [[value[0]["b"], value[1]] for value in values],
            "hosts": [
                one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"
            ],
        }
        (folder / "found.json").write_text(json.dumps(found))
    group.barrier_and_close()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(work, 2, folder, folder)
    return json.loads((folder / "found.json").read_text())


def test_values_of_unequal_length_are_gathered(found):
    assert found["arrays"] == [[], np.arange(10.0).tolist()]
    assert found["rest"] == [[[0, None], ""], [[1, None], "text"]]


def test_ranks_on_one_node_listen_on_the_loopback_alone(found):
    assert set(found["hosts"]) == {"127.0.0.1"}
