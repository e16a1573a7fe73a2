"""What uses none of a guest runs where it cannot be imported: each case in a process of its own.

Nothing of the package is imported here: the processes import this module before guests are blocked in them.
"""

from __future__ import annotations

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


def lightning(policy: str, root: Path, steps: int, *, seals: bool) -> int | None:
    """One life of a run; the step that it resumed from.

    Args:
        seals: With memory that outlives the process, in which survivors seal the newest step.
    """
    import lightning.pytorch as pl

    from moe_ckpt import Memory, policies
    from moe_ckpt.callbacks import MoECheckpoint
    from tests.support.tiny_moe import TinyMoE, loader

    memory = Memory(directory=str(root)) if seals else None
    callback = MoECheckpoint(policy=getattr(policies, policy)(), dirpath=root / "store", memory=memory)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=steps, callbacks=[callback], **quiet)
    trainer.fit(TinyMoE(), loader())
    return callback.restored_step


def megatron(policy: str, root: Path, steps: int, *, seals: bool) -> int | None:
    """The same of the real Megatron-Core, on one rank."""
    import torch.distributed as dist

    from tests.support import megatron_gpt
    from tests.support.megatron_warm import quiet

    quiet()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    built = megatron_gpt.build(megatron_gpt.Setup(layers=2, num_microbatches=1), seed=1)
    from moe_ckpt import Memory, policies
    from moe_ckpt.megatron import attach

    options = {"dirpath": root / "store", "memory": Memory(directory=str(root)) if seals else None}
    with attach(built.chunks, built.optimizer, built.scheduler, policy=getattr(policies, policy)(), **options) as ckpt:
        for iteration in range(ckpt.resume().iteration, steps):
            megatron_gpt.train_step(built, iteration)
            ckpt.after_step(iteration + 1, consumed_samples=iteration + 1)
    return ckpt.restored_step


def lived(adapter: str, names: Sequence[str], blocked: Sequence[str], root: str) -> None:
    """The child: two lives with each policy, then one that asks for a guest that is blocked."""
    assert not [name for name in sys.modules if name.startswith("moe_ckpt.")]
    sys.meta_path.insert(0, Blocked(blocked))
    life = {"lightning": lightning, "megatron": megatron}[adapter]
    seals = "survivors" not in blocked
    for name in names:
        (run := Path(root) / name).mkdir()
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
    ("names", "guests"),
    [
        (("Dense", "MoC", "CheckFreq"), ()),
        (("MoEtion",), ("boost",)),
        (("Dense",), ("survivors",)),
        (("MoEvement",), ("windows",)),
        (("GradientLog",), ("gradient_log", "survivors")),
    ],
    ids=["none of them", "boost alone", "survivors alone", "windows", "a gradient log"],
)
def test_a_run_without_guests_imports_none(adapter, names, guests, tmp_path):
    arguments = adapter, names, sorted(GUESTS.difference(guests)), str(tmp_path)
    program = f"from tests.unit.test_guests import lived; lived(*{arguments!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
