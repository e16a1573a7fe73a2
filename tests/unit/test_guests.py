"""What uses none of a guest runs where it cannot be imported: each case in a process of its own.

Nothing of the package is imported here: the processes are forks of one that has imported only the frameworks.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Case:
    """Runs that need ``guests`` alone."""

    policies: tuple[str, ...]
    guests: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def blocked(self) -> frozenset[str]:
        return GUESTS.difference(self.guests)

    @property
    def seals(self) -> bool:
        """With memory that outlives the process, in which survivors seal the newest step."""
        return "survivors" in self.guests


CASES = {
    "none of them": Case(("Dense", "MoC", "CheckFreq")),
    "boost alone": Case(("MoEtion",), ("boost",)),
    "survivors alone": Case(("Dense",), ("survivors",)),
    "copies on a peer": Case(("Gemini",), ("survivors",), ranks=2),
    "windows alone": Case(("MoEvement",), ("windows",)),
    "a gradient log": Case(("GradientLog",), ("gradient_log", "survivors")),
}
FRAMEWORKS = {
    "lightning": ("torch._dynamo", "lightning.pytorch", "torchdata.stateful_dataloader", "torchmetrics"),
    "megatron": ("torch._dynamo",),  # Megatron-Core asks CUDA while it is imported: of that a fork takes care
}


@dataclass(frozen=True)
class Process:
    """The one of a rank; of two ranks each is a node, and holds a copy of the other's memory."""

    rank: int
    ranks: int
    root: Path

    def options(self, run: str, *, seals: bool) -> dict[str, object]:
        from moe_ckpt import Memory

        node = self.root / run / f"node{self.rank}"
        node.mkdir(parents=True, exist_ok=True)
        memory = Memory(directory=str(node), replicas=self.ranks - 1) if seals else None
        return {"dirpath": self.root / run / "store", "memory": memory}

    def lightning(self, policy: str, steps: int, **options: object) -> int | None:
        """One life of a run; the step that it resumed from."""
        import lightning.pytorch as pl

        from moe_ckpt import policies
        from moe_ckpt.callbacks import MoECheckpoint
        from tests.support.tiny_moe import TinyMoE, loader

        callback = MoECheckpoint(policy=getattr(policies, policy)(), **options)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        layout = {"accelerator": "cpu", "devices": self.ranks, "strategy": "auto" if self.ranks == 1 else "ddp"}
        pl.Trainer(max_steps=steps, callbacks=[callback], **layout, **quiet).fit(TinyMoE(), loader())
        return callback.restored_step

    def megatron(self, policy: str, steps: int, **options: object) -> int | None:
        """The same of the real Megatron-Core."""
        from tests.support import megatron_gpt
        from tests.support.megatron_warm import quiet

        quiet()
        built = megatron_gpt.build(megatron_gpt.Setup(layers=2, num_microbatches=1), seed=1)
        from moe_ckpt import policies
        from moe_ckpt.megatron import attach

        policy = getattr(policies, policy)()
        with attach(built.chunks, built.optimizer, built.scheduler, policy=policy, **options) as ckpt:
            for iteration in range(ckpt.resume().iteration, steps):
                megatron_gpt.train_step(built, iteration)
                ckpt.after_step(iteration + 1, consumed_samples=iteration + 1)
        return ckpt.restored_step

    def live(self, adapter: str, case: Case) -> None:
        """Two lives with each policy, then one that asks for a guest that is blocked."""
        import torch.distributed as dist

        assert not [name for name in sys.modules if name.startswith("moe_ckpt.")]
        sys.meta_path.insert(0, Blocked(case.blocked))
        if adapter == "megatron" or self.ranks > 1:
            rendezvous = {"init_method": f"file://{self.root}/rendezvous", "rank": self.rank, "world_size": self.ranks}
            dist.init_process_group("gloo", **rendezvous)
        life = {"lightning": self.lightning, "megatron": self.megatron}[adapter]
        for policy in case.policies:
            options = self.options(policy, seals=case.seals)
            assert life(policy, STEPS, **options) is None
            assert life(policy, STEPS + 2, **options) == STEPS
        for guest, policy in (("boost", "MoEtion"), ("survivors", "Dense")):
            if guest in case.blocked:
                with pytest.raises(ImportError, match=rf"moe_ckpt.{guest} is blocked"):
                    life(policy, STEPS, **self.options("refused", seals=case.seals or guest == "survivors"))
        loaded = {name.split(".")[1] for name in sys.modules if name.startswith("moe_ckpt.")}
        unneeded = {"windows"} if adapter == "megatron" else set()  # whose replay alone needs it
        assert loaded & GUESTS == GUESTS - case.blocked - unneeded


def fork(adapter: str, case: Case, process: Process) -> int:
    if pid := os.fork():
        return pid
    try:
        os.environ |= {"RANK": f"{process.rank}", "LOCAL_RANK": f"{process.rank}", "WORLD_SIZE": f"{process.ranks}"}
        process.live(adapter, case)
    except BaseException:  # a process boundary
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def live_all(adapter: str, root: str) -> None:
    """The child: each case in forks of it."""
    for name in FRAMEWORKS[adapter]:
        importlib.import_module(name)
    for name, case in CASES.items():
        print(f"-- {name}", file=sys.stderr, flush=True)
        place = Path(root, name.replace(" ", "_"))
        place.mkdir()
        ranks = [fork(adapter, case, Process(rank, case.ranks, place)) for rank in range(case.ranks)]
        if any([os.waitpid(pid, 0)[1] for pid in ranks]):  # noqa: C419 - each is waited for
            sys.exit(f"in the case of {name!r}")


@pytest.mark.parametrize("adapter", FRAMEWORKS)
def test_a_run_without_guests_imports_none(adapter, tmp_path):
    program = f"from tests.unit.test_guests import live_all; live_all({adapter!r}, {str(tmp_path)!r})"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        command = [sys.executable, "-c", program]
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=stderr, start_new_session=True)
        try:
            code = child.wait(300)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    assert not code, errors.read_text()[-4000:]
