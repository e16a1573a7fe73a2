"""The private names of Lightning that this adapter uses; no other file has one. Tests look up each name.

Lightning has no public interface for its batch counts, its loaders, and the state of its callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.types import _PATH as PATH
from lightning.fabric.utilities.types import _Stateful as Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher as DataLoaderIterDataFetcher
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher as PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.call import _call_callback_hooks as call_callback_hooks
from lightning.pytorch.trainer.call import _call_lightning_module_hook as call_module_hook
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle

__all__ = [
    "PATH",
    "DataLoaderIterDataFetcher",
    "PrefetchDataFetcher",
    "Stateful",
    "call_callback_hooks",
    "call_module_hook",
]

ATTRIBUTES: Mapping[type, tuple[str, ...]] = {
    Trainer: ("_run",),
    _FitLoop: (
        *("_combined_loader", "_combined_loader_states_to_load", "_data_fetcher", "_last_train_dl_reload_epoch"),
        *("_load_combined_loader_states", "_restarting"),
    ),
    _TrainingEpochLoop: (
        *("_batches_that_stepped", "_is_validation_done", "_num_ready_batches_reached", "_on_after_fetch"),
        *("_on_before_fetch", "_results", "_should_accumulate", "_should_check_val_fx"),
    ),
    _EvaluationLoop: ("_has_run", "_module_mode"),
    PrefetchDataFetcher: ("_start_profiler", "_stop_profiler"),
    CombinedLoader: ("_iterator", "_load_state_dicts", "_mode", "_state_dicts"),
    _MaxSizeCycle: ("_consumed",),
    ModelCheckpoint: ("_last_checkpoint_saved", "_last_global_step_saved"),
    WeightAveraging: ("_average_model",),
    StochasticWeightAveraging: ("_clear_schedulers", "_latest_update_epoch", "_scheduler_state"),
    BaseFinetuning: ("_restarting",),
    DDPStrategy: ("_ddp_comm_hook",),
    ModelParallelStrategy: ("_device_mesh",),
}
"""Class -> attributes and methods of its instances."""
ACCUMULATED_BEFORE = "_accumulate_grad_batches"
"""Attribute of ``StochasticWeightAveraging``, which has it from the beginning of its epoch for batch norms."""
NAMES: Mapping[str, str] = {name.removeprefix("_"): name for names in ATTRIBUTES.values() for name in names}


class Private:
    """Reads and writes the private attributes of an object of Lightning's, by their names without the underscore."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        object.__setattr__(self, "_of", of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, NAMES[name])

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of, NAMES[name], value)
