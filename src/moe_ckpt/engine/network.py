"""How fast ranks send to one another over gloo; as a program, between two processes of this machine."""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist


def exchange_secs(nbytes: int, group: dist.ProcessGroup | None = None) -> float:
    """Every rank sends ``nbytes`` to the next one and receives as much. A collective; the slowest rank's seconds."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Both are touched before the clock runs: zeros would be given pages only when they arrive.
    sent, received = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    dist.barrier(group)
    began = time.perf_counter()
    sending = dist.isend(sent, (rank + 1) % ranks, group)
    dist.recv(received, (rank - 1) % ranks, group)
    if sending is not None:
        sending.wait()
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX, group)
    return float(took)


def main(meeting: str, rank: int, nbytes: int, repeats: int) -> None:
    """One of two processes that meet in the file ``meeting``; prints the seconds of each repeat and one before."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        print(json.dumps([exchange_secs(nbytes) for _ in range(repeats + 1)]))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
