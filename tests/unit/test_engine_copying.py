"""Copies into the host buffer: right bytes for every layout, few calls, errors where they are waited for."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.engine import copying
from moe_ckpt.engine.copying import Copier, copy_on_cpu, place
from moe_ckpt.engine.pieces import Piece
from moe_ckpt.format.dtypes import TORCH_DTYPES, dtype_name
from moe_ckpt.format.shard import SliceEntry, lay_out

MARK = 0xA5
GUARD = 64


def piece(key: str, source: torch.Tensor, row: int | None = None) -> Piece:
    """A whole tensor, or one row of it."""
    if row is not None:
        shape = tuple(source.shape)
        block = source.narrow(0, row, 1)
        offsets = (row, *[0] * (len(shape) - 1))
        return Piece(SliceEntry(key, "op", dtype_name(source.dtype), offsets, tuple(block.shape), shape), block)
    shape = tuple(source.shape)
    return Piece(SliceEntry(key, "op", dtype_name(source.dtype), (0,) * len(shape), shape, shape), source)


def bytes_of(source: torch.Tensor) -> bytes:
    flat = torch.empty(source.numel(), dtype=source.dtype).copy_(source.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def copied(pieces: list[Piece], base: int = 0) -> tuple[dict[str, bytes], torch.Tensor]:
    """(name -> bytes copied for it, the whole buffer); ``base`` bytes before and 64 after are guarded."""
    laid = lay_out([p.entry for p in pieces])
    memory = torch.full((base + laid[-1].end + GUARD,), MARK, dtype=torch.uint8)
    copy_on_cpu(place(pieces, laid, base), memory)
    raw = memory.numpy().tobytes()
    return {e.name: raw[base + e.begin : base + e.end] for e in laid}, memory


def check(pieces: list[Piece], base: int = 0) -> None:
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


def moves(monkeypatch, pieces: list[Piece]) -> list[int]:
    """Sizes of the ``memmove`` calls that copy ``pieces``; the copy itself is checked, too."""
    sizes = []

    def memmove(target, source, nbytes):
        sizes.append(nbytes)
        return ctypes.memmove(target, source, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(copying, "ctypes", type("Counted", (), {"memmove": staticmethod(memmove)}))
        check(pieces)
    return sizes


def test_adjacent_rows_go_as_one(monkeypatch):
    stack = torch.randn(8, 5, 4)
    assert moves(monkeypatch, [piece("w", stack, row) for row in range(8)]) == [stack.nbytes]
    assert moves(monkeypatch, [piece("w", stack, row) for row in (5, 3, 4)]) == [3 * 80]
    assert moves(monkeypatch, [piece("w", stack, row) for row in (0, 1, 4, 6, 7)]) == [160, 80, 160]


def test_tensors_of_one_allocation_go_as_one(monkeypatch):
    """As views into a flat buffer (DDP's, or a fused optimizer's) lie."""
    flat = torch.randn(60)
    assert moves(monkeypatch, [piece("a", flat[:20]), piece("b", flat[20:30]), piece("c", flat[30:])]) == [240]
    # The file's order is not the memory's order here: nothing may be joined.
    assert moves(monkeypatch, [piece("b", flat[:20]), piece("a", flat[20:30])]) == [40, 80]


def test_a_run_is_not_joined_across_a_strided_neighbour(monkeypatch):
    stack = torch.randn(4, 6)
    strided = torch.randn(6, 4).t()
    pieces = [piece("a", stack[0]), piece("b", strided), piece("c", stack[1]), piece("d", stack[2])]
    assert moves(monkeypatch, pieces) == [24, 48]


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


def start(copier: Copier, pieces: list[Piece]) -> tuple[copying.Copy, torch.Tensor]:
    laid = lay_out([p.entry for p in pieces])
    memory = torch.zeros(laid[-1].end, dtype=torch.uint8)
    return copier.start(place(pieces, laid, 0), memory), memory


def test_after_the_join_sources_may_change(copier):
    source = torch.randn(1000, 300)
    before = source.clone()
    copy, memory = start(copier, [piece("w", source, row) for row in range(1000)])
    copy.join()
    assert copy.done
    source.zero_()
    assert torch.equal(memory.view(torch.float32).view(1000, 300), before)
    copy.join()
    copy.wait_on_host()


def test_start_returns_before_the_copy_is_done():
    release, reached = threading.Event(), []

    def on_phase(phase):
        reached.append(phase)
        assert release.wait(20)

    slow = Copier(on_phase)
    try:
        source = torch.randn(4, 4)
        copy, memory = start(slow, [piece("w", source, row) for row in range(4)])
        assert not copy.done
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
