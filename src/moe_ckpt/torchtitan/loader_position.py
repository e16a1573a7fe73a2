"""The position of torchtitan's data loaders as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader

from moe_ckpt.errors import ConfigError


class LoaderPosition:
    """The position of a loader as plain data: torchtitan's own is a pickle, which no checkpoint may hold.

    Args:
        loader: Its data set's state must be plain data, tensors or arrays.
    """

    def __init__(self, loader: ParallelAwareDataloader) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, and the number of ranks that the data is divided over."""
        return {"ranks": self._loader.dp_world_size, "loader": StatefulDataLoader.state_dict(self._loader)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of ``state_dict``.

        Raises:
            ConfigError: The data is divided over another number of ranks.
        """
        ranks = self._loader.dp_world_size
        if state["ranks"] != ranks:
            raise ConfigError(
                f"the checkpoint's run divided its data by {state['ranks']}, and this one by {ranks}: positions in the "
                "data cannot be carried over. Use as many ranks for data parallelism, or start a new run with "
                "weights_from="
            )
        StatefulDataLoader.load_state_dict(self._loader, state["loader"])
