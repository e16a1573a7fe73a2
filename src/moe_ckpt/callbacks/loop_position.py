"""Corrects Lightning's loops after a restart: at the end of an epoch, and the batch count on another number of ranks.

Lightning counts an epoch that resumes as restarting until its end. Then it updates no plateau scheduler, and after an
epoch's last batch it would train on what ``limit_train_batches`` left in the loader, unless a validation is due.

The batch count within an epoch decides when the last batch, an accumulated step and a validation come. On another
number of ranks the epoch has another number of batches, so the count is set to what a run of the new size has at this
position: the batches of an epoch less those still to come. Where that changes the count:

- The epoch ends with its last sample; the next epochs are whole ones of the new size.
- Checkpoints are taken after an optimizer step, so no accumulated gradient is lost. The next step comes when the new
  count divides by ``accumulate_grad_batches``: after fewer batches than usual, unless the global batch (ranks x batch
  size x accumulation) is the same.
- Validation comes where the new count says (``val_check_interval``; a fraction stays that fraction of an epoch). One
  that was due at the stop runs if it is due in the new count, too; none is made up for. With
  ``check_val_every_n_epoch=None`` the count over all epochs goes on.
- If nothing is left for the new size (``drop_last``, ``limit_train_batches``), the epoch ends, with its validation and
  the schedulers that step per epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import IterableDataset

from moe_ckpt.callbacks.compat import Private, Stateful

_PLAIN = (int, float, str, bytes, bool, tuple)


def count_steps(trainer: Any, steps: int) -> None:
    """Makes a trainer that has not trained yet count from ``steps``, which another host has done."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    progress.total.ready = progress.total.completed = Private(loop).batches_that_stepped = steps


def count_batches(trainer: Any, dealt: list[tuple[int, int] | None]) -> tuple[float, float]:
    """Returns the batches of a whole epoch, and of its rest, of all training loaders together.

    Args:
        trainer: Of the fit.
        dealt: The same for each loader; None for one that goes by Lightning's own count.
    """
    loader = Private(trainer.fit_loop).combined_loader
    done = trainer.fit_loop.epoch_loop.batch_progress.current.processed
    counts: list[tuple[float, float]] = []
    for part, batches in zip(loader.flattened, dealt, strict=True):
        length = math.inf if (sized := sized_len(part)) is None else sized
        counts.append(batches or (length, length - done))
    if Private(loader).mode == "min_size":
        return min(whole for whole, _ in counts), min(rest for _, rest in counts)
    longest = max(whole for whole, _ in counts)  # shorter ones are cycled through, or give None
    return longest, max(rest for whole, rest in counts if whole == longest)


