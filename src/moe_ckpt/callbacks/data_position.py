"""The data's order and position after a resume in the middle of an epoch.

Lightning (2.6) makes the loader's iterator before it tells the sampler the epoch, so a sampler that shuffles by epoch
(``DistributedSampler``) would use the first epoch's order: some samples twice, others never. And it leaves the position
to stateful loaders, whose state is of one number of ranks. ``RecoverableDistributedSampler`` has a position for any
number; ``loop_position`` converts it to Lightning's batch count.

Lightning (2.6) recognises the last batch of a loader without a length by fetching each batch before it trains on the
one in front of it. The loaders' own states are then one batch ahead of training, and so are the random numbers that a
fetch in this process draws. Both are noted right before each fetch, and a checkpoint gets the notes of the fetch of the
waiting batch.

torchdata's loaders apply their state when their next iterator is made, long after ``load_state_dict`` has returned: in
Lightning's ``setup_data``, where their errors name neither the loader nor the checkpoint.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import BatchSampler

from moe_ckpt.callbacks.compat import NAMES, DataLoaderIterDataFetcher, PrefetchDataFetcher, Private, Stateful
from moe_ckpt.callbacks.loop_position import count_batches, set_batch_count
from moe_ckpt.data import RecoverableDistributedSampler
from moe_ckpt.driver.changes import Change, batches_of, changes_between, warn_of_changes
from moe_ckpt.driver.host import loading_state
from moe_ckpt.errors import ConfigError
from moe_ckpt.modeling.rng import capture_rng, restore_rng
from moe_ckpt.recovery.replay import are_plain_states_equal
from moe_ckpt.stopwatch import Stopwatch

log = logging.getLogger("moe_ckpt")

FETCH_KEY = "moe_ckpt_fetched_ahead"
"""Key in a Lightning checkpoint, if the next batch was fetched ahead: what fetching it again needs beside the loaders'
states. ``rng``: the generators' states before the fetch, if it drew. ``consumed``: which loaders had started over.
"""


_ADVICE = (
    "Its sampler may be of another kind than in the run, as where another number of ranks gives it another one "
    "(RecoverableDistributedSampler is for any number, on one rank too), or its dataset or number of workers another "
    "one: build it as in the run, or begin another run from its weights (weights_from=)."
)


class LoaderWatch:
    """Notes the positions of loaders without a length before each fetch, and names a loader that refuses its state.

    Until ``close``, methods of Lightning's loops are replaced: that which sets up data, that which gives loaders their
    states, because the first batch is fetched right after it, and where it matters those around each fetch.

    Args:
        loop: The trainer's fit loop, whose data are not set up yet.
        path: Returns the file that the state comes from, for messages.
        stopwatch: Counts the time that notes take.
    """

    def __init__(self, loop: Any, path: Callable[[], str], stopwatch: Stopwatch) -> None:
        self._loop = loop
        self._states: list[dict[str, Any]] | None = None
        self._consumed: list[bool] = []
        self._rng: Mapping[str, Any] = {}
        self._drew = False
        self._due: Mapping[str, Any] = {}
        epoch = loop.epoch_loop
        set_up, load = loop.setup_data, Private(loop).load_combined_loader_states
        begin, end = Private(epoch).on_before_fetch, Private(epoch).on_after_fetch

        def setup_data() -> None:
            due = loop.restarting and bool(Private(loop).combined_loader_states_to_load)
            try:
                set_up()
            except Exception as error:  # loaders of others may raise any
                loader = _refusing(loop, error.__traceback__) if due else None
                if loader is None:
                    raise
                Private(loop).data_fetcher = None  # its teardown asks a loader that has not begun for its length
                with loading_state(f"the training loader {loader}", path(), _ADVICE):
                    raise

        def loaded() -> None:
            loaded_states = Private(loop).combined_loader_states_to_load if loop.restarting else []
            load()
            if any(sized_len(loader) is None for loader in Private(loop).combined_loader.flattened):
                self._note(loaded_states)
                Private(epoch).on_before_fetch, Private(epoch).on_after_fetch = begins, ended

        def begins() -> None:
            begin()
            with stopwatch:
                if self._ahead:
                    # A resumed run needs these to fetch its first batch again.
                    due, self._due = self._due, {}
                    if due.get("consumed"):
                        Private(Private(Private(loop).combined_loader).iterator).consumed = list(due["consumed"])
                    if due.get("rng"):
                        restore_rng(due["rng"])
                    self._note()

        def ended() -> None:
            end()
            with stopwatch:
                if self._ahead:
                    self._drew = not are_plain_states_equal(self._rng, _rng())

        loop.setup_data, Private(loop).load_combined_loader_states = setup_data, loaded

    def close(self) -> None:
        """Restores the loops' own methods, and notes nothing any more. Safe to call twice."""
        self._states = None
        for name in ("setup_data", NAMES["load_combined_loader_states"]):
            vars(self._loop).pop(name, None)
        for name in (NAMES["on_before_fetch"], NAMES["on_after_fetch"]):
            vars(self._loop.epoch_loop).pop(name, None)

    @property
    def _ahead(self) -> bool:
        """Returns whether each batch is fetched while the one in front of it waits."""
        fetcher = Private(self._loop).data_fetcher
        return isinstance(fetcher, PrefetchDataFetcher) and fetcher.length is None

    @property
    def states(self) -> list[dict[str, Any]] | None:
        """Returns the states of all stateful loaders before the batch that waits was fetched; None if none waits."""
        return self._states if self._ahead else None

    def _note(self, loaded_states: list[dict[str, Any]] | None = None) -> None:
        """Notes the loaders' positions.

        Args:
            loaded_states: States that were just loaded, which the loaders may not return before a fetch.
        """
        loader = Private(self._loop).combined_loader
        # A copy, since a dataset's next sample may change the state that it has returned.
        self._states = loaded_states or deepcopy(Private(loader).state_dicts())
        self._consumed = list(getattr(Private(loader).iterator, NAMES["consumed"], ()))
        self._rng, self._drew = _rng(), True  # until the fetch has ended; the end of the first one is not seen

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Sets the loaders' states in a Lightning checkpoint to those before the batch that waits was fetched."""
        if not self.states:
            return  # no batch waits, or no loader is stateful
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = self.states
        more: dict[str, Any] = {"rng": self._rng} if self._drew else {}
        if any(self._consumed):
            more["consumed"] = self._consumed
        if more:
            checkpoint[FETCH_KEY] = more

    def fetch_again(self, states: list[dict[str, Any]], due: Mapping[str, Any]) -> None:
        """Restarts the loaders, and fetches another batch in place of the one that waits.

        Args:
            states: Of the stateful loaders.
            due: ``FETCH_KEY`` of the checkpoint.
        """
        fetcher, epoch = Private(self._loop).data_fetcher, self._loop.epoch_loop
        self._due = due
        Private(fetcher).start_profiler = Private(epoch).on_before_fetch
        Private(fetcher).stop_profiler = Private(epoch).on_after_fetch
        Private(Private(self._loop).combined_loader).load_state_dicts(states)
        iter(fetcher)


