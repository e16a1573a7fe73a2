"""``moe-ckpt memory``: lists, checks and frees the snapshots that runs keep or left in this node's memory.

Listing and checking read only, and take no lock.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moe_ckpt.cli.shared import DEFAULT_MEMORY, memory_directory
from moe_ckpt.errors import ConfigError, DamagedError

if TYPE_CHECKING:
    from moe_ckpt.memory.directory import Owner

_NAMED = 8
"""Runs in a message."""
ACTIONS = ("list", "explain", "retry", "clear")
EPILOG = """\
examples:
  moe-ckpt memory                              all your runs on this node, by rank
  moe-ckpt memory explain                      every slot: what it holds, and whether its bytes are intact
  moe-ckpt memory retry --run 3f0c             let a run try again, after three failed starts, when the cause is fixed
  moe-ckpt memory clear                        free memory that no running process holds
  moe-ckpt memory clear --run 3f0c             only the run whose ID starts so
  moe-ckpt memory --directory /mnt/tmpfs --json

exit code: 0 done, 1 damage found (explain), 2 the directory cannot be used, no run to clear or
retry is called so, or a running process holds it
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "memory",
        help="list, explain, retry or free snapshots in this node's memory",
        description="Look at the slots of Memory(directory=...) on this node. Slots in use are not touched.",
        epilog=EPILOG,
    )
    parser.add_argument("action", nargs="?", default="list", choices=ACTIONS, help="what to do; default: list")
    parser.add_argument(
        "--directory",
        default=DEFAULT_MEMORY,
        type=memory_directory,
        help=f"as in Memory(directory=...); default {DEFAULT_MEMORY}",
    )
    parser.add_argument("--run", default="", metavar="ID", help="only runs whose ID starts with this")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """0, or 1 if ``explain`` found damage."""
    everything = survey(args.directory, verify=args.action == "explain")
    ranks = [facts for facts in everything if facts.run_id.startswith(args.run)]
    if args.action in ("retry", "clear"):
        if args.run and not ranks:
            raise ConfigError(_nothing(args, everything))
        return _changed(args, ranks)
    damaged = any(slot.problem for facts in ranks for slot in facts.slots)
    if args.json:
        print(json.dumps({"directory": args.directory, "ranks": list(map(asdict, ranks))}, indent=2))
    elif not ranks:
        print(_nothing(args, everything))
    elif args.action == "list":
        _list(ranks)
    else:
        _explain(ranks)
    return int(damaged)


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
    from moe_ckpt.memory.directory import holder_of, owner_of, rank_directories, user_directory
    from moe_ckpt.memory.files import used_bytes

    surveyed = []
    for run in sorted(user_directory(root).iterdir()):
        for generation, rank, path in rank_directories(run):
            slots = tuple(_slots(path, verify=verify))
            facts = holder_of(path), owner_of(path), slots, used_bytes(path)
            surveyed.append(RankFacts(run.name, generation, rank, *facts))
    return surveyed


def _slots(directory: Path, *, verify: bool) -> Iterator[SlotFacts]:
    from moe_ckpt.memory.directory import slots_in
    from moe_ckpt.memory.slot import QUARANTINE_SUFFIX

    for path in slots_in(directory):
        if (facts := _sealed(path, verify=verify)) is not None:
            yield facts
    for path in sorted(directory.glob(f"*{QUARANTINE_SUFFIX}")):
        yield SlotFacts(str(path.with_suffix("")), "set aside", 0)


def _sealed(path: Path, *, verify: bool) -> SlotFacts | None:
    """Returns the facts of a sealed slot; None if its owner has unsealed it meanwhile."""
    import xxhash

    from moe_ckpt.memory.files import FoundSlot
    from moe_ckpt.memory.slot import Slot, read_header

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


def _nothing(args: argparse.Namespace, everything: Sequence[RankFacts]) -> str:
    """Says what is there where no run is called as ``--run`` has it."""
    others = list(dict.fromkeys(facts.run_id for facts in everything))
    if not others:
        return f"{args.directory} holds nothing of this user"
    more = ", ..." if len(others) > _NAMED else ""
    beginning = "there is" if len(others) == 1 else "there are"
    return f"no run whose ID starts with {args.run}; {beginning} {', '.join(others[:_NAMED])}{more}"


def _list(ranks: Sequence[RankFacts]) -> None:
    from moe_ckpt.core.user_text import human_bytes
    from moe_ckpt.memory.directory import said_holder
    from moe_ckpt.tables import print_table

    rows = []
    for facts in ranks:
        steps = [slot.step for slot in facts.slots if slot.step is not None]
        newest = str(max(steps)) if steps else "-"
        holder = said_holder(facts.pid)
        cells = [
            str(facts.generation),
            str(facts.rank),
            holder,
            str(len(facts.slots)),
            newest,
            human_bytes(facts.nbytes),
        ]
        rows.append([facts.run_id[:12], *cells, facts.owner.store])
    print_table(["run", "generation", "rank", "held by", "slots", "newest step", "size", "store"], rows)


def _explain(ranks: Sequence[RankFacts]) -> None:
    from moe_ckpt.core.user_text import human_bytes
    from moe_ckpt.format.slot import GRADIENTS, STATE
    from moe_ckpt.memory.directory import said_holder
    from moe_ckpt.tables import wrapped

    for facts in ranks:
        holder = f"held by {said_holder(facts.pid)}" + (
            "" if facts.pid else ", the next start of the run takes it over"
        )
        print(
            wrapped(
                f"run {facts.run_id} of {facts.owner.store}, generation {facts.generation}, rank {facts.rank}: {holder}"
            )
        )
        for slot in facts.slots:
            copy = "" if slot.writer in (None, facts.rank) else f" (copy of rank {slot.writer})"
            alone = {STATE: "plain state of ", GRADIENTS: "gradients of "}
            what = alone.get(slot.only, "")
            text = {
                "sealed": f"{what}step {slot.step}{copy}, {slot.slices} slices, all bytes intact",
                "set aside": "damaged: not read any more",
                "damaged": slot.problem,
            }[slot.state]
            print(wrapped(f"  {slot.path.rpartition('/')[2]} ({human_bytes(slot.nbytes)}): {text}"))


def _changed(args: argparse.Namespace, ranks: Sequence[RankFacts]) -> int:
    from moe_ckpt.core.user_text import human_bytes
    from moe_ckpt.memory.directory import user_directory
    from moe_ckpt.memory.files import remove_run, retry_run

    clears = args.action == "clear"
    done: dict[str, int] = {}
    held: list[str] = []
    for run_id in dict.fromkeys(facts.run_id for facts in ranks):
        if (remove_run if clears else retry_run)(user_directory(args.directory) / run_id):
            done[run_id] = sum(facts.nbytes for facts in ranks if facts.run_id == run_id)
        else:
            held.append(run_id)
    if args.json:
        outcome = {"freed": done} if clears else {"retry": list(done)}
        print(json.dumps({"directory": args.directory, **outcome, "kept": held}, indent=2))
        return 2 if held else 0
    for run_id, nbytes in done.items():
        print(f"run {run_id}: " + (f"{human_bytes(nbytes)} freed" if clears else "its next start resumes from memory"))
    for run_id in held:
        print(f"run {run_id}: a running process holds it, so nothing was changed")
    if not ranks:
        print(_nothing(args, ranks))
    return 2 if held else 0
