"""The boundary of this rank's stage: its messages are intercepted, logged, and answered from logs while it is alone.

Frameworks have no hook for that: Megatron's schedules, gradient reductions and optimizers call functions of
``torch.distributed``. These are replaced until ``Interception.close``, also in modules that have imported one by name.
Calls within one stage, and calls of other threads, are passed on after one dictionary look-up.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_ckpt.errors import ReplayDivergedError
from moe_ckpt.localized.exchange import Answers
from moe_ckpt.localized.log_files import SEND, Channel
from moe_ckpt.localized.recording import UpstreamLog
from moe_ckpt.stopwatch import Stopwatch, timed


class Boundary:
    """The boundary of this rank's stage (see the module). On the training thread.

    Args:
        stage_of: Per rank, its pipeline stage.
        log: Gets messages that are sent; None to log nothing.
        stopwatch: Counts the time of all methods.
    """

    def __init__(self, stage_of: Sequence[int], log: UpstreamLog | None, stopwatch: Stopwatch | None = None) -> None:
        self.stopwatch = stopwatch or Stopwatch()
        self._stage_of, self._log = tuple(stage_of), log
        self._first: Callable[[], None] | None = None
        self._alone: frozenset[int] = frozenset()
        self._came_up: int | None = None
        self._answers: Answers | None = None
        self._resting = self._aside = False

    @property
    def is_alone(self) -> bool:
        """True while this rank's stage computes a step again, without the other stages."""
        return self._answers is not None

    def before_first(self, call: Callable[[], None]) -> None:
        """Runs ``call`` before the first message is sent or awaited."""
        self._first = call

    def begin(self) -> None:
        """Begins a step, unless a message has begun it."""
        self._resting = False
        first, self._first = self._first, None
        if first is not None:
            first()

    def rest(self) -> None:
        """Ends the step, for a loop whose stages communicate between steps.

        Messages until ``begin`` belong to no step, and stages that compute alone do not send them.
        """
        self._resting = True

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Encloses a validation. Its messages belong to no step, and stages that compute alone do not send them."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def go_alone(self, ranks: Collection[int], answers: Answers) -> None:
        """Makes ``ranks``, this one included, compute the next step alone, with ``answers`` of the other ranks."""
        self._alone, self._answers = frozenset(ranks), answers

    def together(self, step: int | None = None) -> None:
        """Lets all ranks compute from here on.

        Args:
            step: The step that this rank has reached; None if it failed before.
        """
        self._alone, self._answers, self._came_up = frozenset(), None, step

    def _passes(self) -> None:
        """Notes that a message of training, or of an evaluation, is sent or awaited. Evaluations are never replayed."""
        self.begin()
        if self._aside:
            return
        if torch.is_grad_enabled():
            self._came_up = None
        elif self._came_up is not None:
            raise ReplayDivergedError(
                self._came_up,
                "the loop evaluates the model right after it, but ranks that kept their state do not. Evaluate before "
                "after_step(), or leave out Memory(upstream_bytes=...)",
            )
        elif self._log is not None:
            self._log.leave_out()

    # --- what crosses it ---

    def crosses(self, ranks: tuple[int, ...]) -> bool:
        """Returns whether some of ``ranks`` are of another stage than others."""
        return len({self._stage_of[rank] for rank in ranks}) > 1

    @timed
    def sends(self, channel: Channel, tensor: torch.Tensor) -> bool:
        """Logs a message. Returns whether it must be sent."""
        self._passes()
        self._keep(channel, [tensor])
        return self._answers is None or channel.ranks[1] in self._alone

    @timed
    def receives(self, channel: Channel, tensor: torch.Tensor) -> bool:
        """Answers a receiving call from logs, if this stage computes alone. Returns whether ``tensor`` was written."""
        self._passes()
        if self._answers is None or channel.ranks[0] in self._alone:
            return False
        self._answers.give(channel, tensor)
        return True

    @timed
    def answers(self, channel: Channel, results: Sequence[torch.Tensor]) -> bool:
        """Answers a collective from logs, if this stage computes alone. Returns whether ``results`` were written."""
        if self._resting and self._came_up is not None:
            raise ReplayDivergedError(
                self._came_up, f"{channel} is needed right after it, but ranks that kept their state take no part"
            )
        if self._answers is None or self._alone.issuperset(channel.ranks):
            return False
        for result in results:
            self._answers.give(channel, result)
        self._keep(channel, results)
        return True

    @timed
    def agreed(self, channel: Channel, results: Sequence[torch.Tensor]) -> None:
        """Logs the results of a collective."""
        self._keep(channel, results)

    @timed
    def refused(self, channel: Channel) -> None:
        """Ends logging, after a call over a boundary whose results differ between ranks, or whose sender is not
        known."""
        if self._log is not None:
            self._log.give_up(f"{channel}: its results are not the same on all ranks, or its sender is not known")

    def _keep(self, channel: Channel, tensors: Sequence[torch.Tensor]) -> None:
        if self._log is not None and not (self._resting or self._aside):
            for tensor in tensors:
                self._log.append(channel, tensor)


