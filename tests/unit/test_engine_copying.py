"""Copies into the host buffer: right bytes for every layout, few calls, errors where they are waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from moe_ckpt.format.shard import TORCH_DTYPES, SliceEntry, dtype_name, lay_out
from moe_ckpt.slices import copying
from moe_ckpt.slices.copying import Copier, Copy, CopyProgram, run_copy_steps
from moe_ckpt.slices.cuts import Shelf, SliceSource
from tests.support.acted_gpu import RUBBISH, ActedGPU

MARK = 0xA5
GUARD = 64


def piece(key: str, source: torch.Tensor, row: int | None = None) -> SliceSource:
    """A whole tensor, or one row of it."""
    if row is not None:
        shape = tuple(source.shape)
        block = source.narrow(0, row, 1)
        offsets = (row, *[0] * (len(shape) - 1))
        entry = SliceEntry(key, "op", dtype_name(source.dtype), offsets, tuple(block.shape), shape)
        return SliceSource(entry, block, source)
    shape = tuple(source.shape)
    return SliceSource(SliceEntry(key, "op", dtype_name(source.dtype), (0,) * len(shape), shape, shape), source, source)


def bytes_of(source: torch.Tensor) -> bytes:
    flat = torch.empty(source.numel(), dtype=source.dtype).copy_(source.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def program_of(pieces: list[SliceSource], at_once: Collection[str] = ()) -> CopyProgram:
    of_name = {p.entry.name: p for p in pieces}
    laid = lay_out([p.entry for p in pieces])
    shelf, numbers = Shelf(), np.arange(len(laid))
    shelf.add("op", [of_name[entry.name] for entry in laid], {})
    for number, entry in enumerate(laid):
        assert bytes_of(shelf.source(number)) == bytes_of(of_name[entry.name].source)
    return CopyProgram(shelf, numbers, shelf.table(numbers), np.array([entry.begin for entry in laid]), at_once)


def copied(pieces: list[SliceSource], base: int = 0) -> tuple[dict[str, bytes], torch.Tensor]:
    """(name -> bytes copied for it, the whole buffer); ``base`` bytes before and 64 after are guarded."""
    laid = lay_out([p.entry for p in pieces])
    memory = torch.full((base + laid[-1].end + GUARD,), MARK, dtype=torch.uint8)
    inside = memory[base : base + laid[-1].end]
    run_copy_steps([(step, inside) for step in program_of(pieces).steps])
    raw = memory.numpy().tobytes()
    return {e.name: raw[base + e.begin : base + e.end] for e in laid}, memory


def check(pieces: list[SliceSource], base: int = 0) -> None:
    found, memory = copied(pieces, base)
    for p in pieces:
        assert found[p.entry.name] == bytes_of(p.source), p.entry.name
    assert (memory[:base] == MARK).all(), "written before the shard's place"
    assert (memory[-GUARD:] == MARK).all(), "written past the shard's end"


def random_bytes(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any dtype with random bits (NaN payloads and all)."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return (raw & 1).view(dtype).view(shape) if dtype == torch.bool else raw.view(dtype).view(shape)


@st.composite
def layouts(draw):
    """Pieces of random tensors: any dtype, 0-d to 3-d, transposed, strided, expanded, or cut into rows."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    pieces = []
    for number in range(draw(st.integers(1, 6))):
        dtype = TORCH_DTYPES[draw(st.sampled_from(sorted(TORCH_DTYPES)))]
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        key = f"model/p{number}"
        kind = draw(st.sampled_from(["whole", "transposed", "strided", "column", "rows", "some rows"]))
        if kind == "strided" and shape:
            source = random_bytes(generator, (2 * shape[0], *shape[1:]), dtype)[::2]
        elif kind == "column" and len(shape) > 1:
            source = random_bytes(generator, (*shape[:-1], shape[-1] + 3), dtype)[..., 1 : 1 + shape[-1]]
        else:
            source = random_bytes(generator, shape, dtype)
        if kind == "transposed" and len(shape) > 1:
            source = source.transpose(0, 1)
        if "rows" in kind and shape and shape[0]:
            rows = range(shape[0]) if kind == "rows" else draw(st.sets(st.integers(0, shape[0] - 1), min_size=1))
            pieces += [piece(key, source, row) for row in rows]
        else:
            pieces.append(piece(key, source))
    return draw(st.permutations(pieces))