def set_batch_count(trainer: Any, whole: float, rest: float) -> int:
    """Sets the epoch loop's batch count so that ``rest`` of ``whole`` batches are to come, and returns it.

    Called in ``on_train_start`` of a run that resumes in the middle of an epoch.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    current = progress.current
    if math.isinf(whole):
        return int(current.processed)
    done = int(min(whole - rest, trainer.fit_loop.max_batches))
    # Lightning's flag alone also holds after a validation that was repeated after a restart, and ended.
    broken_off = loop.val_loop.restarted_mid_evaluation and not loop.val_loop.batch_progress.is_last_batch
    ended = progress.is_last_batch
    over = done >= trainer.fit_loop.max_batches
    if done == current.processed and over == ended:
        return done
    unfinished = current.processed - current.completed
    current.ready = current.started = current.processed = done
    current.completed = done - unfinished
    if over and not ended:  # the newest batch is the last one of the epoch
        current.completed = current.processed
        progress.total.completed = progress.total.processed
        progress.is_last_batch = True
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    due = Private(loop).should_check_val_fx(Private(trainer.fit_loop).data_fetcher)
    if over and not ended and due:
        _set_total(loop.val_loop, interrupted_progress)
    elif not (broken_off and due):
        _set_total(loop.val_loop, lambda done: dict.fromkeys(interrupted_progress(done), done))
    loop.update_restart_stage()
    # The step counter of loggers, which is one behind in checkpoints, save for that of an epoch's last batch.
    counts = (due or not loop.restarted_on_last) and not Private(loop).should_accumulate()
    Private(loop).batches_that_stepped += (not ended or broken_off) - counts
    return done


def interrupted_progress(done: int) -> dict[str, int]:
    """Returns the total progress of a validation loop, after ``done`` batches, that runs again from its first batch."""
    return {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}


def _set_total(val_loop: Any, progress: Callable[[int], dict[str, int]]) -> None:
    total = val_loop.batch_progress.total
    total.load_state_dict(progress(total.completed))


def end_complete_epoch(trainer: Any) -> None:
    """Ends a resumed epoch at once if the checkpoint is of its last batch; after the validation, if one is due.

    Called in ``on_train_start``, when the batch count is that of this run.
    """
    loop, fetcher = trainer.fit_loop.epoch_loop, Private(trainer.fit_loop).data_fetcher
    if not loop.restarting or not Private(loop).num_ready_batches_reached() or Private(loop).is_validation_done:
        return
    loaders = Private(trainer.fit_loop).combined_loader.flattened
    datasets = [dataset for loader in loaders if (dataset := _stateful_stream(loader))]
    before = [deepcopy(dataset.state_dict()) for dataset in datasets]
    with isolate_rng():
        for loader in _loaders_begun(trainer, fetcher):
            next(loader, None)  # makes each loader use up its restored position, so the next epoch begins anew
    for dataset, state in zip(datasets, before, strict=True):
        if _is_where_it_says(dataset):
            dataset.load_state_dict(state)
    if Private(loop).should_check_val_fx(fetcher):
        return

    def advance(data_fetcher: Iterator[Any]) -> None:
        """Ends the epoch, as if every loader were exhausted."""
        del loop.advance
        raise StopIteration

    loop.advance = advance


def _stateful_stream(loader: Any) -> Any:
    """Returns the stream that a loader reads in this process, if it is stateful; else None."""
    dataset = getattr(loader, "dataset", None)
    in_process = isinstance(dataset, IterableDataset) and getattr(loader, "num_workers", 0) == 0
    return dataset if in_process and isinstance(dataset, Stateful) else None


def _is_where_it_says(dataset: Any) -> bool:
    """Returns whether a stream's next iterator continues at ``state_dict()``, as that of an endless stream does.

    Other streams use the state of ``load_state_dict`` for their next iterator only, and begin later ones at the start.
    Loading its own state into such a stream changes it; that is undone here.
    """
    before = dict(vars(dataset))
    dataset.load_state_dict(deepcopy(dataset.state_dict()))
    now = vars(dataset)
    if now.keys() == before.keys() and all(_equal(now[name], value) for name, value in before.items()):
        return True
    now.clear()
    now.update(before)
    return False


def _equal(one: Any, other: Any) -> bool:
    """Returns whether both are the same object, or plain values that are equal."""
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def _loaders_begun(trainer: Any, data_fetcher: Iterator[Any]) -> list[Iterator[Any]]:
    """Returns the iterators of all loaders that an epoch takes batches from side by side.

    Lightning's own iterator over them would start a loader again that has ended, and skip the loaders behind it.
    """
    combined = Private(trainer.fit_loop).combined_loader
    return [data_fetcher] if Private(combined).mode == "sequential" else list(Private(combined).iterator.iterators)


def end_validation(trainer: Any) -> None:
    """Puts modules back into training mode after an exception in a validation, as its end would have done.

    Otherwise a second fit of the same module would train without dropout. Called in ``on_exception``.
    """
    if trainer.validating or trainer.sanity_checking:
        Private(trainer.fit_loop.epoch_loop.val_loop).module_mode.restore(trainer.lightning_module)


def reset_validation_flag(trainer: Any) -> None:
    """Resets a flag in the trainer's loops that no checkpoint restores, after an exception in an earlier fit.

    Because of a validation before the exception, Lightning would take the resumed epoch for over, and train nothing.
    """
    Private(trainer.fit_loop.epoch_loop.val_loop).has_run = False


def restore_accumulation(trainer: Any) -> None:
    """Sets the number of accumulated batches to that of ``GradientAccumulationScheduler`` for this epoch.

    The scheduler does so at the start of an epoch, a hook that Lightning does not call again if a run resumes midway.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)


def update_plateaus(trainer: Any) -> None:
    """Makes Lightning update plateau schedulers at the end of a resumed epoch, as in any other epoch.

    Lightning does not, because metrics are in no checkpoint; but metrics of a validation have been computed again.
    Called in ``on_train_epoch_end``.
    """
    loop = trainer.fit_loop
    monitored = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if loop.restarting and monitored and all(name in trainer.callback_metrics for name in monitored):
        Private(loop).restarting = False
