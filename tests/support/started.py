"""``python -m tests.support.started module arguments...``: as ``python -m module arguments...``, imported sooner."""

from __future__ import annotations

import runpy
import sys

from tests.support.imports import import_for_good

if __name__ == "__main__":
    del sys.argv[0]
    import_for_good(sys.argv[0])
    del sys.modules[sys.argv[0]]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
