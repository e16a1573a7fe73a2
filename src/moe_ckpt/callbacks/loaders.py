"""Training loaders and their states: where those are that Lightning fetches ahead of, and who refuses a stored one.

To know the last batch of such an epoch, Lightning (2.6) fetches each batch before it trains on the one in front of it.
The loaders' own states are then one batch ahead of training, and so are the random numbers that a fetch in this process
draws. Both are noted right before each fetch, and a checkpoint gets what was noted before the batch that waits.

torchdata's loaders take their state when their next iterator is made, long after ``load_state_dict`` has returned: in
Lightning's ``setup_data``, where what they raise names neither the loader nor the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from types import TracebackType
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len

from moe_ckpt.callbacks.compat import NAMES, PrefetchDataFetcher, Private
from moe_ckpt.driver.host import loading_state
from moe_ckpt.modeling.rng import capture_rng, restore_rng
from moe_ckpt.stopwatch import Stopwatch

FETCH_KEY = "moe_ckpt_fetched_ahead"
"""In a Lightning checkpoint, if the next batch was fetched ahead: what fetching it again needs beside loaders' states.

``rng``: states of the generators before the fetch, if it drew. ``consumed``: loaders that had started over this epoch.
"""


_ADVICE = (
    "Its sampler may be of another kind than in the run, as where another number of ranks gives it another one "
    "(RecoverableDistributedSampler is for any number, on one rank too), or its dataset or number of workers another "
    "one: build it as in the run, or begin another run from its weights (weights_from=)."
)


class Lookahead:
    """Notes where loaders without a length are before each fetch, for ``DataPosition``.

    Until ``close``, three methods of Lightning's loops are replaced: that which gives loaders their states, because the
    first batch is fetched right after it, and those around each fetch.

    Args:
        loop: The trainer's fit loop, whose data are not set up yet.
        stopwatch: Counts what is noted at each fetch.
    """

    def __init__(self, loop: Any, stopwatch: Stopwatch) -> None:
        self._loop = loop
        self._states: list[dict[str, Any]] | None = None
        self._consumed: list[bool] = []
        self._rng: Mapping[str, Any] = {}
        self._drew = False
        self._due: Mapping[str, Any] = {}
        load, begin, end = (getattr(owner, name) for owner, name in self._replaced)

        def loaded() -> None:
            loaded_states = Private(loop).combined_loader_states_to_load if loop.restarting else []
            load()
            if any(sized_len(loader) is None for loader in Private(loop).combined_loader.flattened):
                self._note(loaded_states)

        def begins() -> None:
            begin()
            with stopwatch:
                if self._ahead:
                    self._take_due()
                    self._note()

        def ended() -> None:
            end()
            with stopwatch:
                if self._ahead:
                    self._drew = not _same(self._rng, _rng())

        for (owner, name), method in zip(self._replaced, (loaded, begins, ended), strict=True):
            setattr(owner, name, method)

    @property
    def _replaced(self) -> tuple[tuple[Any, str], ...]:
        epoch = self._loop.epoch_loop
        return (
            (self._loop, NAMES["load_combined_loader_states"]),
            (epoch, NAMES["on_before_fetch"]),
            (epoch, NAMES["on_after_fetch"]),
        )

    def close(self) -> None:
        """Gives the loops their own methods back. Safe to call twice."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)

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
        """Notes where the loaders are; ``loaded_states`` they have just got, and may not return before a fetch."""
        loader = Private(self._loop).combined_loader
        # a dataset may return what its next sample changes
        self._states = loaded_states or deepcopy(Private(loader).state_dicts())
        self._consumed = list(getattr(Private(loader).iterator, NAMES["consumed"], ()))
        self._rng, self._drew = _rng(), True  # until the fetch has ended, of which the first is not seen

    def _take_due(self) -> None:
        """Restores what a resumed run needs to fetch its first batch again."""
        due, self._due = self._due, {}
        if due.get("consumed"):
            Private(Private(Private(self._loop).combined_loader).iterator).consumed = list(due["consumed"])
        if due.get("rng"):
            restore_rng(due["rng"])

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Sets the loaders' states in a Lightning checkpoint to those before the batch that waits was fetched."""
        if not self.states:
            return  # nothing waits, or no loader says where it is
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
    """Returns ``capture_rng()`` without arrays of numpy's, which Lightning's own files would not be loaded with."""
    state = capture_rng()
    if isinstance(state["numpy"], tuple):
        state["numpy"] = tuple(part.tolist() if isinstance(part, np.ndarray) else part for part in state["numpy"])
    return state


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(state, other[name]) if isinstance(state, torch.Tensor) else state == other[name]
        for name, state in one.items()
    )


class LoaderStates:
    """Names the loader that refuses its state. Until ``close``, Lightning's ``setup_data`` is replaced.

    Args:
        loop: The trainer's fit loop, whose data are not set up yet.
        path: Returns where the state comes from, for messages.
    """

    def __init__(self, loop: Any, path: Callable[[], str]) -> None:
        self._loop = loop
        set_up = loop.setup_data

        def setup_data() -> None:
            due = loop.restarting and bool(Private(loop).combined_loader_states_to_load)
            try:
                set_up()
            except Exception as error:  # a loader of others may raise any; all but that of its state passes
                loader = _refusing(loop, error.__traceback__) if due else None
                if loader is None:
                    raise
                Private(loop).data_fetcher = None  # its teardown asks a loader that has not begun for its length
                with loading_state(f"the training loader {loader}", path(), _ADVICE):
                    raise

        loop.setup_data = setup_data

    def close(self) -> None:
        """Gives the loop its own method back. Safe to call twice."""
        vars(self._loop).pop("setup_data", None)


def _refusing(loop: Any, traceback: TracebackType | None) -> str | None:
    """Returns which loader an error came from while it took its state or began; None if it came from elsewhere."""
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
