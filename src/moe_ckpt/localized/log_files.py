"""The files of upstream logs. A log has the messages that one rank sent over its stage's boundaries in one step.

The files are in the rank's memory directory, beside its slots. One file has the messages, one after the other. When the
step has ended, a header is written to a second file, as a sealed document (``format.sealed``).
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from moe_ckpt.errors import DamagedError, MemoryFullError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.manifest import MOST_RANKS
from moe_ckpt.format.schema import Schema, one_of, require, row, text, whole
from moe_ckpt.format.sealed import encode_document, unseal
from moe_ckpt.format.shard import MAX_HEADER_BYTES, TORCH_DTYPES, dtype_name, itemsize
from moe_ckpt.memory.arena import FULL
from moe_ckpt.memory.directory import MESSAGES_SUFFIX, SEALED_SUFFIX, log_path
from moe_ckpt.storage.local import PRIVATE, read_up_to, write_all

log = logging.getLogger("moe_ckpt")

_WRITE = os.O_RDWR | os.O_TRUNC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
KIND = "moe_ckpt.upstream"
SEND = "send"
_NOT_OURS = "not the header of an upstream log of this format: "
_CHANNEL: Schema = {"kind": text, "ranks": [whole(0, MOST_RANKS)], "messages": whole(1)}
_MESSAGE = row(
    {
        "channel": whole(),
        "number": whole(),
        "dtype": one_of(*TORCH_DTYPES),
        "shape": [whole()],
        "xxh3_64": text,
    }
)
_BODY: Schema = {
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
    "channels": [_CHANNEL],
    "messages": [_MESSAGE],
}


@dataclass(frozen=True)
class Channel:
    """A sequence of messages in the order of the program.

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
        channel: Channel of the message.
        number: Number of the message in its channel and step, from 0.
        dtype: Type of the tensor, as named in headers (``format.shard``).
        shape: Shape of the tensor.
        checksum: XXH3-64 of the tensor's bytes.
    """

    channel: Channel
    number: int
    dtype: str
    shape: tuple[int, ...]
    checksum: str

    @property
    def nbytes(self) -> int:
        """Bytes of the message in the file."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class LogHeader:
    """The header of one upstream log (see the module).

    Attributes:
        run_id: Of the store.
        life: Name of the life of the run.
        generation: Of that life, as the checkpoints that follow have it: save() may begin another one inside a life.
        history: Generation of the newest life in which all ranks went on from one checkpoint. Since then steps were
            computed again only from logs.
        rank: Rank that sent the messages.
        world_size: Number of ranks of that life.
        layout: Degrees of parallelism of that life, as text.
        step: Step in which the messages were sent.
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
    return encode_document(
        KIND,
        {
            **{name: getattr(header, name) for name in _SCALARS},
            "channels": [
                {"kind": channel.kind, "ranks": list(channel.ranks), "messages": count}
                for channel, count in counts.items()
            ],
            "messages": [
                [numbers[sent.channel], sent.number, sent.dtype, list(sent.shape), sent.checksum]
                for sent in header.messages
            ],
        },
    )


def decode_log(raw: bytes, path: str) -> LogHeader:
    """Inverse of ``encode_log``.

    Args:
        raw: Bytes of the file.
        path: Of the file, for messages.

    Raises:
        DamagedError: The header is damaged or of another format; or a message is missing, doubled or misplaced.
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
    numbers: dict[Channel, list[int]] = {channel: [] for channel in channels}
    for message in messages:
        numbers[message.channel].append(message.number)
    for channel, entry in zip(channels, body["channels"], strict=True):
        if numbers[channel] != list(range(entry["messages"])):
            fault = f"{channel}: {entry['messages']} were sent, and the log has numbers {numbers[channel]}"
            raise DamagedError(path, f"{fault}: a message lacks, or is there twice, or in the place of another one")
    return LogHeader(**{name: body[name] for name in _SCALARS}, messages=messages)