@given(layouts(), st.sampled_from([0, 64, 192]))
def test_every_layout_and_dtype_arrives_bit_for_bit(pieces, base):
    check(pieces, base)


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_each_dtype_contiguous_and_not(name):
    generator = torch.Generator().manual_seed(1)
    source = random_bytes(generator, (6, 5), TORCH_DTYPES[name])
    check([piece("a", source), piece("b", source.t()), piece("c", source[:, 1:3]), piece("d", source[2, 3])])


def moves(pieces: list[SliceSource]) -> list[list[int]]:
    """Bytes of the sources of each call that copies ``pieces`` within host memory; the copy is checked, too."""
    check(pieces)
    return [[source.nbytes for source in step.sources] for step in program_of(pieces).steps]


def runs(pieces: list[SliceSource]) -> list[list[int]]:
    """Bytes of the sources of each call that copies ``pieces`` from a device; the copy itself is checked, too."""
    with ActedGPU() as gpu:
        for p in pieces:
            gpu.take(p.block)
        program = program_of(pieces)
        laid = lay_out([p.entry for p in pieces])
        memory = torch.empty(laid[-1].end, dtype=torch.uint8, pin_memory=True)
        copier = Copier()
        try:
            copier.start([(program, memory)]).join()
        finally:
            copier.close()
        torch.cuda.current_stream().synchronize()
        steps = program.steps
    raw, of_name = memory.numpy().tobytes(), {p.entry.name: p for p in pieces}
    for entry in laid:
        assert raw[entry.begin : entry.end] == bytes_of(of_name[entry.name].source), entry.name
    return [[source.nbytes for source in step.sources] for step in steps]


def test_adjacent_rows_go_as_one():
    stack = torch.randn(32, 5, 4)
    for calls in (moves, runs):
        assert calls([piece("w", stack, row) for row in range(32)]) == [[stack.nbytes]]
        assert calls([piece("w", stack, row) for row in (15, 13, 14, 10, 12, 11, 17, 16)]) == [[8 * 80]]
        assert calls([piece("w", stack, row) for row in (*range(9), 10, *range(12, 20))]) == [[720, 80, 640]]


def test_few_small_neighbours_are_gathered_one_by_one():
    """To make a tensor of them would take longer. A few large ones are moved by one call."""
    stack, large = torch.randn(32, 5, 4), torch.randn(4, 1 << 14)
    for calls in (moves, runs):
        assert calls([piece("w", stack, row) for row in (*range(7), *range(8, 16))]) == [[80] * 7 + [640]]
        assert calls([piece("w", large, row) for row in range(3)]) == [[3 << 16]]


def test_tensors_of_one_allocation_go_as_one():
    """As views into a flat buffer (DDP's, or a fused optimizer's) lie."""
    parts = torch.randn(80).split(10)
    for calls in (moves, runs):
        assert calls([piece(name, part) for name, part in zip("abcdefgh", parts, strict=True)]) == [[320]]
        # The file's order is not the memory's order here: nothing may be joined.
        assert calls([piece(name, part) for name, part in zip("hgfedcba", parts, strict=True)]) == [[40] * 8]


def test_a_run_is_not_joined_across_a_strided_neighbour():
    stack = torch.randn(16, 6)
    strided = torch.randn(6, 4).t()
    named = [("a" if row < 8 else "c") + str(row % 8) for row in range(16)]
    pieces = [piece("b", strided), *[piece(name, row) for name, row in zip(named, stack, strict=True)]]
    assert moves(pieces) == runs(pieces) == [[192], [96], [192]]


