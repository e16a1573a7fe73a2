"""What ranks that hold the same read of storage at a start, together and each by itself.

One process writes a dense checkpoint of a synthetic MoE. Then 2 and 4 processes, data-parallel peers on one machine,
come back to it (``resume_newest``), in turns:

- each by itself: every rank reads all, as without shared reading;
- shared: each reads its part, and gets the rest from the others.

With ``--delay-ms`` every read waits, as one of a far storage does, and with ``--link-ms`` every exchange of a round.
Bytes and CPU time hold on a busy machine; seconds need an idle one, with a core for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"


import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.memory_tiers import turned
from benchmarks.memory_tiers_rank import Life, Shard, spent_in
from benchmarks.ranks import end, gathered
from moe_ckpt.comm.communicator import GlooCommunicator, make_communicator
from moe_ckpt.reading import shared_reading
from moe_ckpt.recovery.executing import StorageSource
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.storage import LocalStorage

_EXAMPLE = "example: python benchmarks/reading.py --mib 512 --ranks 2 4 --delay-ms 50 --rounds 5 --write"
ALONE, SHARED = "each by itself", "shared"
WAYS = (ALONE, SHARED)
_TIMEOUT_SECS = 600.0
_PATIENCE_SECS = 120.0


class Counted(LocalStorage):
    """A local store that counts what is read of it, and takes a while for each read of tensors."""

    def __init__(self, root: Path, delay_secs: float) -> None:
        super().__init__(root)
        self.nbytes = self.calls = 0
        self._delay_secs = delay_secs

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> Any:
        """As of ``Storage``."""
        if path.endswith(".safetensors") and offset:
            time.sleep(self._delay_secs)
        result = super().read(path, offset, nbytes)
        self.nbytes, self.calls = self.nbytes + len(result), self.calls + 1
        return result


def first_life(order: Mapping[str, Any]) -> None:
    """Writes one checkpoint."""
    life = Life(Path(order["place"]), Shard(0, order["mib"], 1), None)
    life.train(0.0)
    life.end()


def second_life(order: Mapping[str, Any], rank: int) -> dict[str, float]:
    """Comes back. Returns what this rank read, and its seconds, of CPU too, of all its threads."""
    if order["way"] == ALONE:
        shared_reading.divide_reading = lambda *args, **kwargs: None
    swap = GlooCommunicator.swap

    def swapping(self: GlooCommunicator, outgoing: Any, expected: Any) -> None:
        time.sleep(order["link_secs"])
        swap(self, outgoing, expected)

    GlooCommunicator.swap = swapping  # type: ignore[method-assign]
    state = Shard(0, order["mib"], 1)  # the same on every rank
    for tensor in state.tensors():
        tensor.local.zero_()
    storage = Counted(Path(order["place"]) / "store", order["delay_secs"])
    comm = make_communicator(_PATIENCE_SECS)
    loading = spent_in(StorageSource, "prepare_and_write")
    dist.barrier()
    began, cpu = time.monotonic(), time.process_time()
    restored = resume_newest(storage, comm, state)
    secs, cpu_secs = time.monotonic() - began, time.process_time() - cpu
    if restored is None:
        raise RuntimeError("nothing was found")
    state.require(restored.manifest.step)
    comm.close()
    return {
        "secs": secs,
        "load_secs": sum(loading),
        "cpu_secs": cpu_secs,
        "nbytes": storage.nbytes,
        "calls": storage.calls,
    }


def measured(args: argparse.Namespace, scratch: Path) -> dict[str, dict[str, list[list[dict[str, float]]]]]:
    """Number of ranks -> way -> rounds -> ranks -> what each found."""
    life = scratch / "life"
    order = {"place": str(life), "mib": args.mib, "delay_secs": args.delay_ms / 1e3}
    order["link_secs"] = args.link_ms / 1e3
    gathered("benchmarks.reading", {**order, "job": "first", "ranks": 1}, 1, scratch, _TIMEOUT_SECS)
    results: dict[str, dict[str, list[list[dict[str, float]]]]] = {}
    for ranks in args.ranks:
        of_ways = results[str(ranks)] = {way: [] for way in WAYS}
        for turn in range(args.rounds):
            for way in turned(list(WAYS), turn):
                order_of_life = {**order, "job": "second", "ranks": ranks, "way": way}
                of_ways[way].append(gathered("benchmarks.reading", order_of_life, ranks, scratch, _TIMEOUT_SECS)[1])
    return results


def table(results: Mapping[str, Mapping[str, list[list[dict[str, float]]]]], title: str) -> Table:
    """Medians over rounds: of all ranks together, and of the rank with most."""
    grid = Table(title=title, title_justify="left")
    grid.add_column("ranks", justify="right")
    grid.add_column("", no_wrap=True)
    for name in (
        "read MiB, all",
        "most of a rank",
        "reads of a rank",
        "CPU s, all",
        "most of a rank",
        "seconds",
        "of it load",
    ):
        grid.add_column(name, justify="right")
    for ranks, of_ways in results.items():
        for way, rounds in of_ways.items():

            def over(key: str, among: Any, rounds: list[list[dict[str, float]]] = rounds) -> float:
                return float(median(among(rank[key] for rank in ranks) for ranks in rounds))

            grid.add_row(
                ranks,
                way,
                f"{over('nbytes', sum) / 2**20:.0f}",
                f"{over('nbytes', max) / 2**20:.0f}",
                f"{over('calls', max):.0f}",
                f"{over('cpu_secs', sum):.2f}",
                f"{over('cpu_secs', max):.2f}",
                f"{over('secs', max):.2f}",
                f"{over('load_secs', max):.2f}",
            )
    return grid


def as_rank(argv: list[str]) -> int:
    """The process of a rank. argv: the order as JSON, and the rank."""
    order, rank = json.loads(argv[0]), int(argv[1])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{order['meet']}", rank=rank, world_size=order["ranks"])
    if order["job"] == "first":
        first_life(order)
        return end(order, rank, None)
    return end(order, rank, second_life(order, rank))


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0].startswith("{"):
        return as_rank(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="that each rank holds (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(default: 2 4)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of each read of tensors (default: %(default)s)")
    parser.add_argument("--link-ms", type=float, default=0.0, help="of each exchange (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="for the store (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="keep every measurement in --out")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="reading_") as scratch:
        result = measured(args, Path(scratch))
    waits = f"{args.delay_ms:g} ms more a read, {args.link_ms:g} an exchange"
    title = f"coming back from storage: {args.mib} MiB on every rank, {waits}"
    Console(width=None if sys.stdout.isatty() else 120).print(table(result, f"{title}; medians of {args.rounds}"))
    if args.write:
        options = {name: getattr(args, name) for name in ("mib", "rounds", "delay_ms", "link_ms")}
        report.write_json(args.out / "reading.json", {"machine": report.machine(), **options, "ways": result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
