"""Host memory after a fault: the newest version that survives anywhere comes back, and nothing unverified does."""

from __future__ import annotations

import gc
import logging
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.core.operators import expert_id
from moe_ckpt.errors import NoCheckpointError, SaveFailedError
from moe_ckpt.memory.arena import Arena
from moe_ckpt.memory.files import FoundSlot
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.reading.collective import DAMAGED, NotUsableError
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.slices import as_values
from moe_ckpt.recovery.executing import Recovery
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.storage import LocalStorage
from moe_ckpt.tiers import host_memory
from tests.support.replicas import checksum
from tests.support.store_builder import values_at
from tests.unit.engine_parts import (
    MODEL,
    Life,
    ThreadRanks,
    _rows_of,
    failing,
    manifests,
    run_threads,
    sequential,
    steps_of_experts,
    versions_after,
)

EXPERTS = [expert_id(layer, e) for layer in range(2) for e in range(4)]


@pytest.fixture(autouse=True)
def no_memory_of_other_tests():
    host_memory.release_host_memory()
    yield
    host_memory.release_host_memory()


def moc(snapshot_k: int = 4) -> MoC:
    return MoC(k=1, snapshot_k=snapshot_k)


def held_steps(life: Life) -> list[int]:
    return [held.header.step for held in life.session.tier.holds()]


def find(life: Life, step: int) -> FoundSlot:
    [held] = [held for held in life.session.tier.holds() if held.header.step == step]
    return held


def slices_of(held: FoundSlot):
    for part in held.header.parts:
        for entry in held.header.slices(part, "kept"):
            yield entry, held.slot.memory[part.begin + entry.begin : part.begin + entry.end]


def assert_state(life: Life, versions: dict[str, int]) -> None:
    """The live tensors of ``life``, as far as this rank has them, are those of ``versions``."""
    for tensor in life.state.tensors():
        whole = torch.full(tensor.global_shape, float("nan"))
        for rows, operator in _rows_of(MODEL, tensor.key):
            whole[rows] = values_at(versions[operator], tensor.key, tensor.global_shape, torch.float32)[rows]
        block = tuple(slice(o, o + n) for o, n in zip(tensor.offsets, tensor.local.shape, strict=True))
        assert torch.equal(tensor.local, whole[block]), tensor.key


def come_back(life: Life, *, empty: bool = True, **options):
    """What a restarted program does. Returns (Restored, fault). options: Of ``resume_newest``."""
    if empty:
        for tensor in life.state.held.values():
            tensor.local.fill_(float("nan"))
    restored = resume_newest(life.storage, life.session.comm, life.state, life.session.tier, **options)
    life.step = restored.manifest.step
    return restored, life.session.resume_from(restored.manifest, **restored.going_on)


def versions_with(stored: dict[str, int], held: set[tuple[int, int]], step: int) -> dict[str, int]:
    return stored | {expert_id(*expert): step for expert in held}


def train_and_fail(root, steps: int = 6, policy=None, comm=None, change=None) -> Life:
    """One life that ends by a fault which leaves the process alive."""
    with Life(LocalStorage(root), policy=policy or moc(), comm=comm) as life:
        if change is not None:
            life.state.change = change
        life.go(steps, settle=True)
    return life


# --- what is kept ---


def test_what_is_kept_after_a_fault_is_no_tensor_of_the_life_that_failed(tmp_path):
    """The model and the optimizer of the life before would stand in the way of the next one's, on a GPU most of all."""
    life = train_and_fail(tmp_path)
    addresses = {tensor.local.untyped_storage().data_ptr() for tensor in life.state.held.values()}
    del life
    gc.collect()
    [kept] = [each.tier for each in host_memory._registry if each.root == str(tmp_path)]
    assert kept.nbytes > 0
    # Tensors of other kinds, such as those that a compiler leaves behind, have no memory.
    tensors = (found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter))
    assert not [found for found in tensors if _address_of(found) in addresses]


