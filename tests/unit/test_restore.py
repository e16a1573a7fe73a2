"""Writing checkpoints back into live state: any sharding to any other, and never half."""

from __future__ import annotations

import itertools
import traceback

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.errors import ConfigError, CoverageError, DamagedError, MoECheckpointError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.format.shard import TORCH_DTYPES
from moe_ckpt.ports import TensorMeta
from moe_ckpt.reading import restore as restoring
from moe_ckpt.reading import slices
from moe_ckpt.reading.collective import STOPS, NotUsableError, raise_on_all_ranks
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.restore import require_fitting
from moe_ckpt.reading.slices import find_damage
from moe_ckpt.recovery.executing import StorageSource
from moe_ckpt.storage import LocalStorage
from tests.support.acted_gpu import ActedGPU
from tests.support.store_builder import PARAMETERS, STACK, LiveState, TinyRun, example


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """(sharded, writers) -> run."""
    found = {}
    for sharded in (False, True):
        for writers in (1, 2, 3):
            found[sharded, writers] = example(tmp_path_factory.mktemp("store"), sharded=sharded, world_size=writers)
    return found


def restore(reader: StoreReader, manifest: Manifest, state: LiveState) -> None:
    require_fitting(reader, manifest, state, None)
    try:
        StorageSource(reader, manifest, state).load(SoloCommunicator())
    except NotUsableError as error:
        raise error.problem or error from None


def assert_restored(state: LiveState, view: dict[str, torch.Tensor]) -> None:
    assert {t.key for t in state.tensors()} == set(view)
    for tensor in state.tensors():
        wanted = state.expected(view, tensor.key)
        assert tensor.local.dtype == wanted.dtype
        assert torch.equal(tensor.local.detach(), wanted), tensor.key


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_sharding_from_any_sharding(stores, data):
    run = stores[data.draw(st.booleans()), data.draw(st.sampled_from((1, 2, 3)))]
    ranks = data.draw(st.integers(1, 5))
    rank = data.draw(st.integers(0, ranks - 1))
    state = LiveState(rank, ranks, data.draw(st.sampled_from((0, -1, 1))))
    directory = data.draw(st.sampled_from(sorted(run.views)))
    reader = StoreReader(LocalStorage(run.root))
    restore(reader, reader.manifest(directory), state)
    assert_restored(state, run.views[directory])


def test_neighbours_in_a_file_are_verified_by_one_read_and_damage_is_named(tmp_path, monkeypatch):
    example(tmp_path, world_size=1)
    reader = StoreReader(LocalStorage(tmp_path))
    manifest = reader.manifest("step_00000003")
    slices = sorted(
        {stored for group in reader.index(manifest).tensors.values() for stored in group},
        key=lambda stored: (stored.path, stored.offset),
    )
    gaps = sum(
        (one.path, one.offset + one.nbytes) != (other.path, other.offset) for one, other in itertools.pairwise(slices)
    )
    plain, reads = LocalStorage.read, []
    monkeypatch.setattr(LocalStorage, "read", lambda self, *args: reads.append(args) or plain(self, *args))
    assert [error for _, error in find_damage(reader.storage, slices)] == [None] * len(slices)
    assert len(reads) == gaps + 1 < len(slices) / 2
    bad = slices[len(slices) // 2]
    raw = bytearray((tmp_path / bad.path).read_bytes())
    raw[bad.offset] ^= 1
    (tmp_path / bad.path).write_bytes(raw)
    found = dict(find_damage(reader.storage, slices))
    assert [stored for stored, error in found.items() if error is not None] == [bad]
    assert "checksum mismatch" in str(found[bad])


@pytest.mark.parametrize("piece", [slices.RUN_NBYTES, 40], ids=["whole", "by rows"])
@pytest.mark.parametrize("refusals", [0, 10**6], ids=["page-locked", "refused"])
def test_bytes_reach_a_gpu_from_page_locked_memory_while_there_is_some(stores, monkeypatch, piece, refusals):
    """Also where a slice is larger than what is staged at once. CUDA is acted."""
    run = stores[False, 1]
    directory = max(run.views)
    reader, state = StoreReader(LocalStorage(run.root)), LiveState(1, 2)
    manifest = reader.manifest(directory)
    source = StorageSource(reader, manifest, state)
    for module in (restoring, slices):
        monkeypatch.setattr(module, "RUN_NBYTES", piece)
    source.verify()
    source.prepare()
    with ActedGPU() as gpu:
        gpu.refusals = refusals
        for tensor in state.tensors():
            gpu.take(tensor.local)
        StorageSource(reader, manifest, _Prepared(state)).prepare_and_write()
        nbytes = sum(tensor.local.numel() * tensor.local.element_size() for tensor in state.tensors())
        assert sum(size for size, _ in gpu.arrivals) == nbytes
        assert {is_locked for _, is_locked in gpu.arrivals} == {not refusals}
        assert piece > 40 or max(size for size, _ in gpu.arrivals) <= 64, "one row, at least"
    assert_restored(state, run.views[directory])


class _Prepared:
    """The same state, whose optimizer has been prepared already."""

    def __init__(self, state: LiveState) -> None:
        self.tensors, self.specs = state.tensors, state.specs

    def prepare(self, metas: object) -> None:
        pass


STRIDED = {
    "whole": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, 1),
    "columns": lambda tensor: tensor[:, 1:3],
    "a column of a transposed one": lambda tensor: tensor.permute(2, 0, 1)[..., 1],
    "every other one": lambda tensor: tensor[::2, ::2],
    "one": lambda tensor: tensor[1, 2, 3],
}


