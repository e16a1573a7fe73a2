"""Checksums of slices are those of their bytes, however the slices are sized and follow on one another."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.slices.writing import checksums_of

SIZES = st.sampled_from([0, 1, 8, 64, 511, 512, 513, 2000])


@given(st.lists(st.tuples(SIZES, st.sampled_from([1, 2, 31, 32, 33, 80])), max_size=8), st.integers(0, 255))
def test_each_slice_has_the_checksum_of_its_bytes(stretches, seed):
    sizes = np.array([size for size, count in stretches for _ in range(count)], dtype=np.int64)
    ends = np.cumsum(sizes)
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, (int(sizes.sum()),), dtype=torch.uint8, generator=generator)
    raw = memory.numpy().tobytes()
    expected = [xxhash.xxh3_64_intdigest(raw[begin:end]) for begin, end in pairwise([0, *ends.tolist()])]
    assert checksums_of(SimpleNamespace(ends=ends), memory).tolist() == expected
