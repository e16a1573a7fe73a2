"""The host of a PyTorch loop: its step, and its plain state, read and restored; and what Fabric wraps objects in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from moe_ckpt.driver.attached import LoopHost, LoopPosition
from moe_ckpt.driver.changes import Change, batches_of, changes_between, optimizer_changes, schedules_of
from moe_ckpt.driver.host import Stateful, loading_state
from moe_ckpt.driver.torch_model import TorchHost
from moe_ckpt.errors import ConfigError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.modeling.blocks import has_blocks, is_dtensor, require_known_holders, with_blocks, without_blocks
from moe_ckpt.modeling.bucket_order import BucketOrder
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
        model: The model.
        optimizers: All that update it.
        stateful: As of ``attach``.
        world_size: Number of ranks.

    Raises:
        UnsupportedError: It is not known what some ranks hold of a parameter.

    Attributes:
        buckets: The order of DDP's buckets.
        stepped: How often optimizers stepped in the newest step, since some may rest, or step more than once.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], stateful: Mapping[str, Stateful], world_size: int
    ) -> None:
        module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        for name, parameter in module.named_parameters():
            require_known_holders(name, parameter, world_size)
        LoopHost.__init__(self, stateful, LoopPosition())
        TorchHost.__init__(self, module, optimizers)
        self._world_size, self.stepped = world_size, 0
        self.buckets = BucketOrder(model, world_size)
        schedules = {name: schedules_of(target) for name, target in stateful.items()}
        batches = {name: batches_of(target) for name, target in stateful.items()}
        self._configured = {**self._configured, "schedules": schedules, "batches": batches}
        self._is_sharded = any(map(is_dtensor, module.parameters()))

    def admits(self, manifest: Manifest, plain: _Plain) -> None:
        LoopHost.admits(self, manifest, plain)
        TorchHost.admits(self, manifest, plain)

    def load(self, restored: Restored) -> tuple[Sequence[Change], str | None]:
        plain = restored.plain
        changes = self._load_model(plain, restored.path)
        for name, target in self.stateful.items():
            with loading_state(f"{name} ({type(target).__name__})", restored.path):
                state = plain["stateful"][name]
                # ``state_dict`` of a loader may make an iterator, which draws a seed
                target.load_state_dict(without_blocks(state, target.state_dict(), name) if has_blocks(state) else state)
        self.restore_loader_generators(plain)
        before, now = plain["configured"], self._configured
        changes += optimizer_changes(before["optimizers"], now["optimizers"])
        changes += changes_between("schedule ", before["schedules"], now["schedules"], from_checkpoint=False)
        changes += changes_between("data loader ", before["batches"], now["batches"], from_checkpoint=False)
        self._configured = {**now, "optimizers": before["optimizers"], "frozen": before.get("frozen", now["frozen"])}
        self.loop.set_position(int(plain["step"]), plain["counters"])
        self.buckets.recorded = plain["buckets"]
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
            "stepped": self.stepped,
            "counters": self.loop.counters,
            "plain": self.state.plain(described=described),
            "stateful": with_blocks(stateful) if self._is_sharded else stateful,
            "rng": self.generators.state,
            "loader_generators": self.loader_generators(),
            "buckets": self.buckets.recorded,
            "configured": self._configured,
        }


def _of_stateful(name: str) -> Callable[[_Plain], Any]:
    return lambda state: state["stateful"][name]


# --- objects that Fabric or accelerate has prepared ---


def torch_model(model: Any) -> nn.Module:
    """Returns the model in Fabric's wrapper; others as they are."""
    inner: nn.Module = getattr(model, "_forward_module", model)
    return inner


def torch_optimizer(optimizer: Any) -> Any:
    """Returns the torch optimizer in one that accelerate or Fabric has prepared; others as they are."""
    inner = getattr(optimizer, "optimizer", None)
    return torch_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def torch_loader(name: str, loader: Any) -> Any:
    """Returns the loader in Fabric's; a ``FabricLoader`` if that is stateful; other loaders as they are.

    Raises:
        ConfigError: Fabric has wrapped the sampler in one of its own, whose order nothing saves.
    """
    inner = getattr(loader, "_dataloader", None)
    if not isinstance(inner, DataLoader):
        return loader
    samplers = (inner.sampler, getattr(inner.batch_sampler, "sampler", None))
    if any(type(sampler).__name__ == "DistributedSamplerWrapper" for sampler in samplers):
        raise ConfigError(
            f"moe_ckpt.attach: Fabric divides the loader {name} among the ranks by a sampler of its own, whose order "
            "nobody can restore. Give the loader sampler=torch.utils.data.DistributedSampler(data), and write "
            "fabric.setup_dataloaders(loader, use_distributed_sampler=False)"
        )
    return FabricLoader(loader) if hasattr(inner, "state_dict") else inner


class FabricLoader:
    """The position of a loader of ``fabric.setup_dataloaders``, whose order depends on how often it was iterated.

    Args:
        fabrics: The loader.

    Attributes:
        loader: The loader inside, which Fabric has made anew on several ranks.
    """

    def __init__(self, fabrics: Any) -> None:
        self._fabrics = fabrics
        self.loader = fabrics._dataloader

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the epoch, and how many epochs have begun."""
        return {**self.loader.state_dict(), "epochs_begun": self._fabrics._num_iter_calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of ``state_dict``. An epoch that is not over counts as not begun, as it begins again."""
        epochs = state["epochs_begun"]
        self._fabrics._num_iter_calls = epochs if state.get("_iterator_finished") else max(0, epochs - 1)
        self.loader.load_state_dict({name: value for name, value in state.items() if name != "epochs_begun"})
