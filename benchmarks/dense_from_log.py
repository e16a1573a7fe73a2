"""What a dense checkpoint on storage costs under a gradient log: copied by training, or made from the log beside it.

Bytes, and CPU time of each thread, are counted in a real Lightning run on the CPU; wall time is not. Each case is a
process of its own. docs/gradient_log.md has the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import lightning.pytorch as pl
import torch

from benchmarks.windowed import batches, trainer, workload
from benchmarks.workload import SIZES
from moe_ckpt import Memory
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.gradients.replay import OptimizerReplay
from moe_ckpt.gradients.replayed_share import RankShare
from moe_ckpt.policies import GradientLog

_EXAMPLE = "example: python benchmarks/dense_from_log.py --size small"
WINDOW, EVERY, STEPS = 5, 10, 61
_THREADS = {"MainThread": "training", "moe_ckpt-persist": "persist", "moe_ckpt-seal": "seal"}


class _Counts(pl.Callback):
    """What this process did, step by step.

    Attributes:
        due: Of steps that go to storage, bytes and CPU seconds of the training thread in ``after_update``.
        logged: Of the others.
        held: Most bytes that the pool of buffers held.
        replayed: Most bytes of optimizers that a replay held at once.
    """

    def __init__(self) -> None:
        self.due: list[tuple[int, float]] = []
        self.logged: list[tuple[int, float]] = []
        self.held = self.replayed = 0
        self.cpu: dict[str, float] = defaultdict(float)
        after, replayed = CheckpointSession.after_update, RankShare.replayed

        def counted(session: CheckpointSession, *args: Any, **options: Any) -> Any:
            began = time.thread_time()
            record = after(session, *args, **options)
            if record.begun and record.step > EVERY:
                (self.due if record.to_storage else self.logged).append((record.nbytes, time.thread_time() - began))
            self.held = max(self.held, session._resources.pipeline._pool.held_bytes)
            return record

        def weighed(share: RankShare, *args: Any) -> OptimizerReplay:
            found = replayed(share, *args)
            weights = [tensor.detach() for tensor in found.tensors.values()]
            state = [v for o in found.optimizers for s in o.state.values() for v in s.values() if torch.is_tensor(v)]
            self.replayed = max(self.replayed, sum(each.nbytes for each in (*weights, *weights, *state)))
            return found

        session_class: Any = CheckpointSession
        share_class: Any = RankShare
        session_class.after_update, share_class.replayed = counted, weighed

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for thread in threading.enumerate():
            if thread.name in _THREADS and thread.native_id is not None:
                nanoseconds = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
                self.cpu[_THREADS[thread.name]] = int(nanoseconds) / 1e9


def one(size: str, dense_from: str) -> dict[str, Any]:
    """Returns the counts of one run."""
    torch.set_num_threads(1)
    config, batch = SIZES[size]
    counts = _Counts()
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        ours = MoECheckpoint(
            GradientLog(window=WINDOW, dense_from=dense_from),
            f"{home}/store",
            save_last=False,
            when_busy="wait",
            memory=Memory(directory=memory, storage_every_n_steps=EVERY),
        )
        module = workload(config)
        trainer(STEPS, Path(home), counts, ours).fit(module, batches(config, batch))
    parameters = sum(each.numel() for each in module.parameters())
    return {
        "parameters": parameters,
        "tensors": sum(1 for _ in module.parameters()),
        "due": len(counts.due),
        **{f"due {name}": median(each[at] for each in counts.due) for at, name in enumerate(("bytes", "cpu"))},
        **{f"logged {name}": median(each[at] for each in counts.logged) for at, name in enumerate(("bytes", "cpu"))},
        "held": counts.held,
        "replayed": counts.replayed,
        "cpu": counts.cpu,
    }


def table(size: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the lines of a Markdown table."""
    lines = [
        "| dense from | bytes per parameter copied at a due step | CPU of the training thread there "
        "| persist thread, CPU per checkpoint | buffers held, bytes per parameter | replay beside them, MiB |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for name, each in found.items():
        parameters = each["parameters"]
        lines.append(
            f"| {name} | {each['due bytes'] / parameters:.1f} | {1e3 * each['due cpu']:.1f} ms "
            f"| {1e3 * each['cpu']['persist'] / (each['due'] + 2):.0f} ms | {each['held'] / parameters:.1f} "
            f"| {each['replayed'] / (1 << 20):.1f} |"
        )
    return "\n".join(
        [*lines, "", f"{size}: {found['log']['parameters']:,} parameters, {found['log']['tensors']} tensors"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model")
    parser.add_argument("--one", choices=("training", "log"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.one is not None:
        print(json.dumps(one(chosen.size, chosen.one)))
        return 0
    found = {}
    for dense_from in ("training", "log"):
        command = [sys.executable, __file__, "--size", chosen.size, "--one", dense_from]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[dense_from] = json.loads(done.stdout.splitlines()[-1])
    print(table(chosen.size, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
