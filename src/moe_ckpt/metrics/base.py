"""What the metrics share: states that hold the newest value, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar

import numpy as np
import torch
from torchmetrics import Metric

from moe_ckpt.errors import ConfigError
from moe_ckpt.metrics.plotting import axes_or_new, draw_curves, draw_now, draw_over_time


class StepMetric(Metric):
    """A number per training step.

    States have names that no other metric here uses: a ``MetricCollection`` takes metrics whose states have the same
    names and, at first, the same values for one and the same, and then updates only one of them.

    ``forward`` gives the value of that step alone. State goes into ``state_dict`` after ``persistent(True)``, as
    with any torchmetrics metric.
    """

    is_differentiable: bool | None = False
    higher_is_better: bool | None = None
    # forward() must not merge two states: the newest value replaces the one before, whatever is larger.
    full_state_update: bool | None = True

    label: ClassVar[str]
    """What the axis of a plot says, with the unit."""
    scale: ClassVar[float] = 1.0
    """What values are multiplied by in a plot."""
    parts: ClassVar[tuple[str, ...]] = ()
    """Names of the values, where ``compute`` gives several."""

    catch_up: Callable[[], None] = staticmethod(lambda: None)
    """Brings the states up to date, where a collection notes steps as plain numbers; called before ``compute``."""

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = super()._wrap_compute(compute)

        @wraps(compute)
        def up_to_date(*args: Any, **kwargs: Any) -> Any:
            self.catch_up()  # before torchmetrics looks for a cached value, or asks other ranks
            return wrapped(*args, **kwargs)

        return up_to_date

    def _state(self, name: str, default: torch.Tensor, over_ranks: str) -> None:
        self.add_state(name, default=default, dist_reduce_fx=over_ranks)

    def _tensor(self, value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(value, dtype=dtype, device=self.device)

    def plot(self, val: Any = None, ax: Any = None) -> tuple[Any, Any]:
        """Draw one value as a dot, or a curve.

        Args:
            val: A result of ``compute`` or ``forward``, or a sequence of them, one per step; ``compute()`` if None.
            ax: Matplotlib axes to draw on; new ones if None.

        Returns: figure and axes.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        value = self.compute() if val is None else val
        fig, axes = axes_or_new(ax)
        series = {key: [float(v) * self.scale for v in values] for key, values in _series(value).items()}
        draw_curves(axes, series, self.label, type(self).__name__)
        return fig, axes


def _series(value: Any) -> dict[str, list[Any]]:
    """Name -> values in time order, of one value, one dict, or a sequence of either."""
    if isinstance(value, Mapping):
        return {key: _listed(values) for key, values in value.items()}
    listed = _listed(value)
    if listed and isinstance(listed[0], Mapping):
        return {key: [entry[key] for entry in listed] for key in listed[0]}
    return {"": listed}


def _listed(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor | np.ndarray):
        return list(value.reshape(-1))
    return list(value) if isinstance(value, Sequence) else [value]


class ExpertMap(StepMetric):
    """A whole number per expert: the newest ``[L, E]`` table.

    Args:
        experts: Number of experts of each layer, where they differ; plots leave out the padding.
    """

    def __init__(self, experts: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.experts = None if experts is None else tuple(int(number) for number in experts)

    def _table(self, value: Any) -> torch.Tensor:
        """A copy, because callers keep counting in their array. Raises ``ConfigError`` unless ``[L, E]``."""
        table = self._tensor(value, torch.int64).clone()
        if table.ndim != 2 or (self.experts is not None and table.shape[0] != len(self.experts)):
            expected = "[layers, experts]" if self.experts is None else f"[{len(self.experts)}, experts]"
            raise ConfigError(f"{type(self).__name__}.update: shape {tuple(table.shape)}, wanted {expected}")
        return table

    def plot(self, val: Any = None, ax: Any = None) -> tuple[Any, Any]:
        """A heat map: layers down and experts across, or ``(layer, expert)`` down and time across.

        Args:
            val: One ``[L, E]`` table, or a sequence of them, one per step; ``compute()`` if None.
            ax: Matplotlib axes to draw on; new ones if None.

        Returns: figure and axes.

        Raises:
            MissingPackageError: matplotlib is not installed.
            ConfigError: nothing to draw yet.
        """
        value = self.compute() if val is None else val
        tables = np.asarray([_numpy(table) for table in value] if isinstance(value, Sequence) else _numpy(value))
        if not tables.size or tables.ndim not in (2, 3):
            raise ConfigError(f"{type(self).__name__}.plot: no table of layers and experts in it, {tables.shape}")
        fig, axes = axes_or_new(ax)
        (draw_now if tables.ndim == 2 else draw_over_time)(axes, tables, self.label, self.experts)
        axes.set_title(type(self).__name__)
        return fig, axes


def _numpy(table: Any) -> Any:
    array = table.detach().cpu().numpy() if isinstance(table, torch.Tensor) else np.asarray(table)
    return array if array.ndim else array.reshape(1, 1)  # torchmetrics makes a number of any tensor with one element