def _rng() -> dict[str, Any]:
    """Returns ``capture_rng()`` without numpy arrays, with which Lightning's own files could not be loaded."""
    state = capture_rng()
    if isinstance(state["numpy"], tuple):
        state["numpy"] = tuple(part.tolist() if isinstance(part, np.ndarray) else part for part in state["numpy"])
    return state


def _refusing(loop: Any, traceback: TracebackType | None) -> str | None:
    """Describes the loader that raised an error while it took its state or began; None if none of the loaders did."""
    loaders = [] if Private(loop).combined_loader is None else Private(loop).combined_loader.flattened
    while traceback is not None:
        code, names = traceback.tb_frame.f_code, traceback.tb_frame.f_locals
        if code.co_name in ("__iter__", "load_state_dict"):
            for number, loader in enumerate(loaders, start=1):
                if loader is names.get("self"):
                    which = f" (number {number} of {len(loaders)})" if len(loaders) > 1 else ""
                    sampler = type(getattr(loader, "sampler", None)).__name__
                    return f"{type(loader).__name__}{which} with the sampler {sampler}"
        traceback = traceback.tb_next
    return None


POSITION_KEY = "moe_ckpt_data_position"
"""Key in a Lightning checkpoint: for each training loader the state of its sampler, or None."""
GENERATORS_KEY = "moe_ckpt_loader_generators"
"""Key in a Lightning checkpoint: for each training loader the state of the generator that it was given, or None."""
RELOAD_KEY = "moe_ckpt_loaders_made"
"""Key in a Lightning checkpoint: the epoch in which loaders were made (``reload_dataloaders_every_n_epochs``)."""
BATCHES_KEY = "moe_ckpt_loader_batches"
"""Key in a Lightning checkpoint: for each training loader the sizes that its position counts by (``batches_of``)."""


