"""The files of upstream logs, beside the slots in a rank's memory directory: messages, and a header written last."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from moe_ckpt.errors import DamagedError, MemoryFullError
from moe_ckpt.format.dtypes import TORCH_DTYPES, dtype_name
from moe_ckpt.format.shard import MAX_HEADER_BYTES
from moe_ckpt.localized.log_format import Channel, LogHeader, Message, decode_log, encode_log
from moe_ckpt.memory.directory import MESSAGES_SUFFIX, SEALED_SUFFIX, log_path
from moe_ckpt.storage.local import PRIVATE, read_up_to

log = logging.getLogger("moe_ckpt")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
_WRITE = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class LogWriter:
    """Writes the log of one step. On one thread.

    Args:
        directory: Of the rank.
        step: In which messages are sent.

    Attributes:
        nbytes: Written so far.

    Raises:
        OSError: The file cannot be made.
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
            channel: It went through.
            number: Of the message in the channel.
            tensor: Contiguous, in host memory.

        Raises:
            MemoryFullError: There is no room.
            OSError: It cannot be written.
        """
        raw = tensor.reshape(-1).view(torch.uint8).numpy().data
        checksum = xxhash.xxh3_64_hexdigest(raw)
        try:
            at = 0
            while at < len(raw):
                at += os.pwrite(self._descriptor, raw[at:], self.nbytes + at)
        except OSError as error:
            if error.errno in _FULL:
                free = shutil.disk_usage(self._path.parent).free
                raise MemoryFullError(str(self._path.parent), len(raw), free) from error
            raise
        self._messages.append(Message(channel, number, dtype_name(tensor.dtype), tuple(tensor.shape), checksum))
        self.nbytes += len(raw)

    def seal(self, header: LogHeader) -> None:
        """Seals the log of an ended step: later processes may read it.

        Args:
            header: What those of other steps have as well.
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
        """Lets go of the file. Twice does no harm."""
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
        path: Of its files, without a suffix.
    """

    path: Path
    header: LogHeader

    def messages(self) -> Iterator[tuple[Message, torch.Tensor]]:
        """Yields every message with its tensor, in the order in which they were sent.

        Raises:
            DamagedError: A message is not as it was written.
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
    """Returns the logs of a rank's directory, oldest first. Damaged logs are not used, and a warning says so."""
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
    """Deletes a log; a warning tells of trouble."""
    try:
        for suffix in (SEALED_SUFFIX, MESSAGES_SUFFIX, ".tmp"):
            path.with_suffix(suffix).unlink(missing_ok=True)
    except OSError as error:
        log.warning("the upstream log %s cannot be removed: %s", path, error)
