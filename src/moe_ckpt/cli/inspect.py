"""``moe-ckpt inspect``: what a store holds, how old each expert is, what a failure would cost."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

EPILOG = """\
examples:
  moe-ckpt inspect runs/x                       table of committed steps, and the age of every expert
  moe-ckpt inspect runs/x/step_00000120         one step
  moe-ckpt inspect runs/x --json | jq '.steps[0].plt'

reads manifests only; "moe-ckpt verify" reads everything
"""
_PER_LINE = 16
_DETAILED_EXPERTS = 512
_GLYPHS = ".:-=+*#%@"
_GLYPHS_PER_LINE = 64


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="show steps, sizes, expert ages and lost tokens",
        description="Show what a store or one of its steps holds.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", help="store or step directory, or a URL of one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Always 0: damage of a manifest is shown in its row."""
    from moe_ckpt.cli.report import describe

    facts = describe(args.path)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts)
    return 0


def _show(facts: dict[str, Any]) -> None:
    from moe_ckpt.cli.output import human_bytes, print_table

    print(f"store {facts['store']}")
    print(f"run {facts['run_id']}, model {facts['fingerprint']}, on-disk format {facts['format_version']}")
    good = [step for step in facts["steps"] if "damage" not in step]
    columns = ("step", "committed", "policy", "ranks", "written", "whole", "oldest expert", "unsaved", "lost", "PLT")
    rows = [
        (
            step["directory"],
            datetime.fromtimestamp(step["committed_unix_secs"]).strftime("%Y-%m-%d %H:%M:%S"),
            _policy(step["policy"]),
            str(step["world_size"]),
            human_bytes(step["written_bytes"]),
            human_bytes(step["whole_bytes"]),
            f"{step['oldest_age_steps']} steps" if step["versions"] else "-",
            f"{step['unsaved_tokens']:,}",
            f"{step['lost_tokens']:,}",
            f"{step['plt']:.3%}",
        )
        for step in good
    ]
    if rows:
        print()
        print_table(columns, rows)
        print("unsaved: tokens routed to experts since they were saved; returning to the step would lose them")
    for step in good:
        if step["window_steps"] is not None:
            first, *_, last = step["window_steps"]
            again = f"steps {first + 1} to {last}" if first + 1 < last else f"step {last}"
            print(f"{step['directory']} is a sparse window: resuming computes {again} again and loses no tokens")
    for step in facts["steps"]:
        if "damage" in step:
            print(f"damaged: {step['damage']}")
    if not facts["steps"]:
        print("no step is committed yet")
    if good and good[0]["versions"]:
        print()
        _show_experts(good[0])


def _policy(policy: dict[str, Any]) -> str:
    options = {key: value for key, value in policy.items() if key != "name"}
    return str(policy.get("name", "?")) + "".join(f" {key}={value}" for key, value in options.items())


def _show_experts(step: dict[str, Any]) -> None:
    """The heat table: layers down, experts across, age in steps."""
    from moe_ckpt.cli.output import print_cells

    ages = step["ages_steps"]
    oldest = max(step["oldest_age_steps"], 1)
    detailed = sum(map(len, ages)) <= _DETAILED_EXPERTS
    print(f"age of every expert in {step['directory']}, in steps" + ("" if detailed else f" (0 {_GLYPHS} {oldest})"))
    labels = [f"{number} {layer['name']}" for number, layer in enumerate(step["layers"])]
    width = max(map(len, labels)) + 2
    for label, row in zip(labels, ages, strict=True):
        for start, line in _lines(row, _PER_LINE if detailed else _GLYPHS_PER_LINE):
            head = (label if start == 0 else "").ljust(width) + f"{start:>4} "
            cells = [(_cell(age, oldest, detailed), age / oldest if age is not None else 1.0) for age in line]
            print_cells(head, cells)


def _lines(row: Sequence[int | None], length: int) -> Iterator[tuple[int, Sequence[int | None]]]:
    for start in range(0, len(row), length):
        yield start, row[start : start + length]


def _cell(age: int | None, oldest: int, detailed: bool) -> str:
    if detailed:
        return f"{'?' if age is None else age:>5}"
    return "?" if age is None else _GLYPHS[age * (len(_GLYPHS) - 1) // oldest]
