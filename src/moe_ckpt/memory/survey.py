"""Surveys a memory directory, for people. Reads only, and takes no lock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from moe_ckpt.errors import DamagedError
from moe_ckpt.memory.directory import Owner, holder_of, owner_of, rank_directories, slots_in, user_directory
from moe_ckpt.memory.files import FoundSlot, used_bytes
from moe_ckpt.memory.slot import QUARANTINE_SUFFIX, Slot, read_header


@dataclass(frozen=True)
class SlotFacts:
    """One slot.

    Attributes:
        path: Of the slot's files, without suffix.
        state: "sealed": readable; "set aside": a run has met damage in it; "damaged".
        nbytes: Size of the slot.
        step: Of the snapshot; None if it is not known.
        slices: Number of slices.
        writer: Rank whose share of the step the slot has: not the directory's for a copy; None if it is not known.
        problem: The damage; empty if there is none.
        only: See ``format.slot.SlotHeader``.
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
        pid: See ``holder_of``.
        nbytes: Size of the rank's files.
    """

    run_id: str
    generation: int
    rank: int
    pid: int
    owner: Owner
    slots: tuple[SlotFacts, ...]
    nbytes: int


def survey(root: str, *, verify: bool = False) -> list[RankFacts]:
    """Returns this user's rank directories below ``root``, by run, newest life first.

    Args:
        root: The memory directory.
        verify: Compare every slice with its checksum.

    Raises:
        ConfigError: As ``user_directory``.
    """
    surveyed = []
    for run in sorted(user_directory(root).iterdir()):
        for generation, rank, path in rank_directories(run):
            slots = tuple(_slots(path, verify=verify))
            facts = holder_of(path), owner_of(path), slots, used_bytes(path)
            surveyed.append(RankFacts(run.name, generation, rank, *facts))
    return surveyed


def _slots(directory: Path, *, verify: bool) -> Iterator[SlotFacts]:
    for path in slots_in(directory):
        if (facts := _sealed(path, verify=verify)) is not None:
            yield facts
    for path in sorted(directory.glob(f"*{QUARANTINE_SUFFIX}")):
        yield SlotFacts(str(path.with_suffix("")), "set aside", 0)


def _sealed(path: Path, *, verify: bool) -> SlotFacts | None:
    """Returns the facts of a sealed slot; None if its owner has unsealed it meanwhile."""
    facts, raw = SlotFacts(str(path), "sealed", 0), b""
    try:
        raw = read_header(path)
        if not raw:
            return None
        slot, header = Slot.open(path)
        facts = replace(facts, nbytes=header.nbytes, step=header.step, writer=header.rank, only=header.only)
        slices = list(FoundSlot(slot, header).slices())
        facts = replace(facts, slices=len(slices))
        for entry, data in slices:
            if verify and xxhash.xxh3_64_intdigest(data.numpy().data) != entry.checksum:
                raise DamagedError(str(path), f"slice {entry.name} of {entry.operator}: checksum mismatch")
    except FileNotFoundError:
        return None
    except DamagedError as error:
        if raw and read_header(path) != raw:
            return None
        return replace(facts, state="damaged", problem=str(error))
    return facts
