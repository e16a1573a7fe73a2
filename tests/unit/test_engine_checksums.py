"""Checksums of slices are those of their bytes, however the slices are sized and follow on one another."""

from __future__ import annotations

import random
import threading
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt import Memory
from moe_ckpt.policies import MoC
from moe_ckpt.reading.reader import StoreReader, check_checkpoint
from moe_ckpt.slices import checksums
from moe_ckpt.slices.checksums import Checker, checksums_of
from moe_ckpt.slices.snapshot import SnapshotPart
from moe_ckpt.storage import LocalStorage
from moe_ckpt.threads import ThreadName
from tests.unit.engine_parts import Life

SIZES = st.sampled_from([0, 1, 8, 64, 240, 241, 2000])


@given(st.lists(st.tuples(SIZES, st.integers(1, 9)), max_size=8), st.integers(0, 255))
def test_each_slice_has_the_checksum_of_its_bytes(stretches, seed):
    sizes = np.array([size for size, count in stretches for _ in range(count)], dtype=np.int64)
    ends = np.cumsum(sizes)
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, (int(sizes.sum()),), dtype=torch.uint8, generator=generator)
    raw = memory.numpy().tobytes()
    expected = [xxhash.xxh3_64_intdigest(raw[begin:end]) for begin, end in pairwise([0, *ends.tolist()])]
    assert checksums_of(SimpleNamespace(ends=ends), memory).tolist() == expected


KINDS = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "": torch.uint8}


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(KINDS)), st.lists(st.integers(0, 90), min_size=1, max_size=6)), max_size=6
    ),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_a_part_is_checked_in_any_number_of_tasks_by_any_number_of_threads(stretches, threads, seed):
    """Small tasks and caches, so that slices are smaller and larger than either."""
    draw = random.Random(seed)
    slices = [(kind, count) for kind, counts in stretches for count in counts]
    values = [torch.arange(count).to(KINDS[kind]) for kind, count in slices]
    spoiled = [at for at, (kind, count) in enumerate(slices) if kind in ("F32", "BF16") and count]
    chosen = draw.sample(spoiled, min(len(spoiled), draw.randrange(3)))
    for at in chosen:
        values[at][draw.randrange(len(values[at]))] = draw.choice([float("nan"), float("inf"), -float("inf")])
    raw = b"".join(each.view(torch.uint8).numpy().tobytes() for each in values)
    ends = np.cumsum([each.nbytes for each in values], dtype=np.int64)
    entries = [
        SimpleNamespace(key=f"model/{at}", nbytes=values[at].nbytes, dtype=kind) for at, (kind, _) in enumerate(slices)
    ]
    starts = np.cumsum([0, *(len(counts) for _, counts in stretches)]).tolist()
    of_kinds = [(kind, *span) for (kind, _), span in zip(stretches, pairwise(starts), strict=True) if kind]
    asked: list[int] = []
    checker = Checker(threads)
    with mock.patch.multiple(checksums, _TASK_NBYTES=256, _WARM_NBYTES=64):
        pieces = checksums.pieces_of(ends, of_kinds)
        part = SimpleNamespace(pieces=pieces, slices=np.arange(len(entries)), shelved=entries)
        copied = SnapshotPart(0, 0, part, torch.frombuffer(bytearray(raw or b"0"), dtype=torch.uint8))
        [(sums, first), *_] = checker.check(
            [copied, copied],
            lambda key: key != f"model/{min(chosen, default=-1)}",
            lambda number, end: asked.append(end),
        )
    checker.close()
    expected = [xxhash.xxh3_64_intdigest(raw[begin:end]) for begin, end in pairwise([0, *ends.tolist()])]
    assert sums.tolist() == expected
    assert first == "".join(f"model/{at}" for at in sorted(chosen)[1:2]), "but for one that does not count"
    assert max(asked, default=0) == len(raw), "it was waited for all of them"


def test_whoever_closes_it_may_still_check():
    checker = Checker(2)
    checker.close()
    assert checker.check([], lambda key: True, lambda number, end: None) == []


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "private"])
def test_a_run_with_several_threads_writes_what_one_thread_does(tmp_path, in_memory):
    written = {}
    for threads in (1, 3):
        root = tmp_path / str(threads)
        root.mkdir()
        memory = Memory(directory=root) if in_memory else None
        with Life(LocalStorage(root / "store"), policy=MoC(k=1), memory=memory, checksum_threads=threads) as life:
            life.go(3, settle=True)
            running = {thread.name.partition("_0")[0] for thread in threading.enumerate()}
            life.finish()
        assert any(name.startswith(ThreadName.CHECKSUM.value) for name in running) == (threads > 1)
        reader = StoreReader(LocalStorage(root / "store"))
        newest = reader.manifest(reader.directories()[0])
        check_checkpoint(reader, newest)
        written[threads] = {
            (stored.entry.key, stored.entry.offsets): stored.entry.checksum for stored in reader.index(newest).live
        }
    assert written[1] == written[3]
    for thread in threading.enumerate():
        if thread.name.startswith(ThreadName.CHECKSUM.value):
            thread.join(30.0)
            assert not thread.is_alive()
