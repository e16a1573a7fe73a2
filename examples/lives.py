"""Lives of a training, each in a process of its own: for the programs beside this one."""

import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch

ALONE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
"""What torchrun sets, of a single process."""


def start(target: Callable[..., None], *arguments: Any) -> None:
    process = get_context("fork").Process(target=target, args=arguments)
    process.start()
    process.join()
    print("exit code", process.exitcode)


def compare(train: Callable[[str, str, int | None], None], *kills: int) -> None:
    """Trains once undisturbed, and once with a kill at each of these steps; ``train`` saves its weights at the end."""
    with tempfile.TemporaryDirectory() as root:
        start(train, root, "whole", None)
        for kill_at in (*kills, None):
            start(train, root, "killed", kill_at)
        whole, killed = (torch.load(f"{root}/{name}.pt") for name in ("whole", "killed"))
    print("the same bits as without kills:", all(torch.equal(whole[name], killed[name]) for name in whole))
