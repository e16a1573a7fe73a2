"""This rank's place among the others."""

from __future__ import annotations

import os
import socket
from unittest import mock

from tests.support import run_ranks


def ranks_on_this_host(rank: int, world_size: int) -> tuple[int, int]:
    from moe_ckpt.comm.communicator import make_communicator
    from moe_ckpt.megatron.world import local_ranks

    comm = make_communicator(60)
    with mock.patch.object(socket, "gethostname", return_value="node0" if rank < 2 else "node1"):
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        counted = local_ranks(comm)
        os.environ["LOCAL_WORLD_SIZE"] = "7"
        return counted, local_ranks(comm)


def test_ranks_of_a_host_are_counted_where_the_launcher_does_not_say():
    assert run_ranks(ranks_on_this_host, 3) == [(2, 7), (2, 7), (1, 7)]
