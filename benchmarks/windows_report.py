"""The findings of ``moevement.py`` as Markdown tables, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import MIB

Found = Mapping[str, Any]


def lines(results: Found) -> Iterator[str]:
    """Markdown, as in docs/moevement.md, "Cost"."""
    facts, machine = results["facts"], results["facts"]["machine"]
    yield ""
    yield (
        f"{machine['cores']} cores, {machine['memory_gib']} GB, {machine['gpus']} GPUs, torch {machine['torch']}, "
        f"{machine['date']}; model {facts['size']}, {facts['tokens_per_iteration']} tokens per iteration, "
        f"{facts['threads']} compute threads, checkpoints in {facts['storage']}; load average at the "
        f"beginning {machine['load_average_1min']}."
    )
    if "cost" in results:
        yield from _cost(results["cost"], facts)
    if "recovery" in results:
        yield from _recovery(results["recovery"], facts)
    yield from (f"failed: {name}: {why}" for name, why in results.get("failed", {}).items())


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(head)} |"
    yield "|---|" + "--:|" * (len(head) - 1)
    for row in body:
        yield f"| {' | '.join(row)} |"
    yield ""


def _cost(cost: Found, facts: Found) -> Iterator[str]:
    state = cost["state_bytes"]
    head = ("per iteration with a checkpoint", "MiB", "of the state", "of it compute weights", "W", "stall ms",
            "stall, % of iteration", "iteration / without", "(rounds)")  # fmt: skip
    body = []
    for row in cost["rows"]:
        saves = row["bytes"] > 0
        window = row["window"]
        body.append(
            (
                row["name"],
                f"{row['bytes'] / MIB:.1f}" if saves else "-",
                f"{row['bytes'] / state:.0%}" if saves else "-",
                f"{row['compute_bytes'] / row['bytes']:.0%}" if row["compute_bytes"] else "-",
                "-" if window is None else f"{window[0]}" if window[0] == window[1] else f"{window[0]} to {window[1]}",
                f"{row['stall_ms']:.1f}" if saves else "-",
                f"{row['stall_share']:.1%}" if saves else "-",
                f"{row['ratio']:.2f}",
                f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}",
            )
        )
    yield from _table(head, body)
    off = [row["off_formula"] for row in cost["rows"] if row["off_formula"] is not None]
    iteration = [row["iteration_ms"] for row in cost["rows"]]
    yield (
        f"State: {state / MIB:.0f} MiB of parameters and AdamW moments. An iteration without a checkpoint took "
        f"{min(iteration):.0f} to {max(iteration):.0f} ms (medians of the contestants' own reference iterations). "
        f"{facts['rounds']} rounds."
    )
    if off:
        yield (
            f"Bytes of every counted slot against the formula of `slot_bytes`: at most {max(off):.2%} off. Bytes are "
            "tensors, with what replay needs of step counts and random numbers; manifest, headers and the state of "
            f"loops add at most {max(row['side_bytes'] for row in cost['rows']) / 1024:.0f} KiB per checkpoint."
        )


def _recovery(recovery: Found, facts: Found) -> Iterator[str]:
    window = facts["window"]
    head = ("after kill -9", "restarts", "computed again, mean", "most", "seconds until where it was, mean", "most",
            "of it loading", "iteration ms")  # fmt: skip
    body = [
        (
            name,
            str(len(row["restarts"])),
            f"{row['recomputed_mean']:.1f}",
            str(row["recomputed_max"]),
            f"{row['secs_mean']:.1f}",
            f"{row['secs_max']:.1f}",
            f"{row['loading_secs']:.1f}",
            f"{row['iteration_ms']:.0f}",
        )
        for name, row in recovery.items()
    ]
    yield from _table(head, body)
    row = recovery.get(f"MoEvement, W={window}")
    if row is None:
        return
    kept = "kept" if row["recomputed_max"] <= 2 * window else "NOT KEPT"
    yield (
        f"Bound of 2 W = {2 * window} iterations: {kept} (most: {row['recomputed_max']}). Average "
        f"{row['recomputed_mean'] / window:.2f} W, or {(row['recomputed_mean'] + 1) / window:.2f} W with the step that "
        "was under way, where the paper expects 1.5 W. Seconds count from the start of the new process, imports left "
        "out, and include verifying and loading."
    )


def plot(path: Path, results: Found) -> bool:
    """One panel per measurement; False without matplotlib or anything to draw."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [(name, draw) for name, draw in _PANELS.items() if name in results]
    if not parts:
        return False
    figure, panels = pyplot.subplots(
        1, len(parts), figsize=(4.6 * len(parts), 3.4), squeeze=False, layout="constrained"
    )
    for panel, (name, draw) in zip(panels[0], parts, strict=True):
        draw(panel, results[name], results["facts"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _draw_cost(panel: Any, cost: Found, facts: Found) -> None:
    made = [row for row in cost["rows"] if row["bytes"]]
    places = range(len(made))
    compute = [row["compute_bytes"] / MIB for row in made]
    full = [(row["bytes"] - row["compute_bytes"]) / MIB for row in made]
    panel.bar(places, full, color="#4878a8", label="in full")
    panel.bar(places, compute, bottom=full, color="#e0903c", label="compute weights")
    for at, row in enumerate(made):
        text = f"stall {row['stall_share']:.0%}\niteration x {row['ratio']:.2f}"
        panel.annotate(text, (at, row["bytes"] / MIB), ha="center", va="bottom", fontsize=6.5)
    panel.set_xticks(list(places), [row["name"].replace(", ", ",\n") for row in made], fontsize=7)
    panel.set_ylabel("MiB per iteration")
    panel.set_ylim(top=max((row["bytes"] for row in made), default=MIB) / MIB * 1.2)
    panel.legend(fontsize=7, frameon=False)
    panel.set_title("a checkpoint at every iteration", fontsize=9)


def _draw_recovery(panel: Any, recovery: Found, facts: Found) -> None:
    for at, row in enumerate(recovery.values()):
        again = [restart["recomputed"] for restart in row["restarts"]]
        shifts = [(number - (len(again) - 1) / 2) * 0.05 for number in range(len(again))]
        panel.plot([at + shift for shift in shifts], again, "o", color="#4878a8", ms=4)
        panel.plot([at - 0.25, at + 0.25], [row["recomputed_mean"]] * 2, color="#e0903c", lw=1.5)
    panel.axhline(2 * facts["window"], color="black", linestyle=":", lw=1)
    panel.annotate("2 W", (0.02, 2 * facts["window"]), xycoords=("axes fraction", "data"), va="bottom", fontsize=7)
    panel.set_xticks(range(len(recovery)), list(recovery), fontsize=7)
    panel.set(xlim=(-0.6, len(recovery) - 0.4), ylabel="iterations computed again")
    panel.set_ylim(bottom=0)
    panel.set_title("after kill -9: each restart, and the mean", fontsize=9)


_PANELS = {"cost": _draw_cost, "recovery": _draw_recovery}
