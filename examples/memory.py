"""Checkpoints in the node's memory, which outlive ``kill -9``: the run resumes from them, not from storage."""

import tempfile

from lives import start
from with_lightning import train

from moe_ckpt import Memory, newest_step
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies import Dense


def run(root: str, kill_at: int | None = None) -> None:
    memory = Memory(
        directory=root,  # leave this out for /dev/shm, which this example would leave files in
        replicas=0,  # 1 with two nodes or more: the memory of a node that is lost lies on another one too
        storage_every=100,
    )
    checkpoint = MoECheckpoint(Dense(), dirpath=f"{root}/storage", memory=memory)
    train(checkpoint, kill_at)
    assert checkpoint.recovery_plan is not None
    for row in checkpoint.recovery_plan.rows():
        print(
            f"{row.operators} operators ({row.experts} of them experts) came from {row.source.label}, step {row.newest}"
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        start(run, root, 25)
        print("newest step on storage:", newest_step(f"{root}/storage"))
        start(run, root)
