"""The process that ``step_scale.py`` starts for each case, one per rank: all policies in turns, JSON to a file."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from benchmarks.report import write_json
from benchmarks.step_fits import Turn, fit_once, in_turns
from benchmarks.step_model import TinyMoE


def main(argv: list[str]) -> int:
    """argv: the order as JSON, and the rank. What rank 0 found goes to the order's "out"."""
    order, rank = json.loads(argv[0]), int(argv[1])
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)

    def keep(results: dict[str, Any]) -> None:
        if rank == 0:
            write_json(Path(order["out"]), results)

    if order["layout"] == "megatron":
        from benchmarks import step_megatron  # only here: it changes torch for the life of the process

        step_megatron.measure(order, _tell, keep)
    else:
        _lightning(order, rank, keep)
    return 0


def _lightning(order: dict[str, Any], rank: int, keep: Callable[[dict[str, Any]], None]) -> None:
    layout, ranks = order["layout"], order["ranks"]
    if ranks > 1:
        _join(rank, ranks, order["home"])
    module = TinyMoE(order["layers"], order["experts"], listed=order["kind"] == "listed", sharded=layout == "fsdp2")
    make = functools.partial(_trainer, layout, ranks)
    once = functools.partial(
        fit_once, experts=order["experts"], module=module, make_trainer=make, rank=rank, world_size=ranks,
        together=_together if ranks > 1 else bool,
    )  # fmt: skip
    home = Path(order["home"])
    _say(rank, "warm-up")
    once("none", turn=Turn(1, 4, 4, 1e9), directory=home / "warm-up")
    turn = Turn(**order["turn"])
    in_turns(
        order["policies"],
        order["rounds"],
        lambda name, number: once(name, turn=turn, directory=home / f"{number}_{name}"),
        functools.partial(_say, rank),
        keep,
    )


def _trainer(layout: str, ranks: int, callbacks: list[pl.Callback], directory: Path) -> pl.Trainer:
    strategies: dict[str, Callable[[], Any]] = {
        "lightning": lambda: "auto",
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp2": lambda: ModelParallelStrategy(ranks, 1, process_group_backend="gloo"),
    }
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        max_steps=-1,
        max_epochs=-1,
        accelerator="cpu",
        devices=ranks,
        strategy=strategies[layout](),
        callbacks=callbacks,
        enable_checkpointing=len(callbacks) > 1,
        default_root_dir=directory,
        use_distributed_sampler=False,
        **options,
    )


def _join(rank: int, ranks: int, home: str) -> None:
    """The process group, and what Lightning reads as a torchrun's environment."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(NODE_RANK="0", GROUP_RANK="0", TORCHELASTIC_RUN_ID="benchmark", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{home}/rendezvous", rank=rank, world_size=ranks)


def _together(over: bool) -> bool:
    """As rank 0 says."""
    verdict = torch.tensor([over])
    dist.broadcast(verdict, 0)
    return bool(verdict)


def _say(rank: int, what: str) -> None:
    if rank == 0:
        _tell(what)


def _tell(what: str) -> None:
    print(f"> {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
