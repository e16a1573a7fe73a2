"""Numbers with units, as they are told to people; how they are read is in ``test_options``."""

from __future__ import annotations

import pytest

from moe_ckpt.core.user_text import human_bytes, name_ranks


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")])
def test_human_bytes(nbytes, text):
    assert human_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (range(20), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_name_ranks(ranks, text):
    assert name_ranks(ranks) == text
