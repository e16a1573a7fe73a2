"""What a rank's optimizers update, as plain data in the plain state of each logged step.

With it a log can be replayed from its slots alone, without a model or a rank of the run.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_ckpt.errors import DamagedError
from moe_ckpt.format.fragment import FixedStrings
from moe_ckpt.gradients.units import Unit, UnitBlock
from moe_ckpt.ledger.coverage import Box

_UNIT = ("name", "optimizer", "group", "dtype", "shape", "stride", "stored")


@dataclass(frozen=True)
class Device:
    """The device that a rank computes its updates on.

    Attributes:
        type: As torch names it: "cpu", "cuda".
        name: Of the model; of a CPU also which vector instructions torch uses.
        threads: Of torch, which divide an update where ``type`` is "cpu".
    """

    type: str
    name: str
    threads: int

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """Returns what ``device`` is."""
        if device.type == "cuda":
            return cls("cuda", torch.cuda.get_device_name(device), torch.get_num_threads())
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else ""
        return cls(device.type, name, torch.get_num_threads())

    def __str__(self) -> str:
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.type == "cpu" else ""
        return f"{self.type} ({self.name}{threads})"


@dataclass(frozen=True)
class UpdateLayout:
    """A rank's optimizers and what they update.

    Attributes:
        classes: Name of the class of each optimizer (``modeling.state.optimizer_class.class_name``).
        keys: Of each optimizer, the number that keys of its state have (``optim/<number>/...``).
        units: All that they update.
        device: That they step on.
    """

    classes: tuple[str, ...]
    keys: tuple[int, ...]
    units: tuple[Unit, ...]
    device: Device

    def encoded(self) -> dict[str, Any]:
        """Returns the layout as plain data; the units, of which there may be thousands, are encoded once."""
        return {
            "classes": list(self.classes),
            "keys": list(self.keys),
            "units": FixedStrings(json.dumps(row, separators=(",", ":")) for row in map(_row, self.units)),
            "device": vars(self.device),
        }

    @classmethod
    def decoded(cls, body: Mapping[str, Any], path: str) -> UpdateLayout:
        """Returns what ``encoded`` gave.

        Args:
            path: For messages.

        Raises:
            DamagedError: It is none.
        """
        try:
            device = Device(str(body["device"]["type"]), str(body["device"]["name"]), int(body["device"]["threads"]))
            units = tuple(_unit(json.loads(row)) for row in body["units"])
            return cls(tuple(map(str, body["classes"])), tuple(map(int, body["keys"])), units, device)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(path, f"its layout of updates is none of this format ({error!r})") from error


def _row(unit: Unit) -> list[Any]:
    pieces = [[piece.parameter, piece.box.offsets, piece.box.shape, piece.stride, piece.start] for piece in unit.pieces]
    return [*(getattr(unit, name) for name in _UNIT), pieces]


def _unit(row: Sequence[Any]) -> Unit:
    name, optimizer, group, dtype, shape, stride, stored, pieces = row
    # Only types of tensors are looked up by a name that was read.
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"{dtype} is not a tensor type")
    blocks = tuple(map(_piece, pieces))
    return Unit(
        str(name), int(optimizer), int(group), dtype, _dims(shape), _dims(stride), pieces=blocks, stored=str(stored)
    )


def _piece(row: Sequence[Any]) -> UnitBlock:
    parameter, offsets, shape, stride, start = row
    return UnitBlock(str(parameter), Box(_dims(offsets), _dims(shape)), _dims(stride), int(start))


def _dims(numbers: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(int, numbers))
