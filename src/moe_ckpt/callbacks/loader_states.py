"""The state of training loaders in a checkpoint, and what they make of it.

torchdata's loaders take their state when their next iterator is made, long after ``load_state_dict`` has returned: in
Lightning's ``setup_data``, where what they raise names neither the loader nor the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from moe_ckpt.callbacks.compat import Private
from moe_ckpt.driver.state_loading import loading_state

_ADVICE = (
    "Its sampler may be of another kind than in the run, as where another number of ranks gives it another one "
    "(RecoverableDistributedSampler is for any number, on one rank too), or its dataset or number of workers another "
    "one: build it as in the run, or begin another run from its weights (weights_from=)."
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
