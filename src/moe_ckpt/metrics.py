"""Gives the costs of checkpoints, and those of a failure, as torchmetrics over the records of steps.

Over ranks each state is reduced so that nothing counts twice: bytes add up, stalls are those of the slowest rank,
and what is the same on every rank (token counts are reduced before they come here) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_ckpt.core.tokens import normalized_hhi
from moe_ckpt.errors import ConfigError, MissingPackageError
from moe_ckpt.run.events import SessionEvent, StepEnded, StepRecord, TrainingEnded
from moe_ckpt.run.run_ledger import RunLedger

try:
    from torchmetrics import Metric, MetricCollection
except ImportError as error:
    raise MissingPackageError("torchmetrics", "moe_ckpt.metrics", "lightning") from error

__all__ = ["CheckpointMetrics"]

_ADDED = ("nbytes", "frozen_nbytes", "popularity", "stall_ns", "steps")
"""Facts that add up over steps. Of ``worst_stall_ns`` the largest counts, of all others the newest."""
_ADDED_OVER_RANKS = ("nbytes", "frozen_nbytes", "popularity")
"""Of all other facts the largest counts, which is every rank's, but for stalls: all wait for the slowest rank."""
_RECORDED = ("lost_tokens", "routed_tokens", "at_risk_mlt", "oldest_expert_steps")
_UNKNOWN_AT_FIRST = ("mlt_newest", "mlt_worst", "owed_tokens", "k", "window_age")
"""These two are the facts that stand in a record."""
_MLT, _WINDOW = _UNKNOWN_AT_FIRST[:2], ("window_size", "window_slot")
_INITIAL = dict.fromkeys((*_UNKNOWN_AT_FIRST, *_WINDOW), torch.nan) | {
    "at_risk_mlt": 0.0,
    "popularity": [[0]],
    "ages": [[]],
    "unsaved": [[]],
    "experts": [],
}
"""Facts before the first step; all others are 0."""


class _Definition(NamedTuple):
    """A metric: the label of its axis in a plot, its states, what makes its value of them (or a value for each of its
    ``parts``), and the factor of values in a plot."""

    label: str
    facts: tuple[str, ...]
    value: Callable[..., Any]
    scale: float = 1.0
    parts: tuple[str, ...] = ()


def _newest(*states: torch.Tensor) -> Any:
    return states if len(states) > 1 else states[0]


