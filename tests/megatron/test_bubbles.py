"""Copies and sends in the bubbles of a real pipeline: the same bytes as without, killed or not, and nothing is left.

PP2 x DP2 on four processes, two stages of two data-parallel ranks each.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt import RetentionPolicy
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from tests.megatron.exactness import Case, finish, kill, require_exact
from tests.support.deleting import delete_tree
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import Life, live
from tests.support.processes import run_ranks

WARM = "tests.support.megatron_warm"
RANKS, STEPS = 4, 7
PIPELINE = Setup(pp=2, num_microbatches=4)
INTERLEAVED = Setup(pp=2, vpp=2, ep=2, num_microbatches=4)
COPIES = {"replicas": 1}


def lived(rank: int, world_size: int, life: Life) -> dict[str, Any]:
    """``live``, and what is left of it in this process."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    before = P2PCommunicator._communicate
    told = live(rank, world_size, life)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("moe_ckpt")]
    return {**told, "left": left, "wrapped": P2PCommunicator._communicate is not before}


def without_gate() -> None:
    from moe_ckpt.run.options import Options

    needs: Any = Options.needs
    Options.needs = property(lambda options: replace(needs.fget(options), bubbles=False))  # type: ignore[misc]


def run(root: Path, setup: Setup, *, gated: bool) -> list[dict[str, Any]]:
    life = Life(
        str(root / "store"),
        STEPS,
        setup,
        ("MoEtion", {"experts": 2}),
        options={"retention": RetentionPolicy(keep_last=STEPS)},
        memory=str(root / "memory"),
        copies=COPIES,
        sabotage=None if gated else without_gate,
    )
    return run_ranks(lived, RANKS, life, timeout=300, preload=WARM)


def checksums(store: Path) -> dict[tuple[str, str, tuple[int, ...]], int]:
    """Of each slice of each checkpoint."""
    reader = StoreReader(open_storage(str(store)))
    found = {}
    for directory in reader.directories():
        manifest = reader.manifest(directory)
        for header in reader.headers(manifest).values():
            for each in header.slices:
                found[directory, each.key, tuple(each.offsets)] = each.checksum
    return found


@pytest.mark.parametrize(
    "setup", [PIPELINE, pytest.param(INTERLEAVED, marks=pytest.mark.slow)], ids=["1f1b", "interleaved"]
)
def test_checkpoints_are_the_same_bit_by_bit(setup, tmp_path):
    on, off = (run(tmp_path / name, setup, gated=name == "on") for name in ("on", "off"))
    one, other = (checksums(tmp_path / name / "store") for name in ("on", "off"))
    assert len({directory for directory, *_ in one}) >= STEPS - 1
    assert one == other
    for mine, theirs in zip(on, off, strict=True):
        assert mine["tensors"] == theirs["tensors"]
        assert mine["left"] == theirs["left"] == []
        assert not mine["wrapped"]
        assert theirs["records"][STEPS].bubble_nbytes == theirs["records"][STEPS].beside_nbytes == 0
    assert sum(each["records"][STEPS].bubble_nbytes for each in on) > 0


HELD = Case(
    PIPELINE,
    ("MoEtion", {"experts": PIPELINE.experts, "capacity_boost": None}),  # all of them, so that a return is exact
    ((1, 5, "train"),),
    steps=7,
    memory=True,
    copies={**COPIES, "storage_every": 1000},
)


@pytest.mark.parametrize("lost", [0, pytest.param(None, marks=pytest.mark.slow)])
def test_killed_while_copies_and_sends_are_held_back(lost, tmp_path):
    """Training is in a backward pass when a rank dies; with a node all that lay there is gone, and its peer has it."""
    kill(HELD, tmp_path)
    if lost is not None:
        delete_tree(tmp_path / "memory" / f"node_{lost}")
    ended = finish(HELD, tmp_path)
    assert ended.resumed >= [2], "storage has only what the run began with"
    require_exact(HELD, tmp_path, ended)
    assert all(each["records"][HELD.steps].bubble_nbytes > 0 for each in ended.results)
