"""Reports to the gate when this rank waits for its neighbours in Megatron's pipeline (MoEtion, section 5.3).

All messages of a pipeline pass one method of ``P2PCommunicator``. Schedules create a new communicator in each
iteration, so the method of the class is wrapped while a loop is attached. That costs two reads of the clock and a lock
per message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from moe_ckpt.bubbles.gate import BubbleGate
from moe_ckpt.megatron.compat import Wrapped, look_up, megatron_core

_MODULE, _CLASS, _METHOD = "megatron.core.pipeline_parallel.p2p_communication", "P2PCommunicator", "_communicate"


def watch_pipeline(chunks: Sequence[nn.Module], undo: ExitStack) -> BubbleGate:
    """Returns the gate of a rank in a pipeline of several stages, which gets each wait until ``undo`` is closed.

    Args:
        chunks: Model chunks on this rank.
        undo: Gets what removes the wrapper.
    """
    groups = megatron_core().parallel_state
    stage, stages = groups.get_pipeline_model_parallel_rank(), groups.get_pipeline_model_parallel_world_size()
    on_device = any(parameter.is_cuda for chunk in chunks for parameter in chunk.parameters())
    gate = BubbleGate(int(stage), int(stages), len(chunks), on_device=on_device)

    def communicate(original: Callable[..., Any], communicator: Any, **message: Any) -> Any:
        receives = {"previous": bool(message.get("recv_prev")), "following": bool(message.get("recv_next"))}
        if message.get("wait_on_reqs", True):
            with gate.waiting(**receives):
                return original(communicator, **message)
        # Interleaved schedules go on computing, and wait for the requests later.
        *received, requests = original(communicator, **message)
        return (*received, _watched(gate, requests, receives))

    look_up(_MODULE, f"{_CLASS}.{_METHOD}")
    undo.callback(Wrapped(look_up(_MODULE, _CLASS), _METHOD, communicate).close)
    return gate


def _watched(gate: BubbleGate, requests: Any, receives: dict[str, bool]) -> Any:
    """Returns wrapped requests, by name or in a row. Only requests that receive count as micro-batches."""
    if isinstance(requests, dict):
        return {
            name: _Request(gate, request, {key: value and name.startswith("recv") for key, value in receives.items()})
            for name, request in requests.items()
        }
    if isinstance(requests, Iterable):
        return [_Request(gate, request, receives) for request in requests]
    return requests


class _Request:
    """A request that reports its ``wait`` to the gate."""

    def __init__(self, gate: BubbleGate, request: Any, receives: dict[str, bool]) -> None:
        self._gate, self._request, self._receives = gate, request, receives

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._gate.waiting(**self._receives):
            return self._request.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