class LogWriter:
    """Writes the log of one step. On one thread.

    Args:
        directory: Memory directory of the rank.
        step: Step in which messages are sent.

    Attributes:
        nbytes: Bytes written so far.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, directory: Path, step: int) -> None:
        self.nbytes = 0
        self._path = log_path(directory, step)
        self._step = step
        self._messages: list[Message] = []
        self._descriptor = PRIVATE.create(str(self._path.with_suffix(MESSAGES_SUFFIX)), _WRITE)

    def write(self, channel: Channel, number: int, tensor: torch.Tensor) -> None:
        """Adds a message.

        Args:
            channel: Channel of the message.
            number: Number of the message in the channel.
            tensor: Contiguous, in host memory.

        Raises:
            MemoryFullError: There is no room.
            OSError: The file cannot be written.
        """
        raw = tensor.reshape(-1).view(torch.uint8).numpy().data
        checksum = xxhash.xxh3_64_hexdigest(raw)
        try:
            self.nbytes += write_all(self._descriptor, raw)
        except OSError as error:
            if error.errno in FULL:
                free = shutil.disk_usage(self._path.parent).free
                raise MemoryFullError(str(self._path.parent), len(raw), free) from error
            raise
        self._messages.append(Message(channel, number, dtype_name(tensor.dtype), tuple(tensor.shape), checksum))

    def seal(self, header: LogHeader) -> None:
        """Seals the log of a step that has ended: from now on later processes may read it.

        Args:
            header: The header without step and messages.
        """
        header = replace(header, step=self._step, messages=tuple(self._messages))
        unfinished = self._path.with_suffix(".tmp")
        try:
            with open(PRIVATE.create(str(unfinished), _WRITE), "wb") as file:
                file.write(encode_log(header))
            unfinished.rename(self._path.with_suffix(SEALED_SUFFIX))
        except OSError:
            self.remove()
            raise
        self.close()

    def close(self) -> None:
        """Closes the file. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def remove(self) -> None:
        """Deletes the log, which is no longer needed."""
        self.close()
        remove_log(self._path)


@dataclass(frozen=True)
class SealedLog:
    """A log that was sealed.

    Attributes:
        path: Path of its files, without a suffix.
        header: The header.
    """

    path: Path
    header: LogHeader

    def messages(self) -> Iterator[tuple[Message, torch.Tensor]]:
        """Yields every message with its tensor, in the order in which they were sent.

        Raises:
            DamagedError: A message is damaged.
            OSError: The file cannot be read.
        """
        path = self.path.with_suffix(MESSAGES_SUFFIX)
        with open(os.open(path, _READ), "rb", buffering=0) as file:
            for number, message in enumerate(self.header.messages):
                raw = read_up_to(file.fileno(), message.nbytes)
                if len(raw) != message.nbytes or xxhash.xxh3_64_hexdigest(raw) != message.checksum:
                    fault = f"message {number} ({message.channel}) is damaged"
                    raise DamagedError(str(path), fault, step=self.header.step, rank=self.header.rank)
                dtype = TORCH_DTYPES[message.dtype]
                flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
                yield message, flat.view(message.shape)


def sealed_logs(directory: Path) -> list[SealedLog]:
    """Returns the logs in a rank's directory, oldest first. Damaged logs are left out, with a warning."""
    logs = []
    for path in sorted(directory.glob(f"*{SEALED_SUFFIX}")):
        try:
            with open(os.open(path, _READ), "rb") as file:
                header = decode_log(bytes(read_up_to(file.fileno(), MAX_HEADER_BYTES + 1)), str(path))
            if log_path(directory, header.step).name != path.stem:
                raise DamagedError(str(path), f"it is of step {header.step}", step=header.step, rank=header.rank)
            logs.append(SealedLog(path.with_suffix(""), header))
        except (DamagedError, OSError) as error:
            log.warning("the upstream log %s is not used: %s", path, error)
    return logs


def remove_log(path: Path) -> None:
    """Deletes a log. A failure is only a warning."""
    try:
        for suffix in (SEALED_SUFFIX, MESSAGES_SUFFIX, ".tmp"):
            path.with_suffix(suffix).unlink(missing_ok=True)
    except OSError as error:
        log.warning("the upstream log %s cannot be removed: %s", path, error)