Call = Callable[..., Any]


_Results = Callable[[Callable[[int, str], Any]], Sequence[torch.Tensor]]
_ALIKE: dict[str, tuple[int, _Results]] = {
    "all_reduce": (2, lambda of: [of(0, "tensor")]),
    "broadcast": (2, lambda of: [of(0, "tensor")]),
    "all_gather": (2, lambda of: of(0, "tensor_list")),
    "all_gather_into_tensor": (2, lambda of: [of(0, "output_tensor")]),
    "all_gather_single": (2, lambda of: [of(0, "output_tensor")]),
    "barrier": (0, lambda of: []),
}
"""Collectives with equal results on all ranks: position of the argument ``group``, and how to find the results."""
_APART = {
    "reduce": 3,
    "gather": 3,
    "scatter": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "reduce_scatter_single": 3,
    "all_to_all": 2,
    "all_to_all_single": 4,
    "all_reduce_coalesced": 2,
    "all_gather_coalesced": 2,
}
"""Other collectives, which are not logged: position of the argument ``group``."""


class Interception:
    """Replaces the functions of ``torch.distributed`` until ``close``; they act on this thread only.

    Args:
        boundary: Called for each message; may answer it.
    """

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._thread = threading.get_ident()
        self._within = False
        self._groups: dict[int, tuple[Any, tuple[int, ...], bool]] = {}
        self._rank = dist.get_rank()
        self._replaced: list[tuple[Call, Call]] = []
        self._open = True
        for name in ("isend", "send"):
            self._replace(name, self._send)
        for name in ("irecv", "recv"):
            self._replace(name, self._receive)
        for name in _ALIKE:
            self._replace(name, self._agree)
        for name in _APART:
            self._replace(name, self._refuse)
        _exchange({id(original): ours for original, ours in self._replaced})

    def _replace(self, name: str, intercepted: Callable[[str, _Call], Any]) -> None:
        original = getattr(distributed_c10d, name, None)
        if original is None:  # another release of torch
            return

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            call = _Call(original, args, kwargs)
            return intercepted(name, call) if self._is_ours() else call.make()

        self._replaced.append((original, ours))

    def close(self) -> None:
        """Restores the functions. If other code has replaced them meanwhile, they only call the originals."""
        self._open = False
        _exchange({id(ours): original for original, ours in self._replaced})
        self._groups.clear()

    # --- the functions ---

    def _is_ours(self) -> bool:
        return self._open and not self._within and threading.get_ident() == self._thread

    def _ranks(self, group: Any) -> tuple[tuple[int, ...], bool]:
        """Returns the members of a group, and whether they belong to several stages."""
        entry = self._groups.get(id(group))
        if entry is None or entry[0] is not group:
            ranks = tuple(sorted(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)))
            entry = group, ranks, self._boundary.crosses(ranks)
            self._groups[id(group)] = entry
        return entry[1], entry[2]

    def _peer(self, call: _Call, end: str) -> int | None:
        """Returns the other rank of a message; None if it may come from any rank. end: "src" or "dst"."""
        of_group = call.argument(4, f"group_{end}")
        if of_group is not None:
            group = call.argument(2, "group")
            within: Any = group if group is not None else dist.group.WORLD
            return dist.get_global_rank(within, of_group)
        peer = call.argument(1, end)
        return None if peer is None else int(peer)

    def _send(self, name: str, call: _Call) -> Any:
        peer = self._peer(call, "dst")
        if peer is None or not self._boundary.crosses((self._rank, peer)):
            return call.make()
        if self._boundary.sends(Channel(SEND, (self._rank, peer)), call.argument(0, "tensor")):
            return self._through(call)
        return None if name == "send" else Done()

    def _receive(self, name: str, call: _Call) -> Any:
        peer = self._peer(call, "src")
        if peer is None:
            ranks, crossing = self._ranks(call.argument(2, "group"))
            if crossing:
                self._boundary.refused(Channel(name, ranks))
            return call.make()
        if not self._boundary.crosses((peer, self._rank)):
            return call.make()
        if self._boundary.receives(Channel(SEND, (peer, self._rank)), call.argument(0, "tensor")):
            return peer if name == "recv" else Done()
        return self._through(call)

    def _agree(self, name: str, call: _Call) -> Any:
        position, results_of = _ALIKE[name]
        ranks, crossing = self._ranks(call.argument(position, "group"))
        if not crossing or self._rank not in ranks:
            return call.make()
        channel, results = Channel(name, ranks), results_of(call.argument)
        waits = not call.argument(position + 1, "async_op")
        if self._boundary.answers(channel, results):
            return None if waits else Done()
        work = self._through(call)
        agreed = functools.partial(self._boundary.agreed, channel, results)
        if waits or work is None:
            agreed()
            return work
        return _Awaited(work, agreed)

    def _refuse(self, name: str, call: _Call) -> Any:
        ranks, crossing = self._ranks(call.argument(_APART[name], "group"))
        if crossing and self._rank in ranks:
            self._boundary.refused(Channel(name, ranks))
        return call.make()

    def _through(self, call: _Call) -> Any:
        """Makes a call. The functions of ``torch.distributed`` that it calls in turn count as parts of it."""
        self._within = True
        try:
            return call.make()
        finally:
            self._within = False


