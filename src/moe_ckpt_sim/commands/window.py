"""``moe-ckpt window``: shows the sparse window that MoEvement would use for the model of a checkpoint."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ckpt.core.user_text import parse_bytes
from moe_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from moe_ckpt.policies.base import PolicyContext
    from moe_ckpt.policies.moevement import MoEvement, WindowReport

EPILOG = """\
examples:
  moe-ckpt window runs/x --iteration-secs 0.5 --bandwidth 2GB/s        how long a window must be
  moe-ckpt window runs/x --window 3 --compute-dtype bf16               what a window of 3 saves per iteration
  moe-ckpt window runs/x --window 3 --explain                          also what is saved when, and other lengths
  moe-ckpt window --explain runs/x/step_00000120 --window 4 --plot window.png

operators, sizes and token counts come from a checkpoint (a store: its newest good one), bandwidth is that of one
rank; give the slower of what it copies to host memory and what it writes to storage. Nothing is written but --plot.
"""
_NAMES_SHOWN = 6
_MORE_SIZES = 3
_ORDERS = ("hard_count", "capacity_normalised", "round_robin")
"""By what a checkpoint holds."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "window",
        help="size and explain MoEvement's sparse window for a model",
        description="Show the slots of a sparse window, what each saves, and what a recovery costs.",
        epilog=EPILOG,
    )
    parser.add_argument("path", help="store or step directory of the model, or a URL of one")
    parser.add_argument("--explain", action="store_true", help="name each slot's operators; compare window lengths")
    parser.add_argument("--iteration-secs", type=_positive, metavar="SECS", help="time of one training iteration")
    parser.add_argument("--bandwidth", type=_bytes, metavar="2GB/s", help="bytes per second of one rank")
    parser.add_argument("--ranks", type=_count, help="ranks that share a snapshot (default: as in the checkpoint)")
    parser.add_argument("--window", type=_count, metavar="W", help="window of at most W slots, even if it does not fit")
    parser.add_argument(
        "--budget-fraction", type=float, default=1.0, metavar="F", help="portion of an iteration to use (default: 1)"
    )
    parser.add_argument("--host-memory", type=_bytes, metavar="8GB", help="room for one rank's snapshot")
    parser.add_argument("--order", help="hard_count (default), capacity_normalised or round_robin")
    parser.add_argument(
        "--compute-dtype",
        choices=("bf16", "fp16", "fp8"),
        help="type that forward and backward read, if narrower than the stored weights (autocast)",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw slots by operators, coloured by fidelity")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _bytes(text: str) -> int:
    """'2GB/s' -> 2,000,000,000; '1.5 GiB' -> 1,610,612,736; '4096' -> 4096."""
    try:
        return parse_bytes(text.strip().removesuffix("/s"), "bytes")
    except ConfigError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of bytes, at least 1, such as 800MB/s, 2GB/s or 1.5GiB/s"
        ) from None


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """0 when the window was shown, whether it fits or not."""
    from moe_ckpt.reading.reader import with_step
    from moe_ckpt_sim.commands.window_model import context_of

    policy = _policy(args)
    manifest, context = with_step(args.path, lambda reader, manifest: (manifest, context_of(reader, manifest, args)))
    policy.check(context.model.catalog)
    report = policy.explain(context)
    least = max(report.rank_bytes)
    if args.host_memory is not None and least > args.host_memory:
        raise ConfigError(
            f"the heaviest snapshot of a window of W = {report.size} has {least:,} bytes on each of "
            f"{report.placement.ranks} ranks, but --host-memory leaves room for {args.host_memory:,}; no window does: "
            f"set --host-memory to {least} or more"
        )
    if args.plot:
        _plot(report, args.plot)
    if args.json:
        print(json.dumps(_facts(manifest.directory, policy, report, args.explain), indent=2))
    else:
        _show(manifest.directory, context, report, args.explain)
    return 0