@pytest.mark.parametrize(("calls", "nbytes"), [(moves, 1 << 17), (runs, 1 << 20)], ids=["CPU", "device"])
def test_large_tensors_go_one_by_one_and_small_ones_many_at_once(calls, nbytes):
    """From a device what is small is larger: to begin a transfer takes long."""
    small = [piece(f"a{at:03}", torch.randn(5)) for at in range(300)]
    large = [piece(f"b{at}", torch.randn(nbytes // 4)) for at in range(3)]
    assert calls([*small, *large]) == [[20] * 300, *[[nbytes]] * 3]
    mixed = [piece("a", torch.randn(5)), piece("b", torch.randn(nbytes // 4)), piece("c", torch.randn(5))]
    assert calls(mixed) == [[20], [nbytes], [20]]


@pytest.mark.parametrize("rows", [1, 3, 1 << 9])
def test_small_runs_of_any_size_arrive(rows):
    """Every second row, of sizes about those at which the way of moving them changes."""
    for size in (1, 2, (1 << 12) - 1, 1 << 12, (1 << 16) - 1, 1 << 16, (1 << 16) + 8):
        stack = torch.randint(0, 256, (2 * min(rows, 8 << 20 // size), size), dtype=torch.uint8)
        check([piece("w", stack, row) for row in range(0, len(stack), 2)])


def test_calls_do_not_grow_with_the_number_of_small_tensors():
    def calls(count: int) -> int:
        return len(program_of([piece(f"w{at}", torch.randn(4)) for at in range(count)]).steps)

    assert calls(100) == calls(5000) == 1
    assert calls(20_000) == 3, "no call gathers more than torch does on one core"


def test_no_call_gathers_more_than_torch_does_on_one_core():
    pieces = [piece(f"w{at}", torch.randn(400)) for at in range(200)]
    assert len(moves(pieces)) == 3
    assert len(runs(pieces)) == 1, "nor more than four MiB on a device"
    assert len(runs([piece(f"w{at:02}", torch.randn(60_000)) for at in range(40)])) == 3


def test_what_a_device_copies_at_once_is_there_when_the_copy_is(copier):
    """Buffers on the device beside parameters that are not: the copy waits for both, and training for neither."""
    with ActedGPU() as gpu:
        buffer, still = gpu.take(torch.arange(4.0)), torch.ones(4)
        laid = lay_out([piece("buffer", buffer).entry, piece("still", still).entry])
        memory = torch.empty(laid[-1].end, dtype=torch.uint8, pin_memory=True)
        assert copying.copy_here([(laid[0], buffer)], memory)
        buffer.fill_(9.0)
        copy = copier.start([(program_of([piece("still", still)]), memory[16:])], on_device=True)
        copy.join()
        assert (memory[:16] == RUBBISH).all(), "still on its way, and nobody has waited"
        with ThreadPoolExecutor(1) as persist:
            persist.submit(copy.wait_on_host).result()
        assert gpu.waits == []
    assert memory.view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.float32])
def test_a_single_element_may_have_any_stride(dtype):
    check([piece("column", torch.arange(4).to(dtype)[::2][1:])], 0)


def test_a_rank_that_writes_nothing_copies_nothing():
    assert program_of([]).steps == ()
    assert program_of([piece("still", torch.ones(4))], at_once=["still"]).steps == ()


@pytest.mark.parametrize("count", [5, 1 << 15])
def test_tensors_that_require_a_gradient_arrive(count):
    check([piece(name, torch.randn(count, requires_grad=True)) for name in "ab"])


def test_a_matrix_on_a_device_is_copied_at_once_in_its_shape():
    with ActedGPU() as gpu:
        matrix = gpu.take(torch.arange(6).view(2, 3))
        program = program_of([piece("matrix", matrix)], at_once=["matrix"])
        memory = torch.empty(48, dtype=torch.uint8, pin_memory=True)
        assert copying.copy_here(program.at_once, memory)
        torch.cuda.current_stream().synchronize()
    assert memory.view(torch.int64).tolist() == [0, 1, 2, 3, 4, 5]


def test_tensors_copied_at_once_are_left_out_and_not_watched():
    moving, still = torch.zeros(4), torch.ones(4)
    pieces = [piece("a", still), piece("moving", moving), piece("z", still.clone())]
    program = program_of(pieces, at_once=["moving"])
    memory = torch.full((48,), MARK, dtype=torch.uint8)
    copying.copy_here(program.at_once, memory)
    moving.fill_(7)
    run_copy_steps([(step, memory) for step in program.steps])
    assert memory.view(torch.float32).tolist() == [1.0] * 4 + [0.0] * 4 + [1.0] * 4
    assert sorted(program.changed_since(program.versions() - 1)) == ["a", "z"]


def test_a_tensor_that_changes_while_it_is_copied_is_named(copier):
    stack, other = torch.randn(8, 4), torch.randn(4)
    reached = threading.Event()
    slow = Copier(lambda _: reached.wait(120) and None)
    try:
        copy, _ = start(slow, [*(piece("stack", stack, row) for row in (0, 2, 5)), piece("other", other)])
        stack[7] += 1  # a row that is not even copied: nobody knows which rows a writer touched
        reached.set()
        copy.join()
        assert copy.changed == ("stack",)
    finally:
        reached.set()
        slow.close()


def test_scalars_of_different_tensors_stay_apart(monkeypatch):
    steps = [torch.tensor(float(i)) for i in range(5)]
    found, _ = copied([piece(f"s{i}", s) for i, s in enumerate(steps)])
    assert [torch.frombuffer(bytearray(raw), dtype=torch.float32).item() for raw in found.values()] == [0, 1, 2, 3, 4]


# --- the thread ---


@pytest.fixture
def copier():
    made = Copier()
    yield made
    made.close()


def start(copier: Copier, pieces: list[SliceSource]) -> tuple[Copy, torch.Tensor]:
    laid = lay_out([p.entry for p in pieces])
    memory = torch.zeros(laid[-1].end, dtype=torch.uint8)
    return copier.start([(program_of(pieces), memory)]), memory


def test_after_the_join_sources_may_change(copier):
    source = torch.randn(1000, 300)
    before = source.clone()
    copy, memory = start(copier, [piece("w", source, row) for row in range(1000)])
    copy.join()
    assert copy.issued.done()
    source.zero_()
    assert torch.equal(memory.view(torch.float32).view(1000, 300), before)
    copy.join()
    copy.wait_on_host()


def test_start_returns_before_the_copy_is_done():
    release, reached = threading.Event(), []

    def on_phase(phase):
        reached.append(phase)
        assert release.wait(120)

    slow = Copier(on_phase)
    try:
        source = torch.randn(4, 4)
        copy, memory = start(slow, [piece("w", source, row) for row in range(4)])
        assert not copy.issued.done()
        release.set()
        copy.join()
        assert reached == ["copy"]
        assert torch.equal(memory.view(torch.float32).view(4, 4), source)
    finally:
        release.set()
        slow.close()


def test_an_error_of_the_thread_surfaces_at_every_wait_and_the_next_copy_works():
    failures = [OSError("the copy broke")]

    def on_phase(phase):
        if failures:
            raise failures.pop()

    breaking = Copier(on_phase)
    try:
        copy, _ = start(breaking, [piece("w", torch.randn(3))])
        with pytest.raises(OSError, match="the copy broke"):
            copy.join()
        with pytest.raises(OSError, match="the copy broke"):
            copy.wait_on_host()
        source = torch.randn(3)
        copy, memory = start(breaking, [piece("w", source)])
        copy.join()
        assert torch.equal(memory.view(torch.float32), source)
    finally:
        breaking.close()


def test_the_first_piece_is_there_before_the_rest_is_copied():
    pieces = [piece(f"model/{at}", torch.full((2000,), float(at))) for at in range(8)]
    program, halted, goes_on = program_of(pieces), threading.Event(), threading.Event()
    memory = torch.zeros(program.nbytes, dtype=torch.uint8)

    def halt(phase: str) -> None:
        halted.set()
        goes_on.wait(30.0)

    copier = Copier(halt)
    try:
        with mock.patch.object(copying, "_GATHERED", 2000):
            copy = copier.start([(program, memory)])
            assert halted.wait(30.0)
        assert not copy.issued.done()
        copy.wait_for(0, 4 * 8000)
        assert memory.view(torch.float32)[:8000].view(4, 2000)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert not memory[4 * 8000 :].any()
        with ThreadPoolExecutor(1) as waiting:
            rest = waiting.submit(copy.wait_for, 0, program.nbytes)
            with pytest.raises(TimeoutError):
                rest.result(0.1)
            goes_on.set()
            rest.result(30.0)
        assert memory.view(torch.float32)[-1] == 7.0
    finally:
        goes_on.set()
        copier.close()


def test_whoever_waits_for_a_piece_gets_the_error_of_the_copy():
    def broken(phase: str) -> None:
        raise OSError("broken on purpose")

    program = program_of([piece(f"model/{at}", torch.ones(20000)) for at in range(2)])
    copier = Copier(broken)
    try:
        copy = copier.start([(program, torch.zeros(program.nbytes, dtype=torch.uint8))])
        with pytest.raises(OSError, match="on purpose"):
            copy.wait_for(0, program.nbytes)
    finally:
        copier.close()


def test_pieces_leave_a_device_by_events_of_their_own():
    with ActedGPU() as gpu:
        pieces = [piece(f"model/{at}", gpu.take(torch.full((400_000,), float(at)))) for at in range(4)]
        program = program_of(pieces)
        memory = torch.empty(program.nbytes, dtype=torch.uint8, pin_memory=True)
        copier = Copier()
        copier._pool.submit(TorchFunctionMode.__enter__, gpu).result()  # the copying thread sees the device, too
        try:
            copy = copier.start([(program, memory)])
            copy.join()
            copy.wait_for(0, 1_600_000)
            there = memory.view(torch.float32).view(4, 400_000)
            assert there[0].eq(0.0).all()
            assert (memory[-1_600_000:] == RUBBISH).all(), "nobody has waited for the rest"
            copy.wait_for(0, program.nbytes)
            assert there[3].eq(3.0).all()
        finally:
            copier.close()


def test_a_device_times_its_copies_by_itself_however_late_somebody_looks():
    source = torch.randn(1 << 10)
    with ActedGPU() as gpu:
        gpu.take(source)
        memory = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True)
        with closing(Copier()) as copier:
            copy = copier.start([(program_of([piece("w", source)]), memory)])
            copy.join()
            time.sleep(0.5)
            copy.wait_on_host()
    assert copy.moving_secs < 0.4 < copy.secs


def test_a_device_that_others_have_filled_is_copied_all_the_same(caplog):
    """Small tensors one by one, what is strided or converted by way of the host. It is said once."""
    copying.warn_device_is_full.cache_clear()
    many = [torch.randn(300, 100) for _ in range(6)]
    strided = [torch.randn(40, 30).t(), torch.randn(50, 8)[:, 3:5], torch.randn(9, 2)[:, 1]]
    pieces = [piece(f"model/{at}", source) for at, source in enumerate([*many, *strided])]
    expected = {source.entry.name: bytes_of(source.source) for source in pieces}
    converted = torch.randn(7)
    with ActedGPU() as gpu, closing(Copier()) as copier:
        for source in pieces:
            gpu.take(source.block)
        gpu.take(converted)
        program, laid = program_of(pieces), lay_out([p.entry for p in pieces])
        memory = torch.empty(laid[-1].end, dtype=torch.uint8, pin_memory=True)
        copier._pool.submit(TorchFunctionMode.__enter__, gpu).result()  # the copying thread sees the device, too
        for gpu.is_full in (True, True, False):
            memory.fill_(MARK)
            copy = copier.start([(program, memory)])
            copy.join()
            copy.wait_on_host()
            raw = memory.numpy().tobytes()
            assert {entry.name: raw[entry.begin : entry.end] for entry in laid} == expected
        gpu.is_full = True
        half = torch.zeros(14, dtype=torch.uint8)
        copying.transfer(converted, half, torch.bfloat16, (7,))
    assert torch.equal(half.view(torch.bfloat16), converted.bfloat16())
    assert caplog.text.count("no memory left") == 1
