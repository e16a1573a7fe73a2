"""Numbers with units, as they are told to people; how they are read is in ``test_options``."""

from __future__ import annotations

import pytest

from moe_ckpt.core.quantities import human_bytes


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")])
def test_human_bytes(nbytes, text):
    assert human_bytes(nbytes) == text
