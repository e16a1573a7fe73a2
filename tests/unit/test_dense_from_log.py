"""Dense checkpoints made from a gradient log: when the policy and the engine ask for one, and where it is refused."""

from __future__ import annotations

import errno
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.plan import SnapshotPlan, save_full, save_logged
from moe_ckpt.engine.agreement import StepConsensus
from moe_ckpt.engine.flushing import StorageFlush
from moe_ckpt.engine.from_log import require_whole_units
from moe_ckpt.engine.run_ledger import Pending, RunLedger
from moe_ckpt.engine.settings import Settings
from moe_ckpt.engine.writing import write_placed
from moe_ckpt.errors import ConfigError, StoreUnwritableError
from moe_ckpt.gradients.own_log import _groups
from moe_ckpt.gradients.units import Unit, UnitBlock, whole_unit
from moe_ckpt.memory.options import Memory
from moe_ckpt.policies import GradientLog, needs_of
from moe_ckpt.policies.base import MemoryFacts
from moe_ckpt.ports import StateTensor
from moe_ckpt.storage import LocalStorage, RemoteStorage
from tests.unit.builders import catalog, context
from tests.unit.test_policies_gradient_log import weighing

MODEL = catalog(2, 4)
PLACE = "step_00000001/rank_00000_expert.safetensors"


# --- the policy ---


def plan(dense_from: str, **facts) -> SnapshotPlan:
    policy = GradientLog(window=3, dense_from=dense_from)
    anchored = np.full(len(MODEL.operators), 5)
    known = {"sizes": weighing(MODEL), "anchored_at": anchored, "memory": MemoryFacts(**facts)}
    return policy.plan(context(MODEL, 6, last_step=5, **known))


def test_a_due_step_is_logged_where_the_log_serves():
    assert plan("log", storage_due=True, log_serves=True).gradients
    assert not plan("log", storage_due=True, log_serves=False).gradients, "it failed, or nobody makes it"
    assert not plan("training", storage_due=True, log_serves=True).gradients
    assert plan("training", storage_due=False).gradients
    assert needs_of(GradientLog(dense_from="log")).dense_from_log
    assert not needs_of(GradientLog()).dense_from_log


def test_another_word_is_refused():
    with pytest.raises(ConfigError, match=r"dense_from='peers'.*choose 'training', or 'log'"):
        GradientLog(dense_from="peers")


# --- when ---

LOGGED = save_logged(10, MODEL.everything[:3], MODEL.everything[3:])


def flush(when_busy: str = "skip") -> StorageFlush:
    settings = Settings(memory=Memory(storage_every_n_steps=5), when_busy=when_busy)
    made = StorageFlush(settings, windows=False, rank=0, from_log=True)
    made.resumed(5)
    return made


def ledger(model: Catalog = MODEL, *, making: bool = False) -> RunLedger:
    found = RunLedger(model, outlives_process=True)
    if making:
        found.begun(0, pending())
    return found


def pending(**facts) -> Pending:
    applied = np.zeros((2, 4), dtype=np.int64)
    return replace(Pending(MODEL, 5, 0, MODEL.everything, (), applied, {}, from_log=True), **facts)


def at(step: int) -> SnapshotPlan:
    return replace(LOGGED, step=step)


def test_storage_gets_what_is_due_from_the_log():
    one = flush()
    assert not one.goes_from_log(at(9), StepConsensus(), ledger()), "not due"
    assert one.goes_from_log(at(10), StepConsensus(), ledger())
    assert not one.goes_from_log(at(11), StepConsensus(), ledger()), "it went"
    assert not one.goes(at(15), StepConsensus(), ledger()), "gradients themselves never do"
    assert not one.goes_from_log(save_full(15, MODEL.everything), StepConsensus(), ledger()), "it is copied"


def test_while_one_is_made_the_next_is_skipped_once_or_waited_for(caplog):
    one = flush()
    assert not one.goes_from_log(at(10), StepConsensus(), ledger(making=True))
    assert not one.goes_from_log(at(11), StepConsensus(), ledger(making=True))
    assert one.skips == 1
    assert "this one stays in memory only" in caplog.text
    assert one.goes_from_log(at(12), StepConsensus(), ledger())
    assert flush("wait").goes_from_log(at(10), StepConsensus(), ledger(making=True))
    assert not flush().goes_from_log(at(10), StepConsensus(storage_busy=True), ledger())


