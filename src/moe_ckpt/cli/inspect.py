"""``moe-ckpt inspect``: shows what a store holds, how old each expert is, and what a failure would cost."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from moe_ckpt.cli.shared import add_memory
from moe_ckpt.core.user_text import human_bytes
from moe_ckpt.tables import PIPED_WIDTH, print_table, styled, width, wrapped

EPILOG = """\
examples:
  moe-ckpt inspect runs/x                       table of committed steps, and the age of every expert
  moe-ckpt inspect runs/x/step_00000120         one step
  moe-ckpt inspect runs/x --directory /dev/shm  and the steps that an ended run left in memory
  moe-ckpt inspect runs/x --json | jq '.steps[0].plt'

reads manifests only; "moe-ckpt verify" reads everything
"""
_DETAILED_EXPERTS = 512
_GLYPHS = ".:-=+*#%@"
_ACROSS = (64, 32, 16, 8, 4)
"""Experts in a line: as many of these as there is room for."""
_HEAT = (28, 64, 100, 136, 130, 124)
"""From green to red, of the 256 colours of terminals."""
_FROM = 8
"""Columns for the number of a line's first expert."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="show steps, sizes, expert ages and lost tokens",
        description="Show what a store or one of its steps holds.",
        epilog=EPILOG,
    )
    parser.add_argument("path", help="store or step directory, or a URL of one")
    add_memory(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Always 0: damage of a manifest is shown in its row."""
    from moe_ckpt.cli.report import describe

    facts = describe(args.path, args.directory)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts)
    return 0


def _show(facts: dict[str, Any]) -> None:
    print(f"store {facts['store']}")
    print(wrapped(f"run {facts['run_id']}, model {facts['fingerprint']}, on-disk format {facts['format_version']}"))
    good = [step for step in facts["steps"] if "damage" not in step]
    for line in _by_whom(good):
        print(line)
    date = "%Y-%m-%d %H:%M:%S" if width() >= PIPED_WIDTH else "%m-%d %H:%M:%S"
    columns = ("step", "committed", "written", "whole", "oldest expert", "unsaved", "MLT", "lost", "PLT")
    rows = [
        (
            step["directory"],
            "in memory" if step["in_memory"] else datetime.fromtimestamp(step["committed_unix_secs"]).strftime(date),
            human_bytes(step["written_bytes"]),
            human_bytes(step["whole_bytes"]),
            str(step["oldest_age_steps"]) if step["versions"] else "-",
            f"{step['unsaved_tokens']:,}",
            f"{step['mlt_if_returned_to']:.2%}",
            f"{step['lost_tokens']:,}",
            f"{step['plt']:.3%}",
        )
        for step in good
    ]
    if rows:
        print()
        print_table(columns, rows)
        print("oldest expert: age in steps of the expert that was saved longest ago")
        print(wrapped("unsaved: tokens routed to experts since they were saved; returning to the step would lose them"))
        print(wrapped("MLT: their portion of a layer's tokens so far, mean over layers"))
    for step in good:
        if step["window_steps"] is not None:
            first, *_, last = step["window_steps"]
            again = f"steps {first + 1} to {last}" if first + 1 < last else f"step {last}"
            what = f"resuming computes {again} again and loses no tokens"
            print(wrapped(f"{step['directory']} is a sparse window: {what}"))
        if step["not_finite"] is not None:
            what = f"holds values that are not finite ({step['not_finite']}), so starts pass it over"
            print(wrapped(f"{step['directory']} {what}"))
    for step in facts["steps"]:
        if "damage" in step:
            print(wrapped(f"damaged: {step['damage']}"))
    if not facts["steps"]:
        print("no step is committed yet")
    if good and good[0]["versions"]:
        print()
        _show_experts(good[0])


def _by_whom(steps: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The policy and the number of ranks: one line for all steps in a row that have the same, the newest first."""
    groups = [(what, [*these]) for what, these in groupby(steps, key=lambda step: (step["policy"], step["world_size"]))]
    for (policy, ranks), these in groups:
        span = these[-1]["directory"] + (f" to {these[0]['directory']}" if len(these) > 1 else "")
        when = f" ({span})" if len(groups) > 1 else ""
        options = _options(policy)
        text = f"policy {policy.get('name', '?')}{when} on {ranks} rank{'s' * (ranks != 1)}: {options or 'as it is'}"
        yield wrapped(text)


def _options(policy: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_setting_text(value)}" for key, value in policy.items() if key != "name")


def _setting_text(value: Any) -> str:
    """One setting; policies within a policy as they would be called."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_setting_text, value))}]"
    return f"{value.get('name', '?')}({_options(value)})" if isinstance(value, Mapping) else str(value)


def _show_experts(step: dict[str, Any]) -> None:
    """Prints the heat table: layers down, experts across, age in steps."""
    ages = step["ages_steps"]
    oldest = max(step["oldest_age_steps"], 1)
    detailed = sum(map(len, ages)) <= _DETAILED_EXPERTS
    print(f"age of every expert in {step['directory']}: steps since it was saved")
    if not detailed:
        print(f"{_GLYPHS[0]} now, {_GLYPHS[-1]} {oldest} steps ago, with {_GLYPHS[1:-1]} in between; ? never")
    labels = [f"{number} {layer['name']}" for number, layer in enumerate(step["layers"])]
    cell = max(2, len(str(step["oldest_age_steps"]))) + 1 if detailed else 1
    margin = min(max(map(len, ("layer", *labels))), width() // 2)
    most = max((len(row) for row in ages), default=1)
    across = next((columns for columns in _ACROSS if margin + _FROM + cell * columns <= width()), _ACROSS[-1])
    print(_head(margin, min(across, most), cell))
    for label, row in zip(labels, ages, strict=True):
        for start in range(0, len(row), across):
            head = _cut(label if start == 0 else "", margin) + f"{start:>{_FROM - 1}} "
            print(head + "".join(_cell(age, oldest, cell) for age in row[start : start + across]))


def _head(margin: int, across: int, cell: int) -> str:
    """Above the experts: which one of a line each is, as far as there is room for it."""
    every = 1 if cell > 1 else 8
    numbers = "".join(f"{at:+d}".rjust(cell) if every == 1 else f"{at:+d}".ljust(8) for at in range(0, across, every))
    return ("layer".ljust(margin) + "expert".rjust(_FROM - 1) + " " + numbers).rstrip()


def _cut(label: str, margin: int) -> str:
    """Shortens a long name in its middle, since its end tells layers apart."""
    if len(label) > margin:
        label = f"{label[: margin // 3]}..{label[len(label) - (margin - margin // 3 - 2) :]}"
    return label.ljust(margin)


def _cell(age: int | None, oldest: int, cell: int) -> str:
    """Returns the text of an expert's age, in a colour from fresh (green) to stale (red)."""
    if cell > 1:
        text = f"{'?' if age is None else age:>{cell}}"
    else:
        text = "?" if age is None else _GLYPHS[age * (len(_GLYPHS) - 1) // oldest]
    heat = 1.0 if age is None else age / oldest
    return styled(text, f"97;48;5;{_HEAT[round(heat * (len(_HEAT) - 1))]}", sys.stdout)