def _table(table: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return table


def _share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return part / whole.clamp(min=1)


def _skewness(popularity: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    layers = normalized_hhi(popularity.cpu().numpy(), experts.tolist() or None)
    return torch.tensor(layers.mean() if layers.size else 0.0, device=popularity.device)


_METRICS = {
    "plt": _Definition("lost tokens (%)", ("lost_tokens", "routed_tokens"), _share, 100),
    "at_risk": _Definition("tokens at risk (%)", ("at_risk_tokens", "routed_tokens"), _share, 100),
    "mlt": _Definition(
        "momentary lost tokens (%)", ("at_risk_mlt", *_MLT), _newest, 100, ("mlt_if_failed_now", *_MLT)
    ),
    "owed_tokens": _Definition("tokens to make up", ("owed_tokens",), _newest),
    "k": _Definition("experts per layer", ("k",), _newest),
    "skewness": _Definition("skewness of expert load", ("popularity", "experts"), _skewness),
    "bytes": _Definition("written per iteration (MB)", ("nbytes", "steps"), _share, 1e-6),
    "fidelity": _Definition(
        "written per iteration (MB)", ("nbytes", "frozen_nbytes", "steps"),
        lambda nbytes, frozen, steps: (_share(nbytes - frozen, steps), _share(frozen, steps)),
        1e-6, ("bytes_full", "bytes_compute"),
    ),
    "stall": _Definition(  # of whole nanoseconds: a sum of floats would no longer grow after some hours
        "stall per iteration (ms)", ("stall_ns", "worst_stall_ns", "steps"),
        lambda total, worst, steps: (_share(total, steps) / 1e6, worst / 1e6),
        parts=("stall_ms_mean", "stall_ms_worst"),
    ),
    "window_age": _Definition("age of the newest complete window (steps)", ("window_age",), _newest),
    "window": _Definition("steps", _WINDOW, _newest, parts=_WINDOW),
    "oldest_expert_steps": _Definition("age of the oldest expert (steps)", ("oldest_expert_steps",), _newest),
    "expert_ages": _Definition("steps since the expert was saved", ("ages", "experts"), _table),
    "unsaved_tokens": _Definition("unsaved tokens", ("unsaved", "experts"), _table),
}  # fmt: skip


class StepMetric(Metric):
    """One entry of ``CheckpointMetrics``, whose ``catch_up`` is called before anything is read or changed here."""

    full_state_update = True  # forward() must not merge two states: the newest value replaces the one before
    catch_up: Callable[[], None]
    experts: torch.Tensor

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.name = name
        for fact in _METRICS[name].facts:
            initial = _INITIAL.get(fact, 0)
            state = torch.tensor(initial, dtype=torch.float64 if isinstance(initial, float) else torch.int64)
            self.add_state(fact, state, "sum" if fact in _ADDED_OVER_RANKS else "max")

    def update(self, **facts: Any) -> None:
        """Takes what ``facts_of`` returns, of one step or summed over several."""
        self.catch_up()
        for fact in _METRICS[self.name].facts:
            state = getattr(self, fact)
            newest = torch.tensor(facts[fact], dtype=state.dtype, device=self.device)
            setattr(self, fact, _combined(fact, state, newest))

    def compute(self) -> Any:
        """Returns the value, or values by their names. Tables are ``[layers, experts]``."""
        metric = _METRICS[self.name]
        value = metric.value(*(getattr(self, fact) for fact in metric.facts))
        return dict(zip(metric.parts, value, strict=True)) if metric.parts else value

    @property
    def update_called(self) -> bool:
        """True if there was a step. ``compute`` asks this first, before it looks for a value that it has cached."""
        self.catch_up()
        return super().update_called

    def reset(self) -> None:
        self.catch_up()
        super().reset()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        self.catch_up()
        return super().state_dict(*args, **kwargs)

    def plot(self, val: Any = None, ax: Any = None) -> tuple[Any, Any]:
        """Draws curves, or a heat map of a table: layers down and experts across, or both down and time across.

        Args:
            val: A result of ``compute`` or ``forward``, or a sequence of them, one per step; ``compute()`` if None.
            ax: Matplotlib axes to draw on; new ones if None.

        Returns: figure and axes.

        Raises:
            MissingPackageError: matplotlib is not installed.
            ConfigError: There is no table to draw yet.
        """
        metric, value = _METRICS[self.name], self.compute() if val is None else val
        figure, axes = axes_or_new(ax)
        if metric.value is _table:
            draw_tables(axes, value, metric.label, self.experts.tolist() or None)
        else:
            draw_curves(axes, value, metric.label, metric.scale)
        axes.set_title(self.name)
        return figure, axes


class CheckpointMetrics(MetricCollection):
    """The metrics of a run's steps, by name. Training notes its steps as plain numbers; they become tensors when a
    metric is asked for. Torch and numpy let other threads run in the middle of their work, and a thread that copies or
    writes gives the interpreter back milliseconds later.

    Args:
        **kwargs: Of ``torchmetrics.Metric``, for each; ``sync_on_compute=False`` makes ``compute`` this rank's own
            affair.
    """

    _noted: tuple[StepRecord, RunLedger, dict[str, Any]] | None = None

    def __init__(self, **kwargs: Any) -> None:
        metrics: dict[str, Any] = {name: StepMetric(name, **kwargs) for name in _METRICS}
        super().__init__(metrics, compute_groups=False)
        for metric in metrics.values():
            metric.catch_up = self.catch_up

    def observe(self, event: SessionEvent) -> None:
        """Notes each new step, and the newest again when training has ended: only then all ranks agreed on it."""
        if isinstance(event, StepEnded | TrainingEnded):
            self.note(event.record, event.run_ledger, again=isinstance(event, TrainingEnded))

    def note(self, record: StepRecord, run_ledger: RunLedger, *, again: bool = False) -> None:
        """Notes a step.

        Args:
            record: Of it.
            run_ledger: After it. Its tables are read when a metric is asked for.
            again: The step was noted before, and more is known about it by now: nothing is added up.
        """
        sums = _sums(record, run_ledger)
        if again:
            sums = {fact: value * 0 for fact, value in sums.items()}
        if self._noted is not None:
            sums = {fact: _combined(fact, value, sums[fact]) for fact, value in self._noted[2].items()}
        self._noted = record, run_ledger, sums

    def catch_up(self) -> None:
        """Updates the metrics by the steps that were noted."""
        noted, self._noted = self._noted, None
        if noted is not None:
            record, run_ledger, sums = noted
            self.update(**facts_of(record, run_ledger) | sums)

    def plot(self, val: Any = None, ax: Any = None, together: bool = False) -> Any:
        """Draws each metric: ``MetricCollection.plot`` does not find the values of one that has several."""
        value: Any = self.compute() if val is None else val
        several = not isinstance(value, Mapping)
        by_metric = [self._by_metric(step) for step in (value if several else [value])]
        return super().plot(by_metric if several else by_metric[0], ax, together)

    def _by_metric(self, value: Mapping[str, Any]) -> dict[str, Any]:
        named = {name: f"{self.prefix or ''}{name}{self.postfix or ''}" for name in _METRICS}
        parts = {name: [key for key in value if any(part in key for part in _METRICS[name].parts)] for name in named}
        return {key: {part: value[part] for part in parts[name]} or value[key] for name, key in named.items()}


def facts_of(record: StepRecord, run_ledger: RunLedger) -> dict[str, Any]:
    """Returns what the metrics are made of, for the step of ``record``; not for one that is computed again."""
    newest = {fact: getattr(record, fact) for fact in (*_RECORDED, *_UNKNOWN_AT_FIRST)} | {
        "window_size": record.window or None,
        "window_slot": record.slot if record.window else None,
        "at_risk_tokens": run_ledger.ledger.at_risk.tokens,
        "ages": run_ledger.ledger.expert_ages(record.step),
        "unsaved": run_ledger.tokens.unsaved(),
        "experts": [layer.experts for layer in run_ledger.ledger.catalog.layers],
    }
    return {fact: torch.nan if value is None else value for fact, value in newest.items()} | _sums(record, run_ledger)


def _sums(record: StepRecord, run_ledger: RunLedger) -> dict[str, Any]:
    stall_ns = round(record.stall_secs * 1e9)
    return {
        "nbytes": record.nbytes,
        "frozen_nbytes": record.frozen_nbytes,
        "popularity": run_ledger.activity.newest,
        "stall_ns": stall_ns,
        "worst_stall_ns": stall_ns,
        "steps": 1,
    }


def _combined(fact: str, before: Any, newest: Any) -> Any:
    if fact == "worst_stall_ns":
        return max(before, newest)
    return before + newest if fact in _ADDED else newest


NOTHING = "#e8e8e8"
"""Colour of a cell for which there is no value: never saved, or no such expert."""
MAX_ROW_LABELS = 32


def axes_or_new(ax: Any) -> tuple[Any, Any]:
    """Returns the figure and axes to draw on. Raises ``MissingPackageError``: matplotlib is not installed."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingPackageError("matplotlib", "plot()", "plot") from error
    return plt.subplots(layout="constrained") if ax is None else (ax.get_figure(), ax)


def draw_curves(ax: Any, value: Any, label: str, scale: float) -> None:
    """Draws a line for each name in ``value``: numbers or dicts of them, one or a sequence; a lone one is a dot."""
    if isinstance(value, Sequence):
        named = isinstance(value[0], Mapping)
        value = {key: [step[key] for step in value] for key in value[0]} if named else {"": [*map(float, value)]}
    longest = 0
    for key, values in (value if isinstance(value, Mapping) else {"": value}).items():
        numbers = scale * np.atleast_1d(np.asarray(values, dtype=np.float64))
        longest = max(longest, len(numbers))
        ax.plot(range(len(numbers)), numbers, label=key, marker="o" if len(numbers) == 1 else None)
    ax.set_ylabel(label)
    if longest > 1:
        ax.set_xlabel("Step")
    else:
        ax.set_xticks([])
    if len(ax.lines) > 1:
        ax.legend(frameon=False)


def draw_tables(ax: Any, value: Any, label: str, experts: Sequence[int] | None) -> None:
    """Draws one table ``[layers, experts]``, layers down and experts across, or a sequence of them over time.

    Raises:
        ConfigError: There is nothing in it.
    """
    tables = np.asarray(
        [np.atleast_2d(table) for table in value] if isinstance(value, Sequence) else [np.atleast_2d(value)]
    )
    if not tables.size:
        raise ConfigError(
            f"plot of {label}: no table of layers and experts, only {tables.shape}; give one, or train a step"
        )
    if isinstance(value, Sequence):
        draw_over_time(ax, tables, label, experts)
        return
    _, layers, width = tables.shape
    _heat(ax, _masked(tables, experts)[0], label)
    ax.set(xlabel="expert", ylabel="MoE layer", xticks=_ticks(width), yticks=_ticks(layers))


def draw_over_time(
    ax: Any, tables: Any, label: str, experts: Sequence[int] | None = None, *,
    steps: Sequence[float] | None = None, vmax: float | None = None,
) -> None:  # fmt: skip
    """Draws ``(layer, expert)`` down, time across.

    Args:
        tables: ``[steps, layers, experts]``.
        experts: Number of experts of each layer; None if all have the same.
        steps: The step of each table, 0, 1, ... if None.
        vmax: The value of the strongest colour; the largest if None.
    """
    count, layers, width = np.shape(tables)
    rows = [(la, ex) for la in range(layers) for ex in range(width if experts is None else experts[la])]
    stacked = _masked(tables, experts)[:, [la for la, _ in rows], [ex for _, ex in rows]].T
    at = list(range(count)) if steps is None else list(steps)
    half = (at[-1] - at[0]) / (count - 1) / 2 if count > 1 else 0.5
    _heat(ax, stacked, label, vmax=vmax, extent=(at[0] - half, at[-1] + half, len(rows) - 0.5, -0.5))
    for row, (_, expert) in enumerate(rows):
        if row and expert == 0:
            ax.axhline(row - 0.5, color="white", linewidth=1.5)
    every = -(-len(rows) // MAX_ROW_LABELS)
    ax.set(xlabel="Step", ylabel="MoE layer / expert")
    ax.set_yticks(range(0, len(rows), every), [f"{la} / {ex}" for la, ex in rows[::every]], fontsize=7)


def _masked(tables: Any, experts: Sequence[int] | None) -> Any:
    """Masks negative values, and experts that a layer does not have."""
    values = np.asarray(tables, dtype=np.float64)
    hidden = values < 0
    if experts is not None:
        hidden = hidden | (np.arange(values.shape[-1]) >= np.asarray(experts)[:, None])
    return np.ma.masked_array(values, hidden)


def _heat(ax: Any, values: Any, label: str, **options: Any) -> None:
    image = ax.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, **options)
    ax.set_facecolor(NOTHING)
    ax.get_figure().colorbar(image, ax=ax, label=label)


def _ticks(count: int) -> range:
    return range(0, count, -(-count // 16) or 1)