@pytest.mark.parametrize("kind", STRIDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_reach_a_gpu_that_another_process_has_filled(kind, dtype):
    """It has no room to lay out or convert what comes, so each piece of its memory is written by itself."""
    memory = torch.full((4, 5, 6), -1.0)
    expected = memory.clone()
    values = torch.rand_like(STRIDED[kind](memory)).to(dtype)
    STRIDED[kind](expected).copy_(values)
    with ActedGPU() as gpu:
        gpu.take(memory)
        gpu.is_full = True
        restoring._copy(STRIDED[kind](memory), values, non_blocking=False)
    assert torch.equal(memory, expected)


def test_nothing_of_a_damaged_run_of_slices_is_used(tmp_path, monkeypatch):
    """Other runs may be: they are read at the same time. What is written to is known to torch as changed."""
    example(tmp_path, world_size=1)
    reader, state = StoreReader(LocalStorage(tmp_path)), LiveState()
    manifest = reader.manifest("step_00000003")
    monkeypatch.setattr(slices, "RUN_NBYTES", 100)
    StorageSource(reader, manifest, state).prepare()
    targets = restoring.targets_of(reader.index(manifest).tensors, state.tensors())
    bad = max(targets, key=lambda stored: (stored.path, stored.offset))
    raw = bytearray((tmp_path / bad.path).read_bytes())
    raw[bad.offset] ^= 1
    (tmp_path / bad.path).write_bytes(raw)
    versions = [tensor.local._version for tensor in state.tensors()]
    with pytest.raises(DamagedError, match="checksum mismatch"):
        restoring.write_targets(reader, targets)
    for tensor, common in targets[bad]:
        assert bool((slices.block(tensor.local.detach(), tensor.offsets, common) == LiveState.MARK).all())
    assert [tensor.local._version for tensor in state.tensors()] != versions


def test_damage_in_any_slice_leaves_the_model_untouched(tmp_path):
    example(tmp_path, world_size=1)
    reader = StoreReader(LocalStorage(tmp_path))
    manifest = reader.manifest("step_00000003")
    slices = [stored for group in reader.index(manifest).tensors.values() for stored in group]
    assert {stored.file.step for stored in slices} == {1, 2, 3}
    for stored in slices:
        raw = bytearray((tmp_path / stored.path).read_bytes())
        at = stored.offset + stored.nbytes - 1
        raw[at] ^= 4
        (tmp_path / stored.path).write_bytes(raw)
        state = LiveState()
        with pytest.raises(DamagedError, match="checksum mismatch") as caught:
            restore(reader, manifest, state)
        assert (caught.value.path, caught.value.step, caught.value.rank) == (stored.path, stored.file.step, 0)
        assert stored.entry.name in str(caught.value)
        assert state.untouched()
        raw[at] ^= 4
        (tmp_path / stored.path).write_bytes(raw)


def test_damage_elsewhere_does_not_stop_a_rank_that_does_not_need_it(tmp_path):
    run = example(tmp_path, world_size=2, sharded=True)
    path = "step_00000003/rank_00001_expert.safetensors"
    raw = bytearray((tmp_path / path).read_bytes())
    raw[-1] ^= 1
    (tmp_path / path).write_bytes(raw)
    reader = StoreReader(LocalStorage(tmp_path))
    manifest = reader.manifest("step_00000003")
    state = LiveState(0, 2)
    restore(reader, manifest, state)
    assert_restored(state, run.views["step_00000003"])
    other = LiveState(1, 2)
    with pytest.raises(DamagedError):
        restore(reader, manifest, other)
    assert other.untouched()


def test_damage_in_any_slice_is_found_before_anything_is_written(tmp_path):
    example(tmp_path, world_size=1)
    reader = StoreReader(LocalStorage(tmp_path))
    manifest = reader.manifest("step_00000003")
    source = StorageSource(reader, manifest, LiveState())
    for stored in [stored for group in reader.index(manifest).tensors.values() for stored in group]:
        raw = bytearray((tmp_path / stored.path).read_bytes())
        raw[stored.offset] ^= 1
        (tmp_path / stored.path).write_bytes(raw)
        with pytest.raises(DamagedError, match="checksum mismatch"):
            source.verify()
        raw[stored.offset] ^= 1
        (tmp_path / stored.path).write_bytes(raw)
    source.verify()


def test_bytes_that_break_between_the_passes_are_still_not_copied(tmp_path):
    example(tmp_path, world_size=1)

    class Decaying(LocalStorage):
        reads = 0
        limit = 10**9

        def read(self, path, offset=0, nbytes=None):
            raw = super().read(path, offset, nbytes)
            if path.endswith(".safetensors") and offset:
                Decaying.reads += 1
                if Decaying.reads > Decaying.limit:
                    raw[0] ^= 1
            return raw

    reader = StoreReader(Decaying(tmp_path))
    manifest = reader.manifest("step_00000003")
    reader.prove(manifest)
    Decaying.reads = 0
    restore(reader, manifest, LiveState())
    Decaying.limit = Decaying.reads - 1
    Decaying.reads = 0
    with pytest.raises(DamagedError):
        restore(reader, manifest, LiveState())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda p: p | {"extra.weight": ((2,), torch.float32)}, CoverageError, "model/extra.weight of the model"),
        (lambda p: {k: v for k, v in p.items() if k != "scale"}, CoverageError, "model/scale of the checkpoint"),
        (lambda p: p | {STACK: ((8, 3, 2), torch.float32)}, CoverageError, r"\[8, 3, 2\] in the model, \[4, 3, 2\]"),
        (lambda p: p | {"scale": ((), torch.bfloat16)}, ConfigError, "bfloat16 in the model, but F32.*precision"),
    ],
)
def test_another_model_is_refused_untouched(tmp_path, change, error, message):
    example(tmp_path)
    reader = StoreReader(LocalStorage(tmp_path))
    state = LiveState(parameters=change(PARAMETERS))
    with pytest.raises(error, match=message):
        restore(reader, reader.manifest("step_00000003"), state)
    assert state.untouched()


