"""Unwraps models, optimizers and data loaders of Fabric for an adapter that knows only torch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from moe_ckpt.errors import ConfigError


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
