"""The header of an upstream log: what one rank sent over its stage's boundaries in one step.

A sealed document (``format.sealed``), written when the step has ended. The messages lie one after the other in a file
beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_ckpt.errors import DamagedError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.dtypes import TORCH_DTYPES, itemsize
from moe_ckpt.format.manifest import MOST_RANKS
from moe_ckpt.format.schema import listing, one_of, record, require, row, text, whole
from moe_ckpt.format.sealed import seal, unseal

KIND = "moe_ckpt.upstream"
SEND = "send"
_NOT_OURS = "not the header of an upstream log of this format: "
_CHANNEL = record({"kind": text, "ranks": listing(whole(0, MOST_RANKS)), "messages": whole(1)})
_MESSAGE = row(
    {
        "channel": whole(),
        "number": whole(),
        "dtype": one_of(*TORCH_DTYPES),
        "shape": listing(whole()),
        "xxh3_64": text,
    }
)
_BODY = record(
    {
        "kind": one_of(KIND),
        "format_version": one_of(FORMAT_VERSION),
        "run_id": text,
        "life": text,
        "generation": whole(),
        "history": whole(),
        "rank": whole(),
        "world_size": whole(1, MOST_RANKS),
        "layout": text,
        "step": whole(1),
        "channels": listing(_CHANNEL),
        "messages": listing(_MESSAGE),
    }
)


@dataclass(frozen=True)
class Channel:
    """Messages that follow one another in the order of the program.

    Attributes:
        kind: ``SEND``, or the name of a collective.
        ranks: (from, to) of a send; the members of a collective's group, ascending.
    """

    kind: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        if self.kind == SEND:
            return f"a message of rank {self.ranks[0]} to rank {self.ranks[1]}"
        return f"{self.kind} of ranks {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Message:
    """One tensor that crossed a boundary.

    Attributes:
        channel: It came through.
        number: Of the message in its channel and step, from 0, in the order of the program.
        dtype: As named in headers (``format.dtypes``).
        shape: Of the tensor.
        checksum: XXH3-64 of its bytes.
    """

    channel: Channel
    number: int
    dtype: str
    shape: tuple[int, ...]
    checksum: str

    @property
    def nbytes(self) -> int:
        """Its bytes in the file, in which messages follow one another."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class LogHeader:
    """The header of one upstream log (see the module).

    Attributes:
        run_id: Of the store.
        life: Names the life of the run.
        generation: Of that life.
        history: Generation of the life in which all ranks went on from one checkpoint last: since then nothing was
            computed twice but by what was logged.
        rank: That sent.
        world_size: Ranks of that life.
        layout: Degrees of parallelism of that life, as text.
        step: In which it was sent.
        messages: In the order in which they were sent.
    """

    run_id: str
    life: str
    generation: int
    history: int
    rank: int
    world_size: int
    layout: str
    step: int = 0
    messages: tuple[Message, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all messages."""
        return sum(message.nbytes for message in self.messages)


_SCALARS = ("run_id", "life", "generation", "history", "rank", "world_size", "layout", "step")


def encode_log(header: LogHeader) -> bytes:
    """Returns the bytes of the header's file."""
    counts = Counter(message.channel for message in header.messages)
    numbers = {channel: at for at, channel in enumerate(counts)}
    return seal(
        {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            **{name: getattr(header, name) for name in _SCALARS},
            "channels": [
                {"kind": channel.kind, "ranks": list(channel.ranks), "messages": count}
                for channel, count in counts.items()
            ],
            "messages": [
                [numbers[sent.channel], sent.number, sent.dtype, list(sent.shape), sent.checksum]
                for sent in header.messages
            ],
        }
    )


def decode_log(raw: bytes, path: str) -> LogHeader:
    """Returns what ``encode_log`` was given.

    Args:
        path: For messages.

    Raises:
        DamagedError: It is not as it was written, or of another format; or a message lacks, or is there twice, or in
            the place of another one.
    """
    body = unseal(raw, path)
    require(_BODY, body, path, _NOT_OURS)
    channels = [Channel(entry["kind"], tuple(entry["ranks"])) for entry in body["channels"]]
    if any(at >= len(channels) for at, *_ in body["messages"]):
        raise DamagedError(path, f"{_NOT_OURS}a message is of no channel")
    messages = tuple(
        Message(channels[at], number, dtype, tuple(shape), checksum)
        for at, number, dtype, shape, checksum in body["messages"]
    )
    sent = {channel: entry["messages"] for channel, entry in zip(channels, body["channels"], strict=True)}
    _require_every_message(messages, sent, path)
    return LogHeader(**{name: body[name] for name in _SCALARS}, messages=messages)


def _require_every_message(messages: Sequence[Message], sent: Mapping[Channel, int], path: str) -> None:
    """Raises ``DamagedError`` unless each channel has as many messages as were sent, in their order."""
    seen: Counter[Channel] = Counter()
    for message in messages:
        if message.number != seen[message.channel]:
            fault = f"{message.channel} is number {message.number}, and number {seen[message.channel]} was due"
            raise DamagedError(path, f"{fault}: a message lacks, or is there twice, or in the place of another one")
        seen[message.channel] += 1
    lacking = [channel for channel, count in sent.items() if seen[channel] != count]
    if lacking:
        fault = f"{lacking[0]}: {sent[lacking[0]]} were sent, and {seen[lacking[0]]} are there"
        raise DamagedError(path, fault)
