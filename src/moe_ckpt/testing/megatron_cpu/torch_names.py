"""The names of ``torch`` that Megatron-Core calls as if a GPU were there, answering for the CPU.

Each function below replaces one group of names and says which lines of Megatron-Core 0.16.1 need it, as those of 0.19.2
do; the paths are relative to ``megatron/core``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

_FACTORIES = ("arange", "as_tensor", "empty", "full", "ones", "tensor", "zeros")


def install() -> None:
    """Replace all of them."""
    _device()
    _streams()
    _random_state()
    _factories()
    _moves()
    _type_names()


def replace(owner: Any, name: str, value: Any) -> None:
    """``owner.name = value``, for an owner that type checkers hold to be constant.

    Raises:
        AttributeError: the owner has no such name, so this layer does not fit the installed version.
    """
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", repr(owner))
        raise AttributeError(f"{where} has no {name!r}: megatron_cpu does not fit this version of it")
    setattr(owner, name, value)


def _device() -> None:
    """``torch.cuda.current_device()`` is handed on as ``device=`` in some 20 places."""
    replace(torch.cuda, "current_device", lambda: "cpu")


class Event:
    """A point in a stream; on a CPU it has always been reached."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Stream:
    """An order of work; on a CPU there is only the program's."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class OnStream:
    """Stands in for ``torch.cuda.StreamContext``: one object may be entered any number of times."""

    def __init__(self, stream: Stream | None) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def _streams() -> None:
    """transformer/moe/token_dispatcher.py:445 and 871-895, pipeline_parallel/p2p_communication.py:242 and 398,
    transformer/moe/shared_experts.py:123-277, optimizer/optimizer.py:362, parallel_state.py:931 and 1319; of release
    0.19 distributed/param_and_grad_buffer.py, which keeps one context and enters it at every step."""
    current = Stream()
    replace(torch.cuda, "Stream", Stream)
    replace(torch.cuda, "Event", Event)
    replace(torch.cuda, "stream", OnStream)
    replace(torch.cuda, "current_stream", lambda *_: current)
    replace(torch.cuda, "default_stream", lambda *_: current)
    replace(torch.cuda, "synchronize", lambda *_: None)
    replace(torch.cuda, "empty_cache", lambda: None)


def _random_state() -> None:
    """The CUDA generator is the CPU's default one: tensor_parallel/random.py:55, 235-238, 422, and
    rerun_state_machine.py:957. Dropout and initialisation on a CPU draw from it."""

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    for owner in (torch.cuda, torch.cuda.random):
        replace(owner, "get_rng_state", get_rng_state)
        replace(owner, "set_rng_state", set_rng_state)
        replace(owner, "manual_seed", manual_seed)


def _factories() -> None:
    """``torch.zeros(..., device="cuda")`` and its like: optimizer/clip_grads.py:90-207, optimizer/grad_scaler.py,
    optimizer/optimizer.py:473-485 and 907, pipeline_parallel/schedules.py:596, 983 and 2138, utils.py:1207,
    transformer/moe/moe_utils.py:998, rerun_state_machine.py:261."""
    for name in _FACTORIES:
        replace(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _moves() -> None:
    """``.cuda()``: optimizer/grad_scaler.py:140, optimizer/optimizer.py:375-380, tensor_parallel/data.py:84."""

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    replace(torch.Tensor, "cuda", stay)
    replace(torch.nn.Module, "cuda", stay)


def _type_names() -> None:
    """``param.type()`` says ``torch.cuda.FloatTensor`` to Megatron-Core, and the truth to everybody else.

    The optimizers sort parameters by that string: optimizer/optimizer.py:671-690,
    optimizer/distrib_optimizer.py:361, 420 and 582, optimizer/clip_grads.py:167.
    """
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if args or kwargs or not isinstance(answer, str):
            return answer
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return answer.replace("torch.", "torch.cuda.", 1) if caller.startswith("megatron.core") else answer

    replace(torch.Tensor, "type", type_)
