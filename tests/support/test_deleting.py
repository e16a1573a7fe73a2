"""``delete_tree`` while somebody writes into the directory."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import pytest

from tests.support.deleting import delete_tree


def test_a_writer_in_the_directory_does_not_stop_its_deletion(tmp_path):
    root, done = tmp_path / "store", threading.Event()

    def write() -> None:
        for number in itertools.cycle(range(50)):
            with contextlib.suppress(OSError):  # the directory went between two calls
                (root / "step" / str(number)).mkdir(parents=True, exist_ok=True)
            if done.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(10):
            while not root.exists():
                time.sleep(0.001)
            delete_tree(root)
    finally:
        done.set()
        writer.join()
    assert {path.name for path in tmp_path.iterdir()} <= {"store"}


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        delete_tree(tmp_path / "store")