@dataclass(frozen=True)
class BatchDealer:
    """A loader's recoverable sampler, and how the loader makes batches of its samples."""

    sampler: RecoverableDistributedSampler
    batch_size: int
    drop_last: bool

    def batches(self, samples: int) -> int:
        """Returns how many batches a rank makes of ``samples``."""
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    @property
    def whole(self) -> int:
        """The number of batches of a whole epoch."""
        return self.batches(self.sampler.num_samples)

    @property
    def remaining(self) -> int:
        """The number of batches of this epoch from the sampler's position on."""
        return self.batches(self.sampler.remaining)

    def consumed(self, start: int, first: int, batches: int, *, cycled: bool) -> int:
        """Returns the sampler's position after ``batches`` batches.

        Args:
            start: The position before them.
            first: Batches that the epoch had left at ``start``.
            batches: Batches since then.
            cycled: A longer loader sets the epoch's length, and this one starts again at its own end.
        """
        if cycled and batches > first:
            start, batches = 0, (batches - first - 1) % max(self.whole, 1) + 1
        return min(self.sampler.length, start + batches * self.batch_size * self.sampler.num_replicas)


def dealer_of(loader: object) -> BatchDealer | None:
    """Returns the loader's recoverable sampler; None if it has none, or a batch sampler of another kind."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is None:  # batch_size=None: each sample is a batch
        sampler = getattr(loader, "sampler", None)
        return BatchDealer(sampler, 1, False) if isinstance(sampler, RecoverableDistributedSampler) else None
    sampler = getattr(batch_sampler, "sampler", None)
    if not isinstance(sampler, RecoverableDistributedSampler) or not _plain(batch_sampler):
        return None
    return BatchDealer(sampler, batch_sampler.batch_size, batch_sampler.drop_last)


def _plain(batch_sampler: object) -> bool:
    """Returns whether every batch is the sampler's next ``batch_size`` samples, as in torch's and torchdata's."""
    torchs = type(batch_sampler).__module__.startswith(("torch.", "torchdata."))
    return isinstance(batch_sampler, BatchSampler) and torchs


def why_unknown(trainer: Any, loader: object) -> str | None:
    """Returns why the position of a loader's recoverable sampler is unknown; None if it is known or there is none."""
    if dealer_of(loader) is not None:
        if isinstance(Private(trainer.fit_loop).data_fetcher, DataLoaderIterDataFetcher):
            return "training_step takes batches from the iterator itself, so it is not known which were trained on"
        return None
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if isinstance(inner, RecoverableDistributedSampler):
        batches = type(getattr(loader, "batch_sampler", None)).__name__
        return (
            f"{batches} makes batches in its own way, so the position of the RecoverableDistributedSampler in it is "
            "not known after each of them (use torch's BatchSampler)"
        )
    return None


@dataclass(frozen=True)
class _Start:
    """The entry of a resume into an epoch: batches done, and position and remaining batches of each sampler."""

    epoch: int
    batches: int
    consumed: tuple[int, ...]
    remaining: tuple[int, ...]


