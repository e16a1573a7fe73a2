"""The host of a PyTorch loop: its step, and its plain state, read and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from moe_ckpt.driver.attached import LoopHost
from moe_ckpt.driver.changes import Change, batches_of, differing, optimizer_changes, schedules_of
from moe_ckpt.driver.host import Stateful, loading_state
from moe_ckpt.driver.loop import LoopPosition
from moe_ckpt.driver.torch_model import TorchHost
from moe_ckpt.modeling.blocks import has_blocks, is_dtensor, with_blocks, without_blocks
from moe_ckpt.recovery.executing import Restored
from moe_ckpt.recovery.replay import Repeated
from moe_ckpt.recovery.resume import other_ranks

_Plain = Mapping[str, Any]


@dataclass(frozen=True)
class Position:
    """The position at which training starts or resumes.

    Attributes:
        step: Steps done; the next one to compute is ``step + 1``, counted from 1.
        restored: False for a new run.
        counters: Counters of the loop, as given to ``after_step``; empty for a new run.
    """

    step: int = 0
    restored: bool = False
    counters: Mapping[str, Any] = field(default_factory=dict)


class PlainHost(LoopHost, TorchHost):
    """One training loop.

    Args:
        module: The model, without wrappers of data parallelism.
        optimizers: All that update it.
        stateful: As of ``attach``.
        world_size: Number of ranks.

    Attributes:
        restored: Training resumed from a checkpoint.
        buckets: The order of DDP's buckets (``modeling.bucket_order``); None where it does not matter.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer], stateful: Mapping[str, Stateful], world_size: int
    ) -> None:
        LoopHost.__init__(self, stateful, LoopPosition())
        TorchHost.__init__(self, module, optimizers)
        self._world_size = world_size
        self.restored = False
        self.buckets: str | None = None
        schedules = {name: schedules_of(target) for name, target in stateful.items()}
        batches = {name: batches_of(target) for name, target in stateful.items()}
        self._configured = {**self._configured, "schedules": schedules, "batches": batches}
        self._is_sharded = any(map(is_dtensor, module.parameters()))

    def load(self, restored: Restored) -> tuple[Sequence[Change], str | None]:
        plain = restored.plain
        self._load_model(plain, restored.path)
        for name, target in self.stateful.items():
            with loading_state(f"{name} ({type(target).__name__})", restored.path):
                state = plain["stateful"][name]
                # ``state_dict`` of a loader may make an iterator, which draws a seed
                target.load_state_dict(without_blocks(state, target.state_dict(), name) if has_blocks(state) else state)
        before, now = plain["configured"], self._configured
        changes = list(optimizer_changes(before["optimizers"], now["optimizers"]))
        changes += differing("schedule ", before["schedules"], now["schedules"], from_checkpoint=False)
        changes += differing("data loader ", before["batches"], now["batches"], from_checkpoint=False)
        self._configured = {**now, "optimizers": before["optimizers"]}
        self.loop.set_position(int(plain["step"]), plain["counters"])
        self.restored, self.buckets = True, plain["buckets"]
        return changes, other_ranks(restored.manifest, self._world_size)

    @property
    def _scheduled(self) -> Iterable[Any]:
        return self.stateful.values()

    def _count_from(self, step: int) -> None:
        self.loop.set_position(step, {})

    def repeated(self, before: _Plain, recorded: _Plain) -> Iterable[Repeated]:
        stateful = [(f"the state of stateful={{{n!r}: ...}}", _of_stateful(n)) for n in self.stateful]
        return *super().repeated(before, recorded), *stateful

    def capture(self, *, described: bool = False) -> _Plain:
        stateful = {name: target.state_dict() for name, target in self.stateful.items()}
        self.generators.record()  # ``state_dict`` of a loader that was not iterated yet draws a seed
        return {
            "framework": "torch",
            "step": self.step,
            "counters": self.loop.counters,
            "plain": self.state.plain(described=described),
            "stateful": with_blocks(stateful) if self._is_sharded else stateful,
            "rng": self.generators.state,
            "buckets": self.buckets,
            "configured": self._configured,
        }


def _of_stateful(name: str) -> Callable[[_Plain], Any]:
    return lambda state: state["stateful"][name]
