"""Sends upstream logs to the ranks that compute steps again, and answers these ranks from the logs.

An answer is the message that crossed the boundary of the stage when the step was computed the first time.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
import xxhash

from moe_ckpt.comm.communicator import answers_of
from moe_ckpt.errors import DamagedError, ReplayDivergedError
from moe_ckpt.format.shard import TORCH_DTYPES, dtype_name
from moe_ckpt.localized.log_files import SEND, Channel, Message, SealedLog
from moe_ckpt.localized.segments import LocalRecovery, LogGap, log_gap
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.collective import on_all_ranks

Received = Mapping[Channel, Sequence[tuple[Message, torch.Tensor]]]
"""Channel -> the messages that came through it in one step, in order."""


def is_for(channel: Channel, rank: int, alone: Collection[int], writer: int) -> bool:
    """Returns whether ``rank`` takes the messages of ``channel`` from the log of ``writer``.

    The sender of a message has logged it. All members of a group have logged what the group agreed on: it is taken from
    the lowest of them that keeps its state.

    Args:
        channel: Channel in the log.
        rank: A rank that computes the step again.
        alone: All ranks that compute the step again.
        writer: A rank that keeps its state.
    """
    if rank not in channel.ranks:
        return False
    if channel.kind == SEND:
        return channel.ranks == (writer, rank)
    return writer == min(set(channel.ranks).difference(alone), default=-1)


class LogExchange:
    """Exchanges logs among ranks. Made and used by all ranks, on the training thread.

    Args:
        comm: The ranks.
        logs: Logs of earlier lives of the run that this rank has.
        recovery: The ranks that compute steps again, and up to which step.
        since: Step of the checkpoint that these ranks load.
        lives: Generations of usable logs: from that of the checkpoint to that of the survivors' state.

    Attributes:
        history: ``log_files.LogHeader.history`` of the newest of these lives; logs with another history are not used.
        gap: The first needed log that no rank has; None if all are there.

    Raises:
        PeerLostError: A peer is gone.
    """

    def __init__(
        self,
        comm: Communicator,
        logs: Iterable[SealedLog],
        recovery: LocalRecovery,
        since: int,
        lives: Collection[int],
    ) -> None:
        self._comm, self._recovery = comm, recovery
        steps = range(since + 1, recovery.step + 1)
        mine: dict[tuple[int, int], SealedLog] = {}
        for sealed in sorted(logs, key=lambda one: one.header.generation):  # the newest life's log replaces older ones
            head = sealed.header
            if head.world_size == comm.world_size and head.generation in lives and head.step in steps:
                mine[head.rank, head.step] = sealed
        keys = [[*key, sealed.header.generation, sealed.header.history] for key, sealed in mine.items()]
        answers = enumerate(answers_of(comm, keys))
        every: list[tuple[int, ...]] = [(holder, *entry) for holder, entries in answers for entry in entries]
        _, self.history = max(((generation, history) for *_, generation, history in every), default=(0, 0))
        best: dict[tuple[int, int], tuple[int, int]] = {}
        for holder, writer, step, generation, history in every:
            if history == self.history:
                key = writer, step
                best[key] = max(best.get(key, (-1, 0)), (generation, -holder))
        logged: dict[int, set[int]] = defaultdict(set)
        for writer, step in best:
            logged[writer].add(step)
        self.gap: LogGap | None = log_gap(recovery, since, comm.world_size, logged)
        alone = set(recovery.ranks)
        chosen = sorted(key for key, (_, holder) in best.items() if -holder == comm.rank and key[0] not in alone)
        self._outgoing = [mine[key] for key in chosen]

    def received(self) -> dict[int, Received]:
        """Returns step -> the messages that this rank received then; nothing if it keeps its state. A collective.

        Raises:
            NotUsableError: A log is damaged, or cannot be read; or some rank has no memory for it.
            PeerLostError: A peer is gone.
        """
        comm = self._comm
        packed = on_all_ranks(comm, self._packed)
        sizes = {rank: [tensor.numel() for tensor in tensors] for rank, tensors in packed.items()}
        sizes_by_holder = answers_of(comm, sizes)
        # No rank waits for the bytes of one that has no memory for them.
        expected = on_all_ranks(comm, lambda: self._room_for(sizes_by_holder))
        comm.swap(packed, expected)
        return on_all_ranks(comm, lambda: _unpacked(expected))

    def _room_for(self, sizes_by_holder: Sequence[Mapping[str, Sequence[int]]]) -> dict[int, list[torch.Tensor]]:
        """Returns empty tensors for the bytes that each rank sends to this one.

        Args:
            sizes_by_holder: Per sending rank: receiving rank -> sizes of the tensors.
        """
        me, expected = self._comm.rank, dict[int, list[torch.Tensor]]()
        for holder, sizes_of in enumerate(sizes_by_holder):
            if me in self._recovery.ranks and str(me) in sizes_of:
                expected[holder] = [torch.empty(size, dtype=torch.uint8) for size in sizes_of[str(me)]]
        return expected

    def _packed(self) -> dict[int, list[torch.Tensor]]:
        """Returns for each rank that computes steps again what this rank sends to it: headers, and bytes of
        messages."""
        alone = set(self._recovery.ranks)
        heads: dict[int, list[list[object]]] = defaultdict(list)
        bodies: dict[int, list[torch.Tensor]] = defaultdict(list)
        for sealed in self._outgoing:
            writer = sealed.header.rank
            for message, tensor in sealed.messages():
                for rank in alone:
                    if is_for(message.channel, rank, alone, writer):
                        channel, columns = message.channel, [message.number, message.dtype, message.shape]
                        heads[rank].append(
                            [sealed.header.step, channel.kind, channel.ranks, *columns, message.checksum]
                        )
                        bodies[rank].append(tensor.reshape(-1).view(torch.uint8))
        texts = {rank: bytearray(json.dumps(rows).encode()) for rank, rows in heads.items()}
        return {
            rank: [torch.frombuffer(text, dtype=torch.uint8), torch.cat(bodies[rank])] for rank, text in texts.items()
        }


def _unpacked(expected: Mapping[int, Sequence[torch.Tensor]]) -> dict[int, Received]:
    """Returns step -> messages received. Raises ``DamagedError`` if one was damaged on the way."""
    received: dict[int, dict[Channel, list[tuple[Message, torch.Tensor]]]] = defaultdict(lambda: defaultdict(list))
    for holder, (head, data) in sorted(expected.items()):
        at = 0
        for step, kind, ranks, number, dtype, shape, checksum in json.loads(bytes(head.numpy())):
            message = Message(Channel(kind, tuple(ranks)), number, dtype, tuple(shape), checksum)
            raw = data[at : at + message.nbytes]
            if xxhash.xxh3_64_hexdigest(raw.numpy().data) != checksum:
                raise DamagedError(f"upstream log on rank {holder}", "a message arrived damaged", step=step)
            tensor = raw.clone().view(TORCH_DTYPES[dtype]).view(message.shape)
            received[step][message.channel].append((message, tensor))
            at += message.nbytes
    return dict(received)


class Answers:
    """Hands out the messages that were received in one step, in their order.

    Args:
        step: The step that is computed again.
        received: Messages received in that step.
        diverges: Called before ``ReplayDivergedError`` is raised.

    Attributes:
        step: As the argument.
    """

    def __init__(self, step: int, received: Received, diverges: Callable[[], None] = lambda: None) -> None:
        self.step, self._diverges = step, diverges
        self._answered: Counter[Channel] = Counter()
        self._unanswered = {channel: deque(messages) for channel, messages in received.items()}

    def give(self, channel: Channel, into: torch.Tensor) -> None:
        """Writes the next message of ``channel``.

        Raises:
            ReplayDivergedError: There is none, or it had another type, shape or place.
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
        """Raises ``ReplayDivergedError`` if a message that was received the first time was not needed now."""
        for channel, messages in self._unanswered.items():
            if messages:
                raise self._diverged(f"{channel} was received then, and not now ({len(messages)} left)")

    def _diverged(self, difference: str) -> ReplayDivergedError:
        self._diverges()
        return ReplayDivergedError(self.step, difference)
