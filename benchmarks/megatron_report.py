"""Tables and picture of ``megatron_prepare.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def lines(results: Sequence[Found]) -> list[str]:
    """Markdown."""
    good = [case for case in results if "ours" in case]
    return [
        *_ours_and_peer(good),
        *_peers_ways(results),
        *_growth(good),
        *_parts(good),
        *_attach(good),
        *_failures(results),
    ]


def _ours_and_peer(results: Sequence[Found]) -> list[str]:
    names = list(results[0]["ours"]["policies"]) if results else []
    header = ["layers x experts", "EP", "precision", *names, "peer, default", "peer, quickest"]
    header += ["quickest over Dense", "over MoC", "default over Dense", "over MoC"]
    rows = []
    for case in results:
        policies = case["ours"]["policies"]
        best, default = quickest(case), case.get("peer", {}).get("default", {})
        dense, moc = policies["Dense"], policies["MoC, K=1, sequential"]
        rows.append(
            [
                *_name(case),
                *(_time(policies[name]) for name in names),
                _time(default),
                _time(best),
                *(_ratio(peer, own) for peer in (best, default) for own in (dense, moc)),
            ]
        )
    title = "Training thread of one rank, ms per checkpoint: median of wall time (of processor time)"
    return _table(title, header, rows)


def quickest(case: Found) -> Found:
    """The peer's way with the least median wall time; empty if none was run."""
    ran = [way for way in case.get("peer", {}).values() if "wall_ms" in way]
    return min(ran, key=lambda way: float(way["wall_ms"]["median"]), default={})


def _ratio(peer: Found, own: Found) -> str:
    """Of wall time, and of processor time."""
    if not peer or "wall_ms" not in peer:
        return "-"
    wall, cpu = (peer[clock]["median"] / own[clock]["median"] for clock in ("wall_ms", "cpu_ms"))
    return f"{wall:.1f}x ({cpu:.1f}x)"


def _peers_ways(results: Sequence[Found]) -> list[str]:
    rows = []
    for case in results:
        for name, way in case.get("peer", {}).items():
            parts = way.get("parts_ms", {})
            reason = way.get("not_run")
            shown = [_ms(ms) for ms in parts.values()] if parts else ["-", "-", "-"]
            saves = str(way["wall_ms"]["n"]) if parts else f"not run: {_one_line(reason)}"
            rows.append([*_name(case), name, _time(way), *shown, saves])
    header = ["layers x experts", "EP", "precision", "way", "in all", "model dict", "optimizer dict", "save", "saves"]
    return _table("The peer's ways, ms", header, rows) if rows else []


def _growth(results: Sequence[Found]) -> list[str]:
    rows = []
    for case in results:
        ours = case["ours"]
        local, whole = ours["local_operators"], ours["operators"]
        dense = ours["policies"]["Dense"]["wall_ms"]["median"]
        moc = ours["policies"]["MoC, K=1, sequential"]
        rows.append(
            [
                *_name(case),
                f"{whole:,}",
                f"{local:,}",
                f"{ours['policies']['Dense']['slices']:,}",
                f"{dense / local * 1e3:.1f}",
                f"{dense / whole * 1e3:.1f}",
                f"{moc['slices']:,}",
                f"{moc['wall_ms']['median'] / moc['slices'] * 1e3:.1f}",
            ]
        )
    header = [
        "layers x experts",
        "EP",
        "precision",
        "operators",
        "of them written here",
        "Dense: slices",
        "us per local operator",
        "us per operator",
        "MoC: slices",
        "us per slice",
    ]
    return _table("Growth with what this rank writes", header, rows)


def _parts(results: Sequence[Found]) -> list[str]:
    shown = {}
    for case in results:  # the largest of each precision at the grid's EP
        shown[case["case"]["precision"]] = case
    rows, labels = [], []
    for case in shown.values():
        for policy in case["ours"]["policies"].values():
            labels += [label for label in policy["parts_ms"] if label not in labels]
    for case in shown.values():
        for name, policy in case["ours"]["policies"].items():
            rows.append([*_name(case), name, *(_ms(policy["parts_ms"].get(label, 0.0)) for label in labels)])
    return _table("Where ours goes, ms of wall time", ["layers x experts", "EP", "precision", "policy", *labels], rows)


def _attach(results: Sequence[Found]) -> list[str]:
    labels = list(dict.fromkeys(label for case in results for label in case["ours"]["attach"]["parts_ms"]))
    rows = []
    for case in results:
        attach = case["ours"]["attach"]
        sent, received = (f"{attach[name] / 1000:,.0f}" for name in ("told_bytes", "received_bytes"))
        parts = (_ms(attach["parts_ms"].get(label, 0.0)) for label in labels)
        rows.append([*_name(case), _ms(attach["total_ms"]), *parts, sent, received])
    header = ["layers x experts", "EP", "precision", "attach", *labels, "kB told", "kB received"]
    return _table("Once, at attach, ms", header, rows)


def _failures(results: Sequence[Found]) -> list[str]:
    return [f"failed: {' '.join(_name(case))}: {case['failed']}" for case in results if "failed" in case]


def _name(case: Found) -> list[str]:
    facts = case["case"]
    return [f"{facts['layers']} x {facts['experts']}", str(facts["ep"]), facts["precision"]]


def _time(measured: Found) -> str:
    if "wall_ms" not in measured:
        return "-"
    return f"{_ms(measured['wall_ms']['median'])} ({_ms(measured['cpu_ms']['median'])})"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").replace("|", "/").split())[:120]


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    numbers = ["--:"] * (len(header) - 1)
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return [f"### {title}", "", "| " + " | ".join(header) + " |", "|" + "|".join(["---", *numbers]) + "|", *body, ""]


def plot(path: Path, results: Sequence[Found]) -> bool:
    """Milliseconds over experts per rank, one panel per precision; False without matplotlib or anything to draw."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [case for case in results if "ours" in case]
    if not good:
        return False
    precisions = list(dict.fromkeys(case["case"]["precision"] for case in good))
    size = (6.0 * len(precisions), 4.4)
    figure, panels = pyplot.subplots(1, len(precisions), figsize=size, sharey=True, squeeze=False)
    for panel, precision in zip(panels[0], precisions, strict=True):
        _draw(panel, [case for case in good if case["case"]["precision"] == precision and case["case"]["ep"] == 8])
        panel.set_title(f"{precision}, EP 8", fontsize=10)
    panels[0][0].set_ylabel("ms of the training thread per checkpoint")
    panels[0][-1].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _draw(panel: Any, results: Sequence[Found]) -> None:
    places = range(len(results))
    for name in results[0]["ours"]["policies"] if results else ():
        times = [case["ours"]["policies"][name]["wall_ms"]["median"] for case in results]
        panel.plot(places, times, marker="o", label=f"moe_ckpt {name}")
    for name in dict.fromkeys(way for case in results for way in case.get("peer", {})):
        ways = [case.get("peer", {}).get(name, {}) for case in results]
        times = [way["wall_ms"]["median"] if "wall_ms" in way else float("nan") for way in ways]
        panel.plot(places, times, marker="x", linestyle="--", label=f"Megatron, {name}")
    panel.set_xticks(list(places), [_name(case)[0] for case in results])
    panel.set_yscale("log")
    panel.set_xlabel("MoE layers x experts")
    panel.grid(linewidth=0.3)
