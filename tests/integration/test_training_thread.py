"""The training thread makes no memory, at any step from the first one on: none of its hooks maps, touches, locks or
frees any. On a GPU that is acted, at the number of tensors of the benchmark's model."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training_thread
from benchmarks.gpu.training import Shape
from moe_ckpt.slices import copying
from moe_ckpt.tiers.buffers import WorkThread

STEPS = 10
FEW_PAGES = 128
"""Half a MiB, of what Python and torch keep of small objects, in all steps but the first, which makes plans."""
LOCKED_BYTES = 8 << 10
"""At a step, of counts: torch's own small memory, which it keeps."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(training_thread.SIZES, "small", Shape(32, 2, 8, 24, 16, 2, top_k=2))
    gc.collect()


def run(name: str, root: Path) -> dict[str, Any]:
    return training_thread.run(training_thread.POLICIES[name], "small", STEPS, root, acted=True)


@pytest.mark.parametrize("name", training_thread.POLICIES)
def test_no_hook_makes_or_frees_memory_or_waits_for_the_device(name, tmp_path):
    found = run(name, tmp_path)
    assert sum(found["begun"]) >= STEPS // 2
    assert found["calls"] == []
    assert found["unlocked"] == 0
    assert found["waits"] == []
    assert found["locked_bytes"] <= STEPS * LOCKED_BYTES
    assert sum(found["pages"][1:]) < FEW_PAGES, found["pages"]


def test_memory_that_the_training_thread_makes_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(WorkThread, "start", lambda self, work: False)
    found = run("Dense()", tmp_path)
    assert "madvise" in found["calls"]
    assert found["locked_bytes"] > STEPS * LOCKED_BYTES


def test_pages_that_a_hook_touches_are_seen(tmp_path, monkeypatch):
    start = copying.Copier.start

    def touching(*args: Any, **more: Any) -> Any:
        with mmap.mmap(-1, 1 << 22) as memory:  # what malloc gives may have been touched before
            memory.write(bytes(1 << 22))
        return start(*args, **more)

    monkeypatch.setattr(copying.Copier, "start", touching)
    assert sum(run("Dense()", tmp_path)["pages"][1:]) > FEW_PAGES
