"""What uses none of a guest runs where it cannot be imported: each case in a process of its own.

Nothing of the package is imported here: the processes import this module before guests are blocked in them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

GUESTS = frozenset({"boost", "bubbles", "localized", "inprocess", "gradient_log", "survivors", "windows"})
ROOT = Path(__file__).parents[2]
STEPS = 3
"""Of the first life; a second one goes on from there."""


class Blocked(MetaPathFinder):
    """Refuses to find the guests."""

    def __init__(self, guests: Iterable[str]) -> None:
        self.names = {f"moe_ckpt.{guest}" for guest in guests}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in self.names:
            raise ImportError(f"{fullname} is blocked")


RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
"""Of a child. Read here, for Lightning takes one out of the environment at the end of a fit."""


def options_of(root: Path, *, seals: bool) -> dict[str, object]:
    """Options of a run.

    Args:
        seals: With memory that outlives the process, in which survivors seal the newest step. Of two ranks each is a
            node, and holds a copy of the other's.
    """
    from moe_ckpt import Memory

    node = root / f"node{RANK}"
    node.mkdir(exist_ok=True)
    memory = Memory(directory=str(node), replicas=RANKS - 1) if seals else None
    return {"dirpath": root / "store", "memory": memory}


def lightning(policy: str, root: Path, steps: int, *, seals: bool) -> int | None:
    """One life of a run; the step that it resumed from."""
    import lightning.pytorch as pl

    from moe_ckpt import policies
    from moe_ckpt.callbacks import MoECheckpoint
    from tests.support.tiny_moe import TinyMoE, loader

    callback = MoECheckpoint(policy=getattr(policies, policy)(), **options_of(root, seals=seals))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = "auto" if RANKS == 1 else "ddp"
    trainer = pl.Trainer(
        accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=steps, callbacks=[callback], **quiet
    )
    trainer.fit(TinyMoE(), loader())
    return callback.restored_step


def megatron(policy: str, root: Path, steps: int, *, seals: bool) -> int | None:
    """The same of the real Megatron-Core."""
    from tests.support import megatron_gpt
    from tests.support.megatron_warm import quiet

    quiet()
    built = megatron_gpt.build(megatron_gpt.Setup(layers=2, num_microbatches=1), seed=1)
    from moe_ckpt import policies
    from moe_ckpt.megatron import attach

    options = options_of(root, seals=seals)
    with attach(built.chunks, built.optimizer, built.scheduler, policy=getattr(policies, policy)(), **options) as ckpt:
        for iteration in range(ckpt.resume().iteration, steps):
            megatron_gpt.train_step(built, iteration)
            ckpt.after_step(iteration + 1, consumed_samples=iteration + 1)
    return ckpt.restored_step


def lived(adapter: str, names: Sequence[str], blocked: Sequence[str], root: str) -> None:
    """The child: two lives with each policy, then one that asks for a guest that is blocked."""
    import torch.distributed as dist

    assert not [name for name in sys.modules if name.startswith("moe_ckpt.")]
    sys.meta_path.insert(0, Blocked(blocked))
    if adapter == "megatron" or RANKS > 1:
        dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=RANK, world_size=RANKS)
    life = {"lightning": lightning, "megatron": megatron}[adapter]
    seals = "survivors" not in blocked
    for name in names:
        (run := Path(root) / name).mkdir(exist_ok=True)
        assert life(name, run, STEPS, seals=seals) is None
        assert life(name, run, STEPS + 2, seals=seals) == STEPS
    for guest, policy in (("boost", "MoEtion"), ("survivors", "Dense")):
        if guest in blocked:
            with pytest.raises(ImportError, match=rf"moe_ckpt.{guest} is blocked"):
                life(policy, Path(root), STEPS, seals=guest == "survivors")
    loaded = {name.split(".")[1] for name in sys.modules if name.startswith("moe_ckpt.")}
    unneeded = {"windows"} if adapter == "megatron" else set()  # whose replay alone needs it
    assert loaded & GUESTS == GUESTS - set(blocked) - unneeded


@pytest.mark.parametrize("adapter", ["lightning", "megatron"])
@pytest.mark.parametrize(
    ("names", "guests", "ranks"),
    [
        (("Dense", "MoC", "CheckFreq"), (), 1),
        (("MoEtion",), ("boost",), 1),
        (("Dense",), ("survivors",), 1),
        (("Gemini",), ("survivors",), 2),
        (("MoEvement",), ("windows",), 1),
        (("GradientLog",), ("gradient_log", "survivors"), 1),
    ],
    ids=["none of them", "boost alone", "survivors alone", "copies on a peer", "windows alone", "a gradient log"],
)
def test_a_run_without_guests_imports_none(adapter, names, guests, ranks, tmp_path):
    arguments = adapter, names, sorted(GUESTS.difference(guests)), str(tmp_path)
    program = f"from tests.unit.test_guests import lived; lived(*{arguments!r})"
    errors, processes = [], []
    try:
        for rank in range(ranks):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "GLOO_SOCKET_IFNAME": "lo"}
            environment = os.environ | {name: str(value) for name, value in environment.items()}
            errors.append(tmp_path / f"errors of rank {rank}")
            with errors[-1].open("w") as stderr:
                command = [sys.executable, "-c", program]
                processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=stderr))
        codes = [process.wait(300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(codes), [path.read_text()[-4000:] for path in errors]
