"""Gives a rank that computes steps again the messages that crossed its stage's boundaries the first time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from moe_ckpt.errors import ReplayDivergedError
from moe_ckpt.format.dtypes import dtype_name
from moe_ckpt.localized.log_files import SEND, Channel, Message

Received = Mapping[Channel, Sequence[tuple[Message, torch.Tensor]]]
"""Of one step, what came through each channel, in order."""


def is_for(channel: Channel, rank: int, alone: Collection[int], writer: int) -> bool:
    """Returns whether ``rank`` takes what came through ``channel`` from the log of ``writer``.

    A sender has what it sent. What a group agreed on all of its members have: the lowest one gives it.

    Args:
        channel: In the log.
        rank: That computes the step again.
        alone: All ranks that do.
        writer: Another rank.
    """
    if rank not in channel.ranks:
        return False
    if channel.kind == SEND:
        return channel.ranks == (writer, rank)
    return writer == min(set(channel.ranks).difference(alone), default=-1)


class Answers:
    """Hands out what was received in one step, in the order in which it came.

    Args:
        step: That is computed again.
        received: Then.
        diverges: Called before it is said that something else is needed now.
    """

    def __init__(self, step: int, received: Received, diverges: Callable[[], None] = lambda: None) -> None:
        self._step, self._diverges = step, diverges
        self._answered: Counter[Channel] = Counter()
        self._unanswered = {channel: deque(messages) for channel, messages in received.items()}

    def give(self, channel: Channel, into: torch.Tensor) -> None:
        """Writes the next message of ``channel``.

        Raises:
            ReplayDivergedError: There is none, or it was of another type or shape, or in another place.
        """
        messages = self._unanswered.get(channel)
        if not messages:
            raise self._diverged(f"{channel} is needed now, but the upstream log has no more of it")
        message, tensor = messages.popleft()
        if message.number != self._answered[channel]:
            due = self._answered[channel]
            raise self._diverged(f"{channel}, number {due}, is needed now, and number {message.number} is next")
        self._answered[channel] += 1
        if message.dtype != dtype_name(into.dtype) or tensor.numel() != into.numel():
            raise self._diverged(
                f"{channel} is {dtype_name(into.dtype)} {list(into.shape)} now, and was {message.dtype} "
                f"{list(message.shape)} in the upstream log",
            )
        with torch.no_grad():
            into.copy_(tensor.view(into.shape))

    def require_all_given(self) -> None:
        """Raises ``ReplayDivergedError`` if something was received the first time, and is not needed now."""
        for channel, messages in self._unanswered.items():
            if messages:
                raise self._diverged(f"{channel} was received then, and not now ({len(messages)} left)")

    def _diverged(self, difference: str) -> ReplayDivergedError:
        self._diverges()
        return ReplayDivergedError(self._step, difference)