def _policy(args: argparse.Namespace) -> MoEvement:
    from moe_ckpt.policies.moevement import MoEvement
    from moe_ckpt.run.options import require_fraction

    if args.window is None and (args.iteration_secs is None or args.bandwidth is None):
        raise ConfigError(
            "give --iteration-secs and --bandwidth, from which the length is computed, or the length by --window"
        )
    require_fraction("--budget-fraction", args.budget_fraction)
    options = {name: value for name in ("window", "order") if (value := getattr(args, name)) is not None}
    if options.get("order", _ORDERS[0]) not in _ORDERS:  # MoEvement would name the choices of a trainer
        of_trainers = args.order in ("soft_count", "time_decayed")
        why = "checkpoints hold token counts only" if of_trainers else "no such order"
        raise ConfigError(f"--order {args.order}: {why}; give {', '.join(_ORDERS[:-1])} or {_ORDERS[-1]}")
    return MoEvement(**options)


def _facts(directory: str, policy: MoEvement, report: WindowReport, explain: bool) -> dict[str, Any]:
    from moe_ckpt_sim.planner.window_text import facts_of, heaviest_by_size

    facts = {"checkpoint": directory, "policy": policy.describe(), **facts_of(report)}
    if explain:
        facts["heaviest_bytes_by_window"] = list(heaviest_by_size(report, _most(report)))
    return facts


def _most(report: WindowReport) -> int:
    """How many window lengths are compared: some beyond the one that was chosen."""
    return min(len(report.window.order), report.size + _MORE_SIZES)


def _show(directory: str, context: PolicyContext, report: WindowReport, explain: bool) -> None:
    from moe_ckpt.core.user_text import human_bytes
    from moe_ckpt.tables import print_table, wrapped
    from moe_ckpt_sim.planner.window_text import sentences, table

    catalog, ranks = context.model.catalog, f"{report.placement.ranks} rank{'s' * (report.placement.ranks > 1)}"
    others = f"{len(catalog.always_saved)} other operators; dealt over {ranks}"
    print(wrapped(f"{directory}: {len(catalog.experts)} experts in {len(catalog.layers)} MoE layers, {others}"))
    if all(size.full == size.compute for size in context.model.sizes.values()):
        note = "note: it holds no optimizer state (taken before the first step?), so a dense one would be larger"
        print(wrapped(note))
    print()
    print_table(*table(report, human_bytes))
    for sentence in sentences(report, human_bytes):
        print(wrapped(sentence))
    if explain:
        print()
        _show_choice(report)
        print()
        _show_anchors(report)


def _show_choice(report: WindowReport) -> None:
    """The heaviest slot for windows of other lengths: why W is what it is."""
    from moe_ckpt.core.user_text import human_bytes
    from moe_ckpt.tables import print_table
    from moe_ckpt_sim.planner import window_text

    limit, dense_bytes = report.limit_bytes, window_text.dense_bytes(report)
    rows = []
    for size, nbytes in enumerate(window_text.heaviest_by_size(report, _most(report)), start=1):
        share = -(-nbytes // report.placement.ranks)
        fits = "?" if limit is None else "yes" if share <= limit else "no"
        dense = f"{nbytes / dense_bytes:.1%}" if dense_bytes else "-"
        rows.append((f"{size}{' *' * (size == report.size)}", human_bytes(nbytes), dense, human_bytes(share), fits))
    print_table(("at most W", "heaviest slot", "of dense", "per rank", "fits"), rows)


def _show_anchors(report: WindowReport) -> None:
    from moe_ckpt.tables import wrapped

    for number, anchors in enumerate(report.window.slots):
        names = ", ".join(anchors[:_NAMES_SHOWN])
        more = len(anchors) - _NAMES_SHOWN
        print(wrapped(f"slot {number} anchors {names}" + (f" and {more} more" if more > 0 else "")))


def _plot(report: WindowReport, path: str) -> None:
    from moe_ckpt_sim.commands.outputs import not_written, require_picture
    from moe_ckpt_sim.commands.window_plot import plot_window

    require_picture("--plot", path)
    figure, _ = plot_window(report)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise not_written("--plot", Path(path), error) from error
