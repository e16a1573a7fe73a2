"""Lightning's batch count within an epoch, after a restart with another number of ranks.

Lightning counts the batches of an epoch, and what happens when is decided by that count: the last batch, gradient
accumulation, validations. With another number of ranks the same epoch has another number of batches. So the count is
set to what a run of the new size would have: the number of its batches in an epoch, less those still to come.

What follows from that, where the count changes:

- The epoch ends with its last sample, and the next ones are whole epochs of the new size.
- Gradient accumulation. Checkpoints are taken after an optimizer step, so no gradient is lost. The first step after
  the restart is made when the new count divides by ``accumulate_grad_batches``: of fewer batches than the others, if
  the old stop is no multiple of the new step's samples. Who keeps the global batch (ranks x batch size x accumulation)
  the same never sees that.
- Validation comes where the new count says so (``val_check_interval``; a fraction of an epoch stays that fraction, and
  the epoch's end its end). One that was due at the very stop is made if it is due in the new count, too, and left out
  otherwise; none is made up for. ``check_val_every_n_epoch=None`` counts batches over all epochs, which goes on.
- If nothing is left for the new size (``drop_last``, ``limit_train_batches``), the epoch is over, with its validation
  and the schedulers that step per epoch.
"""

from __future__ import annotations

import math
from typing import Any

from lightning.fabric.utilities.data import sized_len


def whole_and_left(trainer: Any, dealt: list[tuple[int, int] | None]) -> tuple[float, float]:
    """Batches of a whole epoch of all training loaders together, and of its rest.

    dealt: the same for each loader, None for one that goes by Lightning's own count.
    """
    loader = trainer.fit_loop._combined_loader
    done = trainer.fit_loop.epoch_loop.batch_progress.current.processed
    counts: list[tuple[float, float]] = []
    for each, known in zip(loader.flattened, dealt, strict=True):
        length = math.inf if (sized := sized_len(each)) is None else sized
        counts.append(known or (length, length - done))
    if loader._mode == "min_size":
        return min(whole for whole, _ in counts), min(left for _, left in counts)
    longest = max(whole for whole, _ in counts)  # shorter ones are cycled through, or give None
    return longest, max(left for whole, left in counts if whole == longest)


def go_on_at(trainer: Any, whole: float, left: float) -> int:
    """Set the batch count of the epoch loop such that ``left`` of ``whole`` batches are to come; return it.

    Called at ``on_train_start`` of a run that goes on in the middle of an epoch.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    current = progress.current
    if math.isinf(whole):
        return int(current.processed)
    done = int(min(whole - left, trainer.fit_loop.max_batches))
    # Lightning's own word for it also holds after one that was made again after a restart, and came to its end.
    interrupted = loop.val_loop.restarted_mid_evaluation and not loop.val_loop.batch_progress.is_last_batch
    ended = progress.is_last_batch
    over = done >= trainer.fit_loop.max_batches
    if done == current.processed and over == ended:
        return done
    unfinished = current.processed - current.completed
    current.ready = current.started = current.processed = done
    current.completed = done - unfinished
    if over and not ended:
        _end_epoch(loop)
    due = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
    if over and not ended and due:
        _interrupt(loop.val_loop)
    elif not (interrupted and due):
        _leave_out(loop.val_loop)
    loop.update_restart_stage()
    # The step counter of loggers, which is one behind in checkpoints, save for that of an epoch's last batch.
    counts = (due or not loop.restarted_on_last) and not loop._should_accumulate()
    loop._batches_that_stepped += (not ended or interrupted) - counts
    return done


def _end_epoch(loop: Any) -> None:
    """As if the last batch that was trained on had been the epoch's last."""
    progress = loop.batch_progress
    progress.current.completed = progress.current.processed
    progress.total.completed = progress.total.processed
    progress.is_last_batch = True
    loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def _interrupt(val_loop: Any) -> None:
    """Lightning makes a validation that broke off in its first batch; see ``lightning_state``."""
    done = val_loop.batch_progress.total.completed
    val_loop.batch_progress.total.load_state_dict(
        {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    )


def _leave_out(val_loop: Any) -> None:
    done = val_loop.batch_progress.total.completed
    val_loop.batch_progress.total.load_state_dict(dict.fromkeys(("ready", "started", "processed", "completed"), done))