def test_an_incomplete_checkpoint_is_refused_untouched(tmp_path):
    run = TinyRun(tmp_path)
    run.builder.listed = lambda step, operators: operators - {"gate/0"}
    run.save(1)
    run.save(2, experts=())
    reader = StoreReader(LocalStorage(tmp_path))
    state = LiveState()
    with pytest.raises(CoverageError, match="gate"):
        restore(reader, reader.manifest("step_00000002"), state)
    assert state.untouched()


def test_prepare_is_told_every_optimizer_tensor_and_no_parameter(tmp_path):
    run = example(tmp_path)
    told: dict[str, TensorMeta] = {}

    class Listening(LiveState):
        def prepare(self, wanted):
            told.update(wanted)
            super().prepare(wanted)

    reader = StoreReader(LocalStorage(tmp_path))
    restore(reader, reader.manifest("step_00000003"), Listening())
    view = run.views["step_00000003"]
    assert set(told) == {key for key in view if key.startswith("optim/")}
    for key, meta in told.items():
        assert (TORCH_DTYPES[meta.dtype], meta.global_shape) == (view[key].dtype, tuple(view[key].shape))
        assert meta.on_param_device == (not key.endswith("/step"))


@pytest.mark.parametrize("own", [True, False])
def test_an_error_shows_nothing_of_how_ranks_agree_on_it(own):
    problem = ConfigError("two settings contradict each other")
    problem.__cause__ = OSError("why")

    class Comm(SoloCommunicator):
        def broadcast(self, payload, source=0):
            return str(problem).encode()

    def fail():
        try:
            raise NotUsableError(STOPS, 0 if own else 1, problem if own else None)
        except NotUsableError as error:
            raise_on_all_ranks(Comm(), error, "step_00000003")

    with pytest.raises(MoECheckpointError, match="two settings contradict each other") as raised:
        fail()
    shown = "".join(traceback.format_exception(raised.value))
    assert "NotUsableError" not in shown
    assert ("OSError: why" in shown) == own
