"""Housekeeping police: a test that leaves something behind fails, and the next one starts clean."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from moe_ckpt.memory.arena import Buffer

# Times say nothing on a shared machine with two cores; a failure prints how to repeat it.
settings.register_profile("moe_ckpt", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("moe_ckpt")

# Read when torch is imported, here and in every process that a test starts. The tests are many processes on few cores
# already, and threads that wait for each other there take the cores from those who work.
os.environ["OMP_NUM_THREADS"] = "1"

os.environ.pop("COLUMNS", None)  # of the terminal that the tests are started from: they say themselves how wide one is

MEMORY_BACKED = Path("/dev/shm")
if MEMORY_BACKED.is_dir() and os.access(MEMORY_BACKED, os.W_OK) and shutil.disk_usage(MEMORY_BACKED).free > 2 << 30:
    # For tmp_path. Tests write thousands of files and wait for each to be on the disk, of which they learn nothing: who
    # kills a process loses no file that it has written, and no test cuts the power.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_BACKED))

THREAD_PREFIXES = ("moe_ckpt", "moe-ckpt")
RUBBISH_NBYTES = 1 << 20
SETTLE_SECS = 60.0
"""A thread or file that is just ending gets this long."""

FOREIGN_ENVIRONMENT = frozenset(
    {
        # Written by the test runner and by libraries at import or on first use, and never taken back.
        "PYTEST_CURRENT_TEST",
        "CUDA_MODULE_LOADING",
        "CRC32C_SW_MODE",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TF2_BEHAVIOR",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    }
)
_TEMPORARY_ROOTS = tuple({str(Path(tempfile.gettempdir()).resolve()), "/tmp", "/dev/shm"})

LONGEST = frozenset(
    {
        "test_capacity_boost.py",
        "test_cli_plan.py",
        "test_cli_simulate.py",
        "test_comm.py",
        "test_conf.py",
        "test_crash_ddp.py",
        "test_crash_kill.py",
        "test_crash_storage.py",
        "test_crash_variations.py",
        "test_edited_documents.py",
        "test_exact.py",
        "test_fault_campaign.py",
        "test_gpu_benchmark.py",
        "test_gradient_capture.py",
        "test_gradient_log.py",
        "test_guests.py",
        "test_lightning_sharded.py",
        "test_localized.py",
        "test_megatron_lm.py",
        "test_memory.py",
        "test_memory_kills.py",
        "test_memory_layouts.py",
        "test_memory_rarely_stored.py",
        "test_plain_loop.py",
        "test_replication.py",
        "test_reshard.py",
        "test_sampler_lightning.py",
        "test_sim_conf.py",
        "test_sim_run.py",
        "test_survivors.py",
        "test_survivors_launched.py",
        "test_torchtitan.py",
        "test_trained.py",
        "test_transformers.py",
        "test_unmade_slots.py",
    }
)
"""These files take from ten seconds to a minute each."""


@pytest.hookimpl(tryfirst=True)  # pytest deselects by -m after this
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first: where files are dealt out to processes, none of these is to work alone at the end."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    selected = any("::" in argument for argument in config.args)
    for problem in mark_slow(item for item in items if isinstance(item, pytest.Function)):
        if not selected:
            raise pytest.UsageError(problem)


def mark_slow(items: Iterable[pytest.Function]) -> list[str]:
    """Mark the cases slow that ``quick`` does not name; return a sentence on each name without a case."""
    unseen: dict[str, set[str]] = {}
    for item in items:
        if mark := item.get_closest_marker("quick"):
            case = item.callspec.id
            unseen.setdefault(item.nodeid.partition("[")[0], set(mark.args)).discard(case)
            if case not in mark.args:
                item.add_marker(pytest.mark.slow)
    return [f"{test}: quick names {sorted(names)}, which are no cases of it" for test, names in unseen.items() if names]


def pytest_collectstart() -> None:
    """Test modules are imported now: see ``tests.support.imports``."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What has been imported lives as long as the process; the collector need not look at it again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def log_of_others() -> Iterator[None]:
    """Programs that a test runs in this process may set up logging, as Hydra does: their handlers go with them, since
    they write to streams that are closed by then."""
    loggers = [logging.getLogger(name) for name in (None, "moe_ckpt")]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        for handler in list(logger.handlers):
            if handler not in handlers and isinstance(handler, logging.StreamHandler) and not _is_pytests(handler):
                logger.removeHandler(handler)
        logger.setLevel(level)


def _is_pytests(handler: logging.Handler) -> bool:
    return type(handler).__module__.startswith("_pytest.")


@pytest.fixture
def warm_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that the test starts by ``sys.executable`` run in forks of a warm server (``tests.support.warm``)."""
    from tests.support import warm

    monkeypatch.setattr(sys, "executable", warm.python())


@pytest.fixture(autouse=True)
def rubbish_in_what_is_lent() -> Iterator[None]:
    """Memory that is lent again has rubbish in it, so that whoever still reads what it had before is seen."""
    from moe_ckpt.tiers.buffers import BufferPool

    take = BufferPool.take

    def taken(pool: BufferPool, sizes: Sequence[int]) -> list[Buffer] | None:
        buffers = take(pool, sizes)
        for buffer in buffers or ():
            buffer.memory[:RUBBISH_NBYTES].fill_(0xA5)
        return buffers

    with mock.patch.object(BufferPool, "take", taken):  # monkeypatch would be undone too late
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves threads of ours, environment changes, a process group or open temporary files."""
    before = (_threads(), _environment(), _group_initialised(), _open_temporaries())
    yield
    leaks = leftovers(*before)
    if leaks:
        pytest.fail("left behind: " + "; ".join(leaks), pytrace=False)


def leftovers(
    threads: set[threading.Thread], environment: dict[str, str], group: bool, files: dict[int, str]
) -> list[str]:
    """What is there now and was not before, as sentences; environment and process group are put right."""
    found = [f"thread {thread.name!r} still runs" for thread in _wait_until_gone(threads)]
    changed = sorted(
        key for key in environment.keys() | _environment().keys() if environment.get(key) != os.environ.get(key)
    )
    for key in changed:
        if key in environment:
            os.environ[key] = environment[key]
        else:
            del os.environ[key]
    if changed:
        found.append(f"environment variables changed: {', '.join(changed)}")
    if _group_initialised() and not group:
        import torch.distributed as dist

        dist.destroy_process_group()
        found.append("the default process group was not destroyed")
    if new := {fd: path for fd, path in _open_temporaries().items() if files.get(fd) != path}:
        gc.collect()  # a file object in a dead reference cycle is the garbage collector's business
        still = _open_temporaries()
        found.extend(f"{path} is still open" for fd, path in sorted(new.items()) if still.get(fd) == path)
    return found


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIXES)}


def _wait_until_gone(before: set[threading.Thread]) -> list[threading.Thread]:
    deadline = time.monotonic() + SETTLE_SECS
    while (left := _threads() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(left, key=lambda thread: thread.name)


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in FOREIGN_ENVIRONMENT}


def _group_initialised() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _open_temporaries() -> dict[int, str]:
    """Descriptor -> path of the regular files below a temporary directory that this process holds open."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if path.startswith(sys.prefix + os.sep):
            continue  # the environment itself may lie in a temporary directory (CI), and libraries cache their fonts
        if path.startswith(_TEMPORARY_ROOTS) and not path.endswith(" (deleted)"):
            found[int(name)] = path
    return found