def test_after_a_failure_training_copies_until_that_is_committed(caplog):
    one = flush()
    assert one.goes_from_log(at(10), StepConsensus(), ledger())
    one.ended(pending(step=10), committed=False)
    assert not one.log_serves
    assert one.expects(11, StepConsensus(), ledger()), "at once"
    assert not one.goes_from_log(at(11), StepConsensus(), ledger())
    assert "The next one is copied in full from training" in caplog.text
    one.ended(pending(step=11, from_log=False), committed=False)
    assert not one.log_serves
    one.ended(pending(step=12, from_log=False), committed=True)
    assert one.log_serves
    without = StorageFlush(Settings(memory=Memory()), windows=False, rank=0)
    without.ended(pending(from_log=False), committed=True)
    assert not without.log_serves


# --- where ---


def tensor(name: str, device: str = "cpu", **flags) -> StateTensor:
    return StateTensor(f"model/{name}", name, torch.zeros(2, 2, device=device), (0, 0), (2, 2), **flags)


def require(*tensors: StateTensor, ranks: int = 1) -> None:
    require_whole_units(tensors, everywhere(MODEL.layers, ranks), SoloCommunicator())


def test_ranks_that_share_tensors_are_refused_and_told_what_to_do():
    require(tensor("w"))
    require(tensor("w", replicated=False), ranks=2)
    require(tensor("w", replicated=False, duplicate=True), ranks=2)
    count = StateTensor("optim/0/w/step", "w", torch.zeros(()), (), ())
    require(count, ranks=2)
    with pytest.raises(ConfigError, match=r"dense_from='log': w is held by 2 ranks.*dense_from='training'"):
        require(tensor("v", replicated=False), tensor("w"), ranks=2)


def test_another_device_is_refused():
    with pytest.raises(ConfigError, match=r"w is trained on a device of type 'meta'.*dense_from='training'"):
        require(tensor("w", device="meta"))


def test_a_thread_that_flushes_the_smallest_numbers_is_refused():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        with pytest.raises(ConfigError, match="set_flush_denormal"):
            require(tensor("w"))
    finally:
        torch.set_flush_denormal(False)
    require(tensor("w"))


def test_units_that_share_a_parameter_are_made_together():
    def unit(name: str, *parameters: str) -> Unit:
        made = whole_unit(name, 0, 0, torch.zeros(4))
        return replace(made, pieces=tuple(replace(made.pieces[0], parameter=each) for each in parameters))

    groups = _groups([unit("1", "a"), unit("2", "b", "c"), unit("3", "d"), unit("4", "c", "d"), unit("5", "a")])
    assert groups["b"] == groups["c"] == groups["d"]
    assert groups["a"] != groups["b"]
    assert isinstance(unit("6", "e").pieces[0], UnitBlock)


# --- the file ---


def test_a_file_is_written_in_any_order(tmp_path):
    storage = LocalStorage(tmp_path)
    pieces = [(6, b"world"), (5, b""), (0, memoryview(b"hello "))]
    assert write_placed(storage, PLACE, 11, iter(pieces)) == 11
    assert storage.read(PLACE) == b"hello world"
    with pytest.raises(StoreUnwritableError, match=PLACE):
        write_placed(storage, PLACE, 11, iter(pieces))
    assert storage.read(PLACE) == b"hello world"


def test_of_a_file_that_fails_nothing_is_left(tmp_path):
    def pieces():
        yield 6, b"world"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreUnwritableError, match="No space left"):
        write_placed(LocalStorage(tmp_path), PLACE, 11, pieces())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_object_store_gets_it_whole():
    storage = RemoteStorage("memory://dense_from_log")
    assert write_placed(storage, PLACE, 11, iter([(6, b"world"), (0, b"hello ")])) == 11
    assert storage.read(PLACE) == b"hello world"
    storage.delete(PLACE)
