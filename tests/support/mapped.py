"""What a process has mapped."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def deleted_slots(directory: Path | str, process: int | str = "self") -> Counter[str]:
    """Slots below a directory whose files are deleted, but whose memory a process holds: bytes by name."""
    found: Counter[str] = Counter()
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        if str(directory) in line and line.endswith("(deleted)"):
            begin, end = line.split()[0].split("-")
            found[Path(line.split()[5]).name] += int(end, 16) - int(begin, 16)
    return found