def _address_of(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a stand-in of torch.compile's
        return None


def test_the_recovery_buffer_holds_the_newest_commit_and_what_was_only_held(tmp_path):
    with Life(LocalStorage(tmp_path), policy=moc(3)) as life:
        life.go(1, settle=True)
        assert held_steps(life) == [1], "a complete checkpoint, too, although storage holds all of it"
        for step in range(2, 8):
            life.go(1, settle=True)
            held = find(life, step)
            operators = {entry.operator for entry, _ in slices_of(held) if entry.operator.startswith("expert")}
            assert len(operators) == 6, "three of each layer"
            for entry, data in slices_of(held):
                if entry.operator:
                    whole = values_at(step, entry.key, entry.global_shape, torch.float32)
                    block = tuple(slice(o, o + n) for o, n in zip(entry.offsets, entry.shape, strict=True))
                    assert torch.equal(as_values(entry, data), whole[block])
                assert checksum(data) == entry.checksum
            assert held_steps(life) == [step], "and nothing older"
    found = manifests(tmp_path)
    assert [m.step for m in found] == list(range(1, 8))
    assert all(len([op for op in m.operators if m.operators[op].step == m.step]) == 5 for m in found[1:]), (
        "what is only held is not written"
    )


def test_a_failed_checkpoint_leaves_the_former_recovery_buffer(tmp_path):
    with Life(failing(tmp_path, 5 * 3 + 2), policy=moc()) as life:
        life.go(4, settle=True)
        assert [m.step for m in manifests(tmp_path)] == [1, 2, 3]
        assert held_steps(life) == [3]
        life.go(1, settle=True)
        assert held_steps(life) == [5]


def test_a_checkpoint_with_nan_leaves_the_former_recovery_buffer(tmp_path):
    """Storage has the spoiled step, and starts pass it over: memory still has the finite one before it."""
    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        life.go(3, settle=True)
        advance = life.state.advance

        def spoil(step: int) -> None:
            advance(step)
            next(iter(life.state.held.values())).local.view(-1)[0] = float("nan")

        life.state.advance = spoil
        life.go(1, settle=True)
        assert manifests(tmp_path)[-1].not_finite
        assert held_steps(life) == [3]
    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        _, fault = come_back(life)
        assert (fault.restored_step, fault.lost_tokens) == (3, 0)
        assert_state(life, dict.fromkeys(versions_after([(1, set())]), 3))


def test_a_budget_for_two_gives_up_the_recovery_buffer_and_says_so_once(tmp_path, caplog):
    with Life(LocalStorage(tmp_path / "probe"), policy=moc()) as life:
        life.go(2, settle=True)
        size = find(life, 2).slot.memory.numel()
    budget = 2 * size + size // 2
    with Life(LocalStorage(tmp_path / "run"), policy=moc(), host_memory_bytes=budget, when_busy="wait") as life:
        pool = life.session._snapshots.pipeline._pool
        for _ in range(12):
            life.go()
            assert pool.lent_bytes <= budget
        life.settle()
        assert held_steps(life) == [12], "there is room for it when nothing is under way"
    assert not any(r.skipped for r in life.records)
    [said] = [text for text in caplog.messages if "is not kept in memory" in text]
    assert said.startswith(f"the budget of host memory on rank 0, {budget:,} bytes, holds no 3 snapshots of ")
    assert "Set host_memory_bytes to " in said


def test_after_a_few_steps_no_snapshot_allocates(tmp_path, monkeypatch):
    made = []
    grow = Arena.grow
    monkeypatch.setattr(Arena, "grow", lambda self, *args, **how: grow(self, *args, **how) and not made.append(args))
    with Life(LocalStorage(tmp_path), policy=moc(), when_busy="wait") as life:
        life.go(3, settle=True)
        life.session._snapshots.pipeline._copier._pool.submit(int).result()
        life.session._snapshots.pipeline._copier._pool.submit(int).result()
        life.session._snapshots.pipeline._copier._pool.submit(int).result()
        before = len(made)
        assert before <= 4, "for the dense one, and three"
        life.go(30)
        life.settle()
        assert len(made) == before


# --- one process ---


def test_after_a_fault_held_experts_come_back_as_of_the_step(tmp_path):
    train_and_fail(tmp_path)
    stored = versions_after([(s, sequential(s - 1)) for s in range(1, 7)])
    assert len(set(steps_of_experts(stored).flatten())) == 4, "storage has experts of every age"
    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        restored, fault = come_back(life)
        assert_state(life, dict.fromkeys(stored, 6))
        assert (fault.lost_tokens, fault.stale_experts) == (0, 0)
        stale = steps_of_experts(stored) < 6
        assert np.array_equal(restored.tokens_from_host, np.where(stale, 6 * life.counts, 0))
        # Storage still has the old versions: the books say so, and the next checkpoints are chosen by that.
        book = life.session.run_ledger
        assert np.array_equal(book.tokens.unsaved(), (6 - steps_of_experts(stored)) * life.counts)
        assert np.array_equal(book.ledger.expert_ages(6), 6 - steps_of_experts(stored))
        life.go(1, settle=True)
    assert {op: r.step for op, r in manifests(tmp_path)[-1].operators.items()} == versions_after(
        [(s, sequential(s - 1)) for s in range(1, 8)]
    )


def test_experts_that_are_not_held_come_from_storage(tmp_path):
    policy = moc(2)
    first = train_and_fail(tmp_path, policy=policy)
    newest = manifests(tmp_path)[-1]
    stored = {op: record.step for op, record in newest.operators.items()}
    held = set(first.session.run_ledger.newest.contents.memory_only)
    assert len(held) == 2
    with Life(LocalStorage(tmp_path), policy=policy) as life:
        _, fault = come_back(life)
        now = stored | dict.fromkeys(held, 6)
        assert_state(life, now)
        assert fault.lost_tokens == ((6 - steps_of_experts(now)) * life.counts).sum() > 0
        assert fault.stale_experts == 4


def test_a_second_fault_before_the_next_commit_profits_again(tmp_path):
    train_and_fail(tmp_path)
    for _ in range(2):
        with Life(LocalStorage(tmp_path), policy=moc()) as life:
            _, fault = come_back(life)
            assert_state(life, dict.fromkeys(versions_after([(1, set())]), 6))
            assert fault.lost_tokens == 0
    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        come_back(life)
        life.go(2, settle=True)
        assert held_steps(life) == [8], "step 6 is forgotten"
        assert find(life, 8).header.identity.generation == life.session.generation == 1
        assert life.session._snapshots.pipeline._pool.lent_bytes == life.session.tier.nbytes


def test_losses_are_as_counted_without_the_host_tier_once_it_is_released(tmp_path):
    train_and_fail(tmp_path)
    assert host_memory.release_host_memory("/elsewhere") == 0
    assert host_memory.release_host_memory(LocalStorage(tmp_path).root) > 0
    assert host_memory.release_host_memory() == 0
    stored = versions_after([(s, sequential(s - 1)) for s in range(1, 7)])
    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        restored, fault = come_back(life)
        assert restored.tokens_from_host is None
        assert_state(life, stored)
        assert fault.lost_tokens == ((6 - steps_of_experts(stored)) * life.counts).sum()


def test_a_run_that_ended_well_keeps_no_memory(tmp_path):
    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        life.go(3)
        life.finish(save_last=False)
    assert host_memory.release_host_memory() == 0


def test_a_run_whose_last_checkpoint_failed_keeps_it(tmp_path):
    storage = failing(tmp_path, None, persistent=True)
    with Life(storage, policy=moc()) as life:
        life.go(3, settle=True)
        storage.fail_at = 1
        with pytest.raises(SaveFailedError, match="injected"):
            life.finish()
    assert host_memory.release_host_memory() > 0


def test_what_another_run_left_is_freed_when_its_directory_is_used_anew(tmp_path):
    train_and_fail(tmp_path / "a")
    train_and_fail(tmp_path / "b")
    for path in sorted((tmp_path / "a").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with Life(LocalStorage(tmp_path / "a"), policy=Dense()):
        assert [kept.root for kept in host_memory._registry] == [str(tmp_path / "b")], "that of the other store"
    assert host_memory.release_host_memory(LocalStorage(tmp_path / "a").root) == 0


def test_an_older_checkpoint_takes_nothing_from_memory(tmp_path):
    """The newest is gone, so the run returns to step 5; memory has step 6, which no longer fits the rest."""
    train_and_fail(tmp_path)
    (tmp_path / "step_00000006" / "MANIFEST.json").unlink()
    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        restored, _ = come_back(life)
        assert (restored.manifest.step, restored.tokens_from_host) == (5, None)
        assert_state(life, versions_after([(s, sequential(s - 1)) for s in range(1, 6)]))


def test_memory_stands_for_files_that_storage_has_lost(tmp_path):
    train_and_fail(tmp_path)
    (tmp_path / "step_00000006" / "rank_00000_expert.safetensors").unlink()
    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        _, fault = come_back(life)
        assert_state(life, dict.fromkeys(versions_after([(1, set())]), 6))
        assert fault.lost_tokens == 0
        life.go(2, settle=True)
    newest = StoreReader(LocalStorage(tmp_path)).manifest("step_00000008_g1")
    assert {record.step for record in newest.operators.values()} == {8}, (
        "the commit found them gone: all is saved again"
    )


@pytest.mark.parametrize("key", ["model/layers.1.moe.w", "optim/0/layers.1.moe.w/exp_avg"])
def test_a_damaged_slice_sends_what_its_process_kept_back_to_storage(tmp_path, caplog, key):
    """One bit, in the weights or in the optimizer state of expert 2 of layer 1."""
    train_and_fail(tmp_path)
    stored = versions_after([(s, sequential(s - 1)) for s in range(1, 7)])
    assert stored["expert/1/2"] < 6
    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        [data] = [d for entry, d in slices_of(find(life, 6)) if (entry.key, entry.operator) == (key, "expert/1/2")]
        data[7] ^= 4
        restored, fault = come_back(life)
        assert_state(life, stored)
        assert fault.lost_tokens == ((6 - steps_of_experts(stored)) * life.counts).sum()
        assert restored.tokens_from_host is None
        life.go(2, settle=True)
    assert "is damaged" in caplog.text


def damage_expert(root, operator: str) -> None:
    """One bit of what storage holds of an expert, in every version that is there."""
    reader = StoreReader(LocalStorage(root))
    index = reader.index(reader.manifest(reader.directories()[0]))
    for group in index.tensors.values():
        for stored in group:
            if stored.entry.operator == operator:
                path = root / stored.path
                raw = bytearray(path.read_bytes())
                raw[stored.offset] ^= 1
                path.write_bytes(raw)


def test_what_memory_gives_is_not_read_from_storage(tmp_path):
    """An old version that is damaged there is no reason to go back, where memory has the newer one."""
    train_and_fail(tmp_path)
    stored = versions_after([(s, sequential(s - 1)) for s in range(1, 7)])
    assert stored["expert/1/2"] < 6
    damage_expert(tmp_path, "expert/1/2")
    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        restored, fault = come_back(life)
        assert restored.manifest.step == 6
        assert_state(life, dict.fromkeys(stored, 6))
        assert fault.lost_tokens == 0


def test_nothing_of_the_model_changes_before_all_of_the_plan_is_verified(tmp_path):
    """What storage gives of the newest step is damaged: neither memory's experts nor others are in the model then."""
    first = train_and_fail(tmp_path, policy=moc(2))
    stored = {op: record.step for op, record in manifests(tmp_path)[-1].operators.items()}
    held = first.session.run_ledger.newest.contents.memory_only
    assert held, "memory gives something"
    damage_expert(tmp_path, next(op for op, step in stored.items() if step < 6 and op not in held))
    for directory in tmp_path.glob("step_*"):
        if directory.name != "step_00000006":
            (directory / "MANIFEST.json").unlink(missing_ok=True)
    with Life(LocalStorage(tmp_path), policy=moc(2)) as life:
        before = {key: tensor.local.clone() for key, tensor in life.state.held.items()}
        with pytest.raises(NoCheckpointError):
            come_back(life, empty=False)
        assert all(torch.equal(tensor.local, before[key]) for key, tensor in life.state.held.items())


def test_no_state_is_dropped_or_made_while_another_rank_may_still_find_damage(tmp_path):
    train_and_fail(tmp_path)
    prepared = []

    class OtherFindsDamage(SoloCommunicator):
        """What another rank of two says: that it cannot verify what it needs."""

        world_size = 2
        asked = 0

        def agree(self, summed, largest):
            self.asked += 1
            return summed, np.maximum(largest, DAMAGED * self.world_size) if self.asked == 2 else largest

    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        life.state.prepare = prepared.append
        comm = OtherFindsDamage()
        found = Recovery(life.storage, StoreReader(life.storage), comm, life.state, None).attempt("step_00000006")
        assert isinstance(found, NotUsableError)
        assert (found.kind, found.rank, found.problem) == (DAMAGED, 1, None)
        assert comm.asked == 2, "opened, verified"
        assert prepared == []


def test_memory_of_another_checkpoint_by_the_same_name_is_not_used(tmp_path, caplog):
    train_and_fail(tmp_path)
    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        [held] = life.session.tier.holds()
        state = held.header.state.replace(b'"step":6', b'"step":7')
        assert state != held.header.state
        other = FoundSlot(held.slot, replace(held.header, state=state))
        life.session.tier.left_slots._slots = [other]
        restored, _ = come_back(life)
        assert restored.tokens_from_host is None
    assert "differs from storage" in caplog.text


class LostAnnouncement(SoloCommunicator):
    """The peer dies between the commit of step ``at`` and its announcement."""

    def __init__(self, at: int) -> None:
        self.left = at

    def announce(self, payload: bytes) -> bytes:
        self.left -= 1
        if not self.left:
            raise RuntimeError("connection closed by peer")
        return payload


def test_a_commit_that_nobody_heard_of_counts_if_storage_has_it(tmp_path):
    with Life(LocalStorage(tmp_path), policy=moc(), comm=LostAnnouncement(6)) as life:
        life.go(5, settle=True)
        life.go()
        with pytest.raises(RuntimeError, match="closed by peer"):
            life.settle()
    assert [m.step for m in manifests(tmp_path)][-1] == 6
    with Life(LocalStorage(tmp_path), policy=moc()) as life:
        assert held_steps(life) == [5, 6]
        come_back(life)
        assert_state(life, dict.fromkeys(versions_after([(1, set())]), 6))
        life.go(1, settle=True)
        assert held_steps(life) == [7]


# --- several ranks (threads here; tests/dist has processes) ---


def rows_of(rank: int, world: int, dim: int):
    """A change of ``TinyState``: tensors sharded along ``dim``, as far as they have it."""

    def change(tensors):
        found = []
        for tensor in tensors:
            if len(tensor.global_shape) <= dim:
                found.append(tensor)
                continue
            size = tensor.global_shape[dim]
            start, stop = size * rank // world, size * (rank + 1) // world
            offsets = tuple(start if d == dim else 0 for d in range(len(tensor.global_shape)))
            local = tensor.local.narrow(dim, start, stop - start)
            found.append(replace(tensor, local=local, offsets=offsets, replicated=False))
        return found

    return change


LAYOUTS = {
    "replicated": lambda rank, world: None,
    "rows": lambda rank, world: rows_of(rank, world, 0),
    "cols": lambda rank, world: rows_of(rank, world, 1),
}


def two_lives(root, before: str, after: str, *, ranks=(2, 2), survivors=None, comms=None, during=None):
    """Train on ``ranks[0]`` ranks, lose the memory of some, come back on ``ranks[1]``.

    Returns (life, restored, fault) of each.
    """

    def train(comm):
        train_and_fail(root, comm=comm, change=LAYOUTS[before](comm.rank, ranks[0]))

    run_threads(ThreadRanks(ranks[0]), train)
    survivors = range(ranks[0]) if survivors is None else survivors
    host_memory._registry[:] = [r for r in host_memory._registry if r.tier.rank in survivors]

    def return_(comm):
        comm = (comms or {}).get(comm.rank, lambda c: c)(comm)
        with Life(LocalStorage(root), policy=moc(), comm=comm) as life:
            if (change := LAYOUTS[after](comm.rank, ranks[1])) is not None:
                life.state.change = change
            found = (life, *come_back(life))
            versions = {op: r.step for op, r in (found[1].beneath or found[1].manifest).operators.items()}
            held = found[1].tokens_from_host
            if held is not None:
                versions |= {expert_id(*at): 6 for at in zip(*np.nonzero(held), strict=True)}
            assert_state(life, versions)
            if during is not None:
                during(life)
        return found

    return run_threads(ThreadRanks(ranks[1]), return_)


def overlaid(result) -> set[tuple[int, int]]:
    held = result[1].tokens_from_host
    return set() if held is None else {(int(a), int(b)) for a, b in zip(*np.nonzero(held), strict=True)}


def stale(result) -> set[tuple[int, int]]:
    stored = (result[1].beneath or result[1].manifest).operators
    return {(layer, e) for layer in range(2) for e in range(4) if stored[expert_id(layer, e)].step < 6}


@pytest.mark.parametrize("survivor", [0, 1])
def test_all_ranks_get_what_one_still_holds(tmp_path, survivor):
    """Under data parallelism: the survivor's experts at the newest version, the dead rank's from storage."""
    first, second = two_lives(tmp_path, "replicated", "replicated", survivors=[survivor])
    owned = {(layer, e) for layer in range(2) for e in range(4) if e // 2 == survivor}
    assert overlaid(first) == overlaid(second) == stale(first) & owned
    assert 0 < len(overlaid(first)) < len(stale(first))
    assert first[2] == second[2], "the books agree"
    assert first[2].lost_tokens > 0
    ours, theirs = (found[0].session.run_ledger.tokens.to_dict() for found in (first, second))
    assert ours == theirs


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("ranks", [(2, 2), (2, 3), (3, 1)])
def test_any_sharding_to_any_other(tmp_path, before, after, ranks):
    """All ranks of before survive, or as many of them as there are now."""
    results = two_lives(tmp_path, before, after, ranks=ranks, survivors=range(min(ranks)))
    if ranks[1] >= ranks[0]:
        assert overlaid(results[0]) == stale(results[0]) != set()
        assert results[0][2].lost_tokens == 0
    elif before == "cols":
        assert overlaid(results[0]) == set(), "a third of every expert is of no use"
    else:
        assert 0 < len(overlaid(results[0])) < len(stale(results[0]))
    assert len({tuple(sorted(overlaid(result))) for result in results}) == 1
    assert len({result[2] for result in results}) == 1


@pytest.mark.parametrize("layout", ["rows", "cols"])
def test_where_every_rank_holds_what_it_needs_no_rows_are_sent(tmp_path, layout):
    sent = []

    class Counting:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def swap(self, given, expected):
            sent.extend(tensor.numel() for group in (*given.values(), *expected.values()) for tensor in group)
            return self.inner.swap(given, expected)

    results = two_lives(tmp_path, layout, layout, comms={0: Counting})
    assert overlaid(results[0]) == stale(results[0])
    assert set(sent) == {4}, "step counts, which one rank saves for all"


def test_where_nothing_survived_the_ranks_only_agree_on_that(tmp_path):
    calls = []

    class Counting(SoloCommunicator):
        def everyone(self, payload):
            raise AssertionError("nobody has anything to tell of")

        def agree(self, summed, largest):
            calls.append(len(largest))
            return super().agree(summed, largest)

    train_and_fail(tmp_path)
    host_memory.release_host_memory()
    with Life(LocalStorage(tmp_path), policy=moc(), comm=Counting()) as life:
        come_back(life)
    assert calls == [5, 1, 2, 2, 2], (
        "what memory is like, anything is held, all opened the checkpoint, verified it and wrote it"
    )


class Flipping:
    """Delivers one wrong bit of each slice to this rank."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def swap(self, given, expected):
        self.inner.swap(given, expected)
        for received in (tensor for group in expected.values() for tensor in group):
            received[received.numel() - 1] ^= 1


def test_what_does_not_arrive_whole_on_one_rank_is_used_by_none(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        first, second = two_lives(tmp_path, "replicated", "replicated", survivors=[0], comms={0: Flipping, 1: Flipping})
    assert overlaid(first) == overlaid(second) == set()
    assert first[2] == second[2]
    assert "in memory cannot be used" in caplog.text


def test_after_such_a_return_training_goes_on_and_commits(tmp_path):
    def go_on(life):
        life.go(4, settle=True)

    with ExitStack() as stack:
        stack.callback(host_memory.release_host_memory)
        first, _ = two_lives(tmp_path, "replicated", "replicated", survivors=[1], during=go_on)
    found = manifests(tmp_path)
    assert [m.step for m in found][-4:] == [7, 8, 9, 10]
    assert found[-1].tokens["faults"][0][:2] == [6, first[2].lost_tokens]
