"""``moe-ckpt verify``: compares every byte of a store with its checksums."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from moe_ckpt.cli.shared import add_memory, progress_bar

EPILOG = """\
examples:
  moe-ckpt verify runs/x                      all committed steps
  moe-ckpt verify runs/x/step_00000120        one step, with the older files that it needs
  moe-ckpt verify runs/x --directory /dev/shm the newest step that an ended run left in memory
  moe-ckpt verify runs/x --json | jq '.damages[].path'

exit code: 0 undamaged, 1 damage found (named on stdout), 2 no store there, or it cannot be read
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="check every byte against its checksum",
        description="Read all files of a store, or of one step, and name what is damaged or missing.",
        epilog=EPILOG,
    )
    parser.add_argument("path", help="store or step directory, or a URL of one")
    add_memory(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """0 when all is well, 1 when something is damaged."""
    if args.directory:
        return _run_on_memory(args)
    return _run_on_storage(args, args.path)


def _run_on_storage(args: argparse.Namespace, path: str) -> int:
    from moe_ckpt.errors import StepRemovedError
    from moe_ckpt.format.manifest import MANIFEST_NAME
    from moe_ckpt.reading.reader import open_store, split_step
    from moe_ckpt.reading.step_storage import listed_again
    from moe_ckpt.reading.verify import Verified, verify_steps

    def verified() -> tuple[list[str], list[str], Verified]:
        reader, directory = open_store(path)
        steps, uncommitted = ([directory], []) if directory else (reader.directories(), reader.uncommitted())
        with progress_bar("verifying") as progress:
            outcome = verify_steps(reader, steps, progress)
        if outcome.is_empty:
            raise StepRemovedError(reader.storage.root, outcome.removed, f"{outcome.removed[0]}/{MANIFEST_NAME}")
        return [step for step in steps if step not in outcome.removed], uncommitted, outcome

    checked, uncommitted, outcome = verified() if split_step(path)[1] is not None else listed_again(verified)
    damages, usable = outcome.damages, outcome.usable
    if args.json:
        facts = {
            "path": path,
            "steps": checked,
            "usable": usable,
            "removed": outcome.removed,
            "uncommitted": uncommitted,
        }
        print(json.dumps(facts | {"damages": [asdict(d) for d in damages]}, indent=2))
        return 1 if damages else 0
    if outcome.removed:
        print(f"removed by retention while it was read, not checked: {', '.join(outcome.removed)}")
    if uncommitted:
        why = f"without {MANIFEST_NAME}: being written, left unfinished, or damaged"
        print(f"not checked: {', '.join(uncommitted)} ({why})")
    for damage in damages:
        hit = f"needed by {', '.join(damage.affects)}" if damage.affects else "no committed step needs these bytes"
        print(f"damaged: {damage} ({hit})")
    if damages:
        newest = f"; newest undamaged: {usable[0]}" if usable else ""
        places = "1 damaged place" if len(damages) == 1 else f"{len(damages)} damaged places"
        print(f"{places}; {len(usable)} of {len(checked)} steps undamaged{newest}")
        return 1
    steps_checked = "1 step" if len(checked) == 1 else f"{len(checked)} steps"
    print(f"{steps_checked} undamaged" if checked else "the store has no committed step yet", file=sys.stdout)
    return 0


def _run_on_memory(args: argparse.Namespace) -> int:
    """Verifies one checkpoint in memory, or on storage if that has it: 0 if all is undamaged, 1 if not."""
    from moe_ckpt.errors import DamagedError, NoCheckpointError
    from moe_ckpt.format.manifest import step_of
    from moe_ckpt.reading.memory.memory_outside import MemoryOutside, verify_opened
    from moe_ckpt.reading.reader import StoreReader, locate

    storage, directory = locate(args.path)
    with MemoryOutside(StoreReader(storage), args.directory) as memory:
        stored = memory.stored(directory, windows=True)
        if stored is not None:
            print(f"{stored} is on storage, and verified there:", file=sys.stderr)
            return _run_on_storage(args, f"{storage.root}/{stored}")
        usable: list[str] = []
        try:
            step = None if directory is None else step_of(directory)
            manifest = memory.opened(step, verify_opened, windows=True).manifest
            usable.append(manifest.directory)
            older = f", with {manifest.stale_experts} experts older than that" if manifest.stale_experts else ""
            outcome = f"{manifest.directory} can be made of what is undamaged{older}"
        except (NoCheckpointError, DamagedError) as error:
            if not memory.damages:
                raise
            outcome = "" if str(error) in memory.damages else str(error)
        if args.json:
            print(json.dumps({"path": args.path, "usable": usable, "damages": memory.damages}, indent=2))
            return 1 if memory.damages else 0
        for damage in memory.damages:
            print(f"damaged: {damage}")
        if not memory.damages:
            outcome = f"{usable[0]} in memory is undamaged"
        if outcome:
            print(outcome)
        return 1 if memory.damages else 0