class DataPosition:
    """Writes the samplers' positions into checkpoints and restores them, for ``MoECheckpoint``."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self._batches: list[dict[str, int | None]] = []
        self._start: _Start | None = None

    def save(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the positions as of the last batch that was trained on to a checkpoint."""
        reload_epoch = Private(trainer.fit_loop).last_train_dl_reload_epoch
        if trainer.reload_dataloaders_every_n_epochs > 1 and math.isfinite(reload_epoch):
            checkpoint[RELOAD_KEY] = reload_epoch
        if self._batches:
            checkpoint[BATCHES_KEY] = self._batches
        loader = Private(trainer.fit_loop).combined_loader
        dealers = [] if loader is None else [dealer_of(part) for part in loader.flattened]
        generators = [] if loader is None else [_generator_of(part) for part in loader.flattened]
        if any(generators):
            checkpoint[GENERATORS_KEY] = [
                None if generator is None else generator.get_state() for generator in generators
            ]
        if any(dealers):
            checkpoint[POSITION_KEY] = [
                None if dealer is None else self._position(trainer, at, dealer) for at, dealer in enumerate(dealers)
            ]

    def _position(self, trainer: Any, at: int, dealer: BatchDealer) -> dict[str, int]:
        sampler, progress = dealer.sampler, trainer.fit_loop.epoch_loop.batch_progress
        if progress.is_last_batch:
            consumed = sampler.length  # even if limit_train_batches or drop_last leaves some out
        else:
            start, trained = self._start, progress.current.processed
            cycled = Private(Private(trainer.fit_loop).combined_loader).mode == "max_size_cycle"
            if start is None or start.epoch != sampler.epoch:
                consumed = dealer.consumed(0, dealer.whole, trained, cycled=cycled)
            else:
                since = trained - start.batches
                consumed = dealer.consumed(start.consumed[at], start.remaining[at], since, cycled=cycled)
        return sampler.state_dict() | {"consumed": consumed}

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Takes the positions out of a checkpoint, for ``restore``."""
        keys = (POSITION_KEY, GENERATORS_KEY, FETCH_KEY, RELOAD_KEY, BATCHES_KEY)
        self._loaded = {key: checkpoint.pop(key) for key in keys if key in checkpoint}

    def restore(self, trainer: Any, watch: LoaderWatch, *, resumed: bool) -> None:
        """Sets samplers to the loops' position, and makes a new iterator if the present one began elsewhere.

        Called in ``on_train_start``, before the RNG is restored, because a new iterator draws from it. Samplers of
        other classes are left alone if they have no ``set_epoch``, or keep their position themselves.

        Args:
            trainer: Of the fit.
            watch: Of its loaders.
            resumed: Loops and RNG come from one of our checkpoints.

        Raises:
            ConfigError: The positions are of other loaders, another dataset, seed or order.
        """
        loop = trainer.fit_loop
        loaded, self._loaded, self._start = self._loaded, {}, None
        if resumed and RELOAD_KEY in loaded:
            Private(loop).last_train_dl_reload_epoch = loaded[RELOAD_KEY]
        loader, stored, fetch = Private(loop).combined_loader, loaded.get(POSITION_KEY), loaded.get(FETCH_KEY, {})
        if loader is None:
            return
        dealers = [dealer_of(part) for part in loader.flattened]
        self._batches = [batches_of(part) for part in loader.flattened]
        if trainer.is_global_zero:
            _compare(loaded.get(BATCHES_KEY, ()), self._batches, dealers)
        epoch = loop.epoch_progress.current.processed
        setters = [setter for part in loader.flattened for setter in _epoch_setters(part)] if resumed and epoch else []
        before = [dealer and dealer.sampler.state_dict() for dealer in dealers]
        ahead = watch.states
        states = Private(loader).state_dicts() if ahead is None and (setters or any(dealers)) else ahead or []
        _move(trainer, dealers, stored)
        for set_epoch in setters:
            set_epoch(epoch)
        if any(dealers) and loop.restarted_mid_epoch:
            self._start = _set_loops(trainer, dealers, positioned=stored is not None)
        if setters or fetch or before != [dealer and dealer.sampler.state_dict() for dealer in dealers]:
            states = _without(states, loader.flattened, dealers)
            if ahead is not None:
                watch.fetch_again(states, fetch)
            else:
                Private(loader).load_state_dicts(states)
                iter(Private(loop).data_fetcher)
        for part, state in zip(loader.flattened, loaded.get(GENERATORS_KEY, ()), strict=False):
            generator = _generator_of(part)
            if generator is not None and state is not None:
                generator.set_state(state)


def _compare(
    before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], dealers: Sequence[BatchDealer | None]
) -> None:
    """Warns of loaders whose batches differ from the checkpoint's. A recoverable sampler counts in samples."""
    differences: list[Change] = []
    for number, (old, new, dealer) in enumerate(zip(before, now, dealers, strict=False)):
        if dealer is None:
            name = f"data loader {number} " if len(now) > 1 else "data loader "
            differences += changes_between(name, old, new, from_checkpoint=False)
    warn_of_changes(differences, rank=0)


def _generator_of(loader: object) -> torch.Generator | None:
    """Returns the generator that was given to a stateful loader, from which it draws orders and seeds of workers.

    The loader's own state has this epoch's order only. Restoring that alone would not advance the generator, so later
    epochs would have other orders (torchdata 0.11).
    """
    generator = getattr(loader, "generator", None)
    return generator if isinstance(generator, torch.Generator) and isinstance(loader, Stateful) else None


