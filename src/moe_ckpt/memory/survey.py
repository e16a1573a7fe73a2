"""What lies in a memory directory, for people: read without disturbing whoever owns it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from moe_ckpt.errors import DamagedError
from moe_ckpt.memory.directory import Owner, holder_of, owner_of, rank_directories, user_directory
from moe_ckpt.memory.slot import DATA_SUFFIX, QUARANTINE_SUFFIX, Slot, read_header


@dataclass(frozen=True)
class SlotFacts:
    """One slot.

    Attributes:
        path: Of its files, without suffix.
        state: "sealed": it can be read; "open": it is being written, or was when its process died; "set aside": damage
            was found in it; "damaged".
        nbytes: That it takes.
        step: Of what it holds; None if it is not sealed.
        slices: How many it holds.
        writer: Rank whose share of the step it is: another than its holder's for a copy; None if it is not sealed.
        problem: What is damaged; empty if nothing is.
        only: As of ``format.slot.SlotHeader``.
    """

    path: str
    state: str
    nbytes: int
    step: int | None = None
    slices: int = 0
    writer: int | None = None
    problem: str = ""
    only: str = ""


@dataclass(frozen=True)
class RankFacts:
    """The slots of one rank in one life of a run.

    Attributes:
        pid: As ``holder_of``.
    """

    run_id: str
    generation: int
    rank: int
    pid: int
    owner: Owner
    slots: tuple[SlotFacts, ...]

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return sum(slot.nbytes for slot in self.slots)


def survey(root: str, *, verify: bool = False) -> list[RankFacts]:
    """All of this user's rank directories below ``root``, by run, newest life first.

    Args:
        verify: Read every byte.

    Raises:
        ConfigError: As ``user_directory``.
    """
    found = []
    for run in sorted(user_directory(root).iterdir()):
        for generation, rank, path in rank_directories(run):
            slots = tuple(_slots(path, verify=verify))
            found.append(RankFacts(run.name, generation, rank, holder_of(path), owner_of(path), slots))
    return found


def _slots(directory: Path, *, verify: bool) -> Iterator[SlotFacts]:
    for data in sorted(directory.glob(f"*{DATA_SUFFIX}")):
        path = data.with_suffix("")
        try:
            nbytes = data.stat().st_size
            aside = path.with_suffix(QUARANTINE_SUFFIX).exists()
            yield _sealed(path, nbytes, verify=verify) or SlotFacts(str(path), "set aside" if aside else "open", nbytes)
        except FileNotFoundError:  # its owner is at work
            continue


def _sealed(path: Path, nbytes: int, *, verify: bool) -> SlotFacts | None:
    """Facts of a sealed slot; None for another, or if its owner began to use it anew while it was read."""
    step, slices, writer, only = None, 0, None, ""
    raw = b""
    try:
        raw = read_header(path)
        if not raw:
            return None
        slot, header = Slot.open(path)
        step, writer, only = header.step, header.rank, header.only
        for part in header.parts:
            entries = header.slices(part, str(path))
            slices += len(entries)
            for entry in entries if verify else ():
                data = slot.memory[part.begin + entry.begin : part.begin + entry.end].numpy().data
                if xxhash.xxh3_64_hexdigest(data) != entry.checksum:
                    raise DamagedError(str(path), f"slice {entry.name} of {entry.operator}: checksum mismatch")
    except DamagedError as error:
        if raw and read_header(path) != raw:
            return None
        return SlotFacts(str(path), "damaged", nbytes, step, slices, writer, problem=str(error), only=only)
    return SlotFacts(str(path), "sealed", nbytes, step, slices, writer, only=only)
