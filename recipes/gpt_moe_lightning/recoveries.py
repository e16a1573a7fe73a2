"""How a run came back from each of its kills: how far, how soon, and from whose memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.demonstrating import Killed, human_bytes, kills_in

COLUMNS = (
    "killed in iteration",
    "what was lost",
    "back at iteration",
    "from own memory",
    "from peers",
    "from storage",
    "computed again",
    "down for",
)
TITLE = "What came back from where"
TEXT = (
    "Each process plays a node of its own, with a memory directory of its own. When a process dies, its files there "
    "stay, and the next start reads them. When its node dies, they are gone as well: what comes in its place gets all "
    "of its state from the other node, which holds a copy. Sizes are of all ranks together, and every rank of this run "
    "needs the whole state. The time is mostly the start of the processes."
)


@dataclass(frozen=True)
class Recovery:
    """One of them.

    step: Of the state that the run returned to.
    own, peers, storage: Bytes of that state that came from memory of the rank's own node, from that of other nodes, and
    from storage; of all ranks together.
    recomputed: Finished iterations that were computed again.
    secs: From the end of the last iteration before the kill to the end of the first one after it.
    """

    killed: Killed
    step: int
    own: int
    peers: int
    storage: int
    recomputed: int
    secs: float

    def cells(self) -> tuple[str, ...]:
        """In the order of ``COLUMNS``."""
        lost = f"rank {self.killed.rank}{' and its node' if self.killed.node else ''}"
        sizes = (human_bytes(count) if count else "-" for count in (self.own, self.peers, self.storage))
        return (
            str(self.killed.step), lost, str(self.step), *sizes,
            str(self.recomputed), f"{self.secs:.1f} s",
        )  # fmt: skip


def recoveries_in(run_dir: Path, ranks: Sequence[Sequence[dict[str, Any]]]) -> Iterator[Recovery]:
    """Those that are done. ranks: the diary of each, whole, in the order of writing."""
    for life, killed in enumerate(kills_in(run_dir), start=1):
        restored = [r for rank in ranks for r in rank if r.get("event") == "restored" and r["generation"] == life]
        before, after = _losses(ranks, life - 1), _losses(ranks, life)
        if len(restored) < len(ranks) or not before or not after:
            continue
        step = restored[0]["step"]
        own, peers, storage = (sum(r[position] for r in restored) for position in ("own", "peers", "storage"))
        secs = after[0]["time"] - before[-1]["time"]
        yield Recovery(killed, step, own, peers, storage, max(0, before[-1]["step"] - step), secs)


def _losses(ranks: Sequence[Sequence[dict[str, Any]]], life: int) -> list[dict[str, Any]]:
    """Rank 0's lines of the iterations of one life."""
    return [r for r in ranks[0] if "train/loss" in r and r["generation"] == life] if ranks else []