def _exchange(instead: Mapping[int, Call]) -> None:
    """Replaces functions in ``torch.distributed``, and in loaded modules that have imported one by name, as Megatron's
    timers have; nowhere else in torch.

    Args:
        instead: ``id`` of a function -> the function in its place, one object in all modules: P2POp compares them.
    """
    others = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] != "torch"]
    # The functions of ``distributed_c10d`` call each other by its names.
    for module in (dist, distributed_c10d, *(other for other in others if isinstance(other, ModuleType))):
        for name, value in list(vars(module).items()):
            if id(value) in instead:
                setattr(module, name, instead[id(value)])


class _Call(NamedTuple):
    """A call of a function of ``torch.distributed``."""

    function: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def argument(self, at: int, name: str) -> Any:
        """Returns an argument by its position or name; None if it is not given."""
        return self.args[at] if at < len(self.args) else self.kwargs.get(name)

    def make(self) -> Any:
        """Calls the function."""
        return self.function(*self.args, **self.kwargs)


class Done:
    """Replaces a ``torch.distributed.Work`` whose result is complete."""

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Returns True."""
        return True

    def is_success(self) -> bool:
        """Returns True."""
        return True


class _Awaited:
    """Wraps a ``Work``, and logs its results when they are complete."""

    def __init__(self, work: Any, agreed: Callable[[], None]) -> None:
        self._work, self._agreed = work, agreed

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._work.wait(*args, **kwargs)
        agreed, self._agreed = self._agreed, lambda: None
        agreed()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
