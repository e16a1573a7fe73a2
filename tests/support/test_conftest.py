"""The police themselves: each kind of leftover is seen."""

from __future__ import annotations

import os
import threading

import pytest
import torch.distributed as dist

from tests import conftest


@pytest.fixture
def before():
    return (
        conftest._threads(),
        conftest._environment(),
        conftest._group_initialised(),
        conftest._open_temporaries(),
    )


def test_a_clean_test_leaves_nothing(before):
    assert conftest.leftovers(*before) == []


def test_a_running_thread_is_seen(before, monkeypatch):
    monkeypatch.setattr(conftest, "SETTLE_SECS", 0.05)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="moe_ckpt-persist")
    thread.start()
    try:
        assert conftest.leftovers(*before) == ["thread 'moe_ckpt-persist' still runs"]
    finally:
        stop.set()
        thread.join()


def test_changed_environment_is_seen_and_put_right(before):
    os.environ["MOE_CKPT_LEFT"] = "1"
    assert conftest.leftovers(*before) == ["environment variables changed: MOE_CKPT_LEFT"]
    assert "MOE_CKPT_LEFT" not in os.environ


def test_a_process_group_is_seen_and_put_right(before, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert "the default process group was not destroyed" in conftest.leftovers(*before)
    assert not dist.is_initialized()


def test_an_open_file_is_seen(before, tmp_path):
    with open(tmp_path / "shard.tmp", "wb"):
        assert conftest.leftovers(*before) == [f"{tmp_path}/shard.tmp is still open"]


@pytest.mark.parametrize("case", ["one", "two", "three"])
@pytest.mark.quick("one", "three")
def test_cases_that_quick_does_not_name_are_slow(case, request):
    assert case != "two" or request.node.get_closest_marker("slow")
    assert case == "two" or not request.node.get_closest_marker("slow")


@pytest.mark.parametrize("case", ["one"])
def test_a_name_without_a_case_is_a_problem(case, request):
    request.node.add_marker(pytest.mark.quick("one", "won"))
    assert conftest.mark_slow([request.node]) == [
        "tests/support/test_conftest.py::test_a_name_without_a_case_is_a_problem: quick names ['won'], "
        "which are no cases of it"
    ]
    assert not request.node.get_closest_marker("slow")
