"""``python -m benchmarks``: all of them. Options are those of ``stall.py``."""

from __future__ import annotations

import sys

from benchmarks import copy_speed, stall


def main(argv: list[str]) -> int:
    stall.quiet()
    code = stall.main(argv)
    return code or copy_speed.main(["--write"] if "--write" in argv else [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
