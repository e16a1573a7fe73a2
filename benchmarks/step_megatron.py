"""``step_scale.py`` under Megatron-Core on the CPU: one rank, its model in Megatron's DDP, and Megatron's optimizer.

Without expert parallelism it is a world of one rank, which also commits. With it the other ranks are only acted
(``megatron_world.py``), and rank 0, which commits, is one of those. An iteration is the routers' part of a forward
pass, the counting of tokens, and the optimizer step: what Megatron does besides is the same with and without
checkpoints, and slow on a CPU.
"""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.megatron_world import Case, Rank, acted_peers, build, route
from benchmarks.step_fits import Clock, Sample, Turn, in_turns, policy_of
from moe_ckpt.megatron import checkpoint

_CLOSE_SECS = 60.0


def measure(order: dict[str, Any], tell: Callable[[str], None], keep: Callable[[dict[str, Any]], None]) -> None:
    """order: as ``step_rank`` gets it. keep: see ``step_fits.in_turns``."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    case = Case(order["layers"], order["experts"], order["ep"], "fp32")
    tell("warm-up")
    rank, turn = build(case), Turn(**order["turn"])

    def once(name: str, number: int) -> Sample:
        return _turn(case, rank, name, turn, Path(order["home"]) / f"{number}_{name}")

    in_turns(order["policies"], order["rounds"], once, tell, keep)


def _turn(case: Case, rank: Rank, name: str, turn: Turn, directory: Path) -> Sample:
    """One turn of one policy, in a directory of its own, which is removed afterwards."""
    sample, nbytes, iteration = Sample(name), 0, 0
    clock = Clock(turn, sample)
    gc.collect()
    with nullcontext() if name == "none" else _attached(case, rank, name, directory) as ours:
        while not clock.tick(nbytes):
            iteration += 1
            route(rank)
            if ours is None:
                rank.optimizer.step()
                continue
            with clock.hook():
                ours.before_step()
            rank.optimizer.step()
            with clock.hook():
                record = ours.after_step(iteration, updated=False)
            if not record.begun:
                raise RuntimeError(f"no checkpoint began at step {iteration}")
            nbytes = record.nbytes
    return sample


@contextmanager
def _attached(case: Case, rank: Rank, name: str, directory: Path) -> Iterator[checkpoint.MegatronCheckpoint]:
    try:
        with acted_peers(case) if case.ep > 1 else nullcontext():
            ours = checkpoint.attach(
                rank.chunk,
                rank.optimizer,
                policy=policy_of(name, case.experts),
                dirpath=directory,
                resume="never",
                when_busy="wait",
                save_last=False,
            )
        try:
            ours.resume()
            ours.begin_training()
            yield ours
        finally:
            ours.close(_CLOSE_SECS)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
