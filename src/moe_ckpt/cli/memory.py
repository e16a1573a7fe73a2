"""``moe-ckpt memory``: lists, checks and frees the snapshots that runs keep or left in this node's memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from moe_ckpt.cli.shared import DEFAULT_MEMORY, memory_directory
from moe_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from moe_ckpt.memory.survey import RankFacts

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
    from moe_ckpt.memory.survey import survey

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
