"""Imports without the garbage collector: of the millions of objects that torch and Lightning make, all live on.

Looking for dead ones among them takes a fifth of the time of an import, and as much again whenever the collector looks
at all objects later. In a fork it touches, and so copies, every page besides.
"""

from __future__ import annotations

import gc
import importlib


def import_for_good(*names: str) -> None:
    """Import modules, and have the collector never look at what is there by then."""
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()