def _move(trainer: Any, dealers: list[BatchDealer | None], stored: list[dict[str, int] | None] | None) -> None:
    """Sets the samplers to their epoch and stored position, or to the epoch's beginning unless it is resumed midway."""
    if stored is not None and len(stored) != len(dealers):
        raise ConfigError(
            f"the checkpoint has data positions for {len(stored)} training loaders, this run has {len(dealers)}: "
            "give the loaders of the saved run, in the same order"
        )
    loop = trainer.fit_loop
    for dealer, state in zip(dealers, stored or [None] * len(dealers), strict=True):
        if dealer is None:
            if state is not None:
                log.warning("a data position in the checkpoint is not used: its loader now has another sampler")
            continue
        _check_world(trainer, dealer.sampler)
        if state is not None:
            dealer.sampler.load_state_dict(state)
        dealer.sampler.set_epoch(loop.epoch_progress.current.processed)
        if state is None or not loop.restarted_mid_epoch:
            dealer.sampler.load_state_dict(dealer.sampler.state_dict() | {"consumed": 0})


def _check_world(trainer: Any, sampler: RecoverableDistributedSampler) -> None:
    """Raises ``ConfigError`` unless ranks that hold parts of one replica get the same samples."""
    layout = trainer.distributed_sampler_kwargs
    if sampler.follows_process_group and layout and layout["num_replicas"] != sampler.num_replicas:
        raise ConfigError(
            f"RecoverableDistributedSampler divides the data among {sampler.num_replicas} ranks, those of the process "
            f"group, but {type(trainer.strategy).__name__} trains {layout['num_replicas']} replicas of the model: give "
            "it num_replicas= and rank= of the data-parallel mesh"
        )


def _set_loops(trainer: Any, dealers: list[BatchDealer | None], *, positioned: bool) -> _Start:
    """Sets the loops to the samplers' positions."""
    loop = trainer.fit_loop
    dealt = [None if dealer is None else (dealer.whole, dealer.remaining) for dealer in dealers]
    whole, rest = count_batches(trainer, dealt)
    if not positioned:
        log.warning(
            "the checkpoint does not say where the RecoverableDistributedSampler stood: the rest of epoch %d is "
            "trained on from the beginning of its order",
            loop.epoch_progress.current.processed,
        )
        batches = loop.epoch_loop.batch_progress.current.processed
    else:
        batches = set_batch_count(trainer, whole, rest)
        _say(trainer, dealers)
    progress = loop.epoch_loop.batch_progress
    for dealer in dealers:
        if dealer is not None and positioned and progress.is_last_batch:
            dealer.sampler.load_state_dict(dealer.sampler.state_dict() | {"consumed": dealer.sampler.length})
    return _Start(
        epoch=loop.epoch_progress.current.processed,
        batches=batches,
        consumed=tuple(dealer.sampler.consumed if dealer else 0 for dealer in dealers),
        remaining=tuple(dealer.remaining if dealer else 0 for dealer in dealers),
    )


def _say(trainer: Any, dealers: list[BatchDealer | None]) -> None:
    for dealer in dealers:
        if dealer is not None and trainer.is_global_zero:
            sampler = dealer.sampler
            log.info(
                "the data continues at sample %d of %d in epoch %d", sampler.consumed, sampler.length, sampler.epoch
            )
    loaders = Private(trainer.fit_loop).combined_loader.flattened
    if all(dealer or isinstance(loader, Stateful) for dealer, loader in zip(dealers, loaders, strict=True)):
        # Lightning looks at the loader only, and would say that this one cannot be resumed.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")


def _without(
    states: list[dict[str, Any]], loaders: list[Any], dealers: list[BatchDealer | None]
) -> list[dict[str, Any]]:
    """Returns states of stateful loaders, empty for those that start at the position of their recoverable sampler."""
    ours = [dealer is not None for dealer, loader in zip(dealers, loaders, strict=True) if isinstance(loader, Stateful)]
    return [{} if has else state for has, state in zip(ours, states, strict=True)]


def _epoch_setters(loader: object) -> list[Any]:
    """Returns ``set_epoch`` of the loader's sampler and of its batch sampler's, unless they are stateful."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    stateless = [sampler for sampler in samplers if not hasattr(sampler, "load_state_dict")]
    setters = {id(sampler): getattr(sampler, "set_epoch", None) for sampler in stateless}
    return [set_epoch for set_epoch in setters.values() if callable(set_epoch)]
