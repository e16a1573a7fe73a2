"""A plan that is joined from what is known of its operators is the plan that is made from scratch, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.step import Contents, WindowPlace
from moe_ckpt.core.window import Window
from moe_ckpt.errors import CoverageError
from moe_ckpt.format.shard import (
    REPLAY,
    TORCH_DTYPES,
    ShardHeader,
    SliceEntry,
    dtype_name,
    encode_header,
    lay_out,
    seal_of,
)
from moe_ckpt.ledger.coverage import PRIME, cover_sum
from moe_ckpt.modeling.training_state import specs_of
from moe_ckpt.ports import StateTensor
from moe_ckpt.slices import local_state
from moe_ckpt.slices.assignment import Sharder
from moe_ckpt.slices.checksums import checksums_of
from moe_ckpt.slices.compiling import HOST_ONLY, CompiledPart, CompiledPlan, PlanCompiler
from moe_ckpt.slices.copying import run_copy_steps, slice_view
from moe_ckpt.slices.cuts import Cuts, Shelf, SliceSource, sorted_rows
from moe_ckpt.slices.local_state import LocalState
from tests.support.replicas import with_checksums
from tests.unit.builders import catalog, entries_of, is_replay, operators_of, pieces_of

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]


def values_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 120, shape, generator=generator).to(dtype)


def state_of(model: Catalog, number: int) -> dict[str, tuple[str, torch.Tensor]]:
    """Key -> (parameter, whole tensor): weights, a moment, row factors and a step count each, of various types."""
    found = {}
    for name, shape in model.parameters.items():
        for key, whole in (
            (f"model/{name}", shape),
            (f"optim/0/{name}/exp_avg", shape),
            (f"optim/0/{name}/row", shape[:-1]),
            (f"optim/0/{name}/step", ()),
        ):
            number += 1
            found[key] = (name, values_of(whole, TYPES[number * number % len(TYPES)], number))
    return found


def blocks_of(key: str, parameter: str, whole: torch.Tensor, cuts: Sequence[int], rank: int, ranks: int) -> list:
    """This rank's blocks of a tensor that is cut at rows ``cuts`` and dealt out in turn, as FSDP2 pads or Megatron
    lays out flat ranges: several blocks of one tensor, some of them empty."""
    bounds = [0, *sorted(cuts), whole.shape[0]]
    return [
        StateTensor(
            key,
            parameter,
            whole[start:stop],
            (start, *[0] * (whole.dim() - 1)),
            tuple(whole.shape),
            replicated=False,
        )
        for at, (start, stop) in enumerate(pairwise(bounds))
        if at % ranks == rank and stop > start
    ]


@st.composite
def worlds(draw):
    """(catalog, ranks, rank, whole tensors, this rank's tensors)."""
    model = catalog(draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 5, 12])), stacked=draw(st.booleans()))
    ranks = draw(st.integers(1, 3))
    rank = draw(st.integers(0, ranks - 1))
    wholes = state_of(model, draw(st.integers(0, 50)))
    tensors: list[StateTensor] = []
    for key, (parameter, whole) in wholes.items():
        if whole.dim() and whole.shape[0] and draw(st.booleans()):
            cuts = draw(st.lists(st.integers(0, whole.shape[0]), max_size=4))
            tensors += blocks_of(key, parameter, whole, cuts, rank, ranks)
        else:
            transposed = whole.t().contiguous().t() if whole.dim() == 2 and draw(st.booleans()) else whole
            tensors.append(StateTensor(key, parameter, transposed, (0,) * whole.dim(), tuple(whole.shape)))
    return model, ranks, rank, wholes, tensors


@st.composite
def contents_of(draw, model: Catalog):
    """Of any operators: a plain checkpoint, or a slot of a window with weights in types of their own."""
    order = draw(st.permutations(model.everything))
    first, second = sorted(draw(st.tuples(st.integers(0, len(order)), st.integers(0, len(order)))))
    operators, others = tuple(order[:first]), tuple(order[first:second])
    in_window = draw(st.booleans())
    window = WindowPlace(1, 2, 0) if in_window and operators and others else None
    return Contents(operators, () if window else others, others if window else (), window=window)


def sides(count: int) -> list[SliceEntry]:
    names = [("b", "U8"), ("a", "I64"), ("c", "F32")]
    return [SliceEntry(f"side/0/{n}", "", t, (0,), (at,), (at,)) for at, (n, t) in enumerate(names[:count])]


def compiler_of(world) -> PlanCompiler:
    model, ranks, rank, _, _ = world
    return PlanCompiler(model, everywhere(model.layers, ranks), rank, ranks)


def copied(plan: CompiledPlan) -> torch.Tensor:
    memory = torch.zeros(plan.nbytes, dtype=torch.uint8)
    moves = [(step, memory[base : base + part.nbytes]) for base, part in plan.parts for step in part.copies.steps]
    run_copy_steps(moves)
    return memory


def rendered(part: CompiledPart, memory: torch.Tensor, rank: int) -> bytes:
    return part.head("run", rank, 7) + seal_of(7, 2, checksums_of(part, memory))


@given(st.data())
def test_a_joined_plan_is_one_made_from_scratch(data):
    """Made after any others by one compiler, and by one that knows nothing."""
    world = data.draw(worlds())
    model, _, rank, wholes, tensors = world
    specs, used = specs_of(tensors), compiler_of(world)
    types = [dict.fromkeys(model.parameters, dtype) for dtype in ("BF16", "F64")]
    for number in range(data.draw(st.integers(1, 4))):
        contents, compute_types = data.draw(contents_of(model)), types[number // 2]
        side = sides(data.draw(st.integers(0, 3)) if number % 2 else 2)
        joined = used.compile(contents, tensors, specs, side, compute_types=compute_types)
        fresh = compiler_of(world).compile(contents, tensors, specs, side, compute_types=compute_types)
        assert [(base, part.kind) for base, part in joined.parts] == [(base, part.kind) for base, part in fresh.parts]
        memory = copied(joined)
        assert torch.equal(memory, copied(fresh))
        assert joined.cover_difference == fresh.cover_difference
        for (base, part), (_, other) in zip(joined.parts, fresh.parts, strict=True):
            bytes_of = memory[base : base + part.nbytes]
            assert rendered(part, bytes_of, rank) == rendered(other, bytes_of, rank)
            assert operators_of(part) == operators_of(other)
            check_by_hand(part, bytes_of, rank, wholes)


def check_by_hand(part: CompiledPart, memory: torch.Tensor, rank: int, wholes) -> None:
    """Against the format's own functions, which know nothing of cuts, and against the whole tensors."""
    entries = entries_of(part)
    bare = [replace(entry, begin=0, end=0) for entry in entries]
    assert lay_out(list(reversed(bare))) == entries
    assert [entries[at] for at in part.side] == part.side_entries() if part.kind == "non_expert" else not part.side
    checksums = checksums_of(part, memory)
    header = ShardHeader("run", 7, 2, rank, with_checksums(entries, checksums))
    assert rendered(part, memory, rank) == encode_header(header)
    assert part.nbytes == sum(entry.nbytes for entry in entries)
    boxes = [(entry.key, entry.box) for entry in entries if entry.operator]
    assert sorted(part.boxes, key=repr) == sorted(boxes, key=repr)
    assert part.cover_sum == cover_sum(boxes)
    assert set(operators_of(part)) == {e.operator for e in entries if e.operator and not e.key.startswith(REPLAY)}
    assert part.frozen_nbytes == sum(e.nbytes for e in entries if e.key.startswith(f"{REPLAY}model/"))
    for entry in entries:
        if entry.operator:
            expected = wholes[entry.key.removeprefix(REPLAY)][1]
            for dim, (start, length) in enumerate(zip(entry.offsets, entry.shape, strict=True)):
                expected = expected.narrow(dim, start, length)
            assert torch.equal(slice_view(entry, memory), expected.to(TORCH_DTYPES[entry.dtype])), entry.name


@given(st.data())
def test_the_joined_shares_of_all_ranks_tile_the_plan(data):
    """Each rank joins its own; stacked and listed, shared by rows."""
    model = catalog(2, data.draw(st.integers(1, 4)), stacked=data.draw(st.booleans()))
    ranks = data.draw(st.integers(1, 3))
    wholes = state_of(model, 3)
    tensors = [StateTensor(key, name, x, (0,) * x.dim(), tuple(x.shape)) for key, (name, x) in wholes.items()]
    compilers = [PlanCompiler(model, everywhere(model.layers, ranks), rank, ranks) for rank in range(ranks)]
    specs = specs_of(tensors)
    for _ in range(3):
        contents = data.draw(contents_of(model))
        plans = [each.compile(contents, tensors, specs, ()) for each in compilers]
        assert sum(plan.cover_difference for plan in plans) % PRIME == 0
        written = [entry for plan in plans for _, part in plan.parts if part.is_written for entry in entries_of(part)]
        held = sum(prod(spec.global_shape) for spec in specs)
        assert sum(prod(e.shape) for e in written if not e.key.startswith(REPLAY)) <= held


def test_what_is_known_of_an_operator_is_not_worked_out_again():
    """So what a new plan costs does not grow with its slices."""
    model = catalog(2, 6)
    tensors = [StateTensor(key, n, x, (0,) * x.dim(), tuple(x.shape)) for key, (n, x) in state_of(model, 1).items()]
    compiler, specs = PlanCompiler(model, everywhere(model.layers, 1), 0, 1), specs_of(tensors)
    window = Window(1, (model.everything[:5], model.everything[5:]))
    plain = Contents(model.everything)
    slot = replace(plain, full=window.slots[0], compute=window.slots[1], window=WindowPlace(1, 2, 0))
    compiler.compile(plain, tensors, specs, ())
    compiler.compile(slot, tensors, specs, ())
    known = {id(cut) for plan in compiler._plans.values() for _, part in plan.parts for cut in part.cuts}
    for start in range(1, len(model.everything) - 5):
        chosen = model.everything[start : start + 5]
        for contents in (replace(plain, full=chosen), replace(slot, full=chosen[:2], compute=chosen[2:])):
            plan = compiler.compile(contents, tensors, specs, ())
            cuts = [cut for _, part in plan.parts for cut in part.cuts]
            light = {cut.operator for cut in cuts if is_replay(cut)}
            assert all(id(cut) in known or cut.operator in light for cut in cuts)
            known |= {id(cut) for cut in cuts}


def test_what_was_described_for_one_plan_alone_is_forgotten(monkeypatch):
    """Peers share in operators by rows, differently at each step: what they write of these is not remembered."""
    monkeypatch.setattr(local_state, "_REMEMBERED", 32)
    model = catalog(2, 6)
    tensors = [StateTensor(key, n, x, (0,) * x.dim(), tuple(x.shape)) for key, (n, x) in state_of(model, 1).items()]
    specs = specs_of(tensors)
    make = lambda: PlanCompiler(model, everywhere(model.layers, 2), 0, 2)  # noqa: E731
    used, shelves, sizes = make(), set(), []
    for step in range(40):
        chosen = tuple(op for at, op in enumerate(model.everything) if (at + step) % 3)
        contents = Contents(chosen)
        side = [SliceEntry(f"side/0/{step}", "", "U8", (0,), (3,), (3,))]
        plan, fresh = used.compile(contents, tensors, specs, side), make().compile(contents, tensors, specs, side)
        memory = copied(plan)
        assert torch.equal(memory, copied(fresh))
        for (base, part), (_, other) in zip(plan.parts, fresh.parts, strict=True):
            bytes_of = memory[base : base + part.nbytes]
            assert rendered(part, bytes_of, 0) == rendered(other, bytes_of, 0)
        shelves.add(id(used._local._shelf))
        sizes.append(len(used._local._shelf.entries))
    assert len(shelves) > 1
    assert max(sizes) < 4 * max(sizes[:3])


@pytest.mark.parametrize("other", [torch.float32, torch.int64])
def test_a_slice_that_is_given_twice_is_refused_when_its_header_is_made(other):
    """Also if the two have different types, and so lie apart."""
    twice = []
    for source in (torch.zeros(2, 3), torch.ones(2, 3, dtype=other)):
        entry = SliceEntry("model/w", "gate/0", dtype_name(source.dtype), (1, 0), (2, 3), (4, 3))
        twice.append(SliceSource(entry, source, source))
    shelf = Shelf()
    part = CompiledPart("expert", Cuts(shelf, np.array([shelf.add("gate/0", twice, {"model/w": 0})])), (), ())
    with pytest.raises(CoverageError, match="what rank 1 writes at step 7: model/w@1,0 is written twice"):
        part.head("run", 1, 7)


def test_experts_the_rest_and_what_stays_in_memory_go_to_different_parts():
    model = catalog(1, 4)
    tensors = [StateTensor(key, n, x, (0,) * x.dim(), tuple(x.shape)) for key, (n, x) in state_of(model, 1).items()]
    stored, held = model.everything[:-2], model.everything[-2:]
    contents = Contents(stored, held)
    compiler = PlanCompiler(model, everywhere(model.layers, 1), 0, 1)
    plan = compiler.compile(contents, tensors, specs_of(tensors), sides(2))
    assert {part.kind: (operators_of(part), len(part.side)) for _, part in plan.parts} == {
        "expert": (("expert/0/0", "expert/0/1"), 0),
        "non_expert": (("gate/0", "non_expert/embed"), 2),
        HOST_ONLY: (("expert/0/2", "expert/0/3"), 0),
    }


def test_state_without_rows_is_repeated_once_per_slot():
    """A stack's step count belongs to its gate; a slot that anchors an expert, but not the gate, needs it too."""
    model = catalog(1, 4)
    tensors = [StateTensor(key, n, x, (0,) * x.dim(), tuple(x.shape)) for key, (n, x) in state_of(model, 1).items()]
    local = LocalState(model, tensors)
    dealt = Sharder(model, everywhere(model.layers, 1), tensors).assign({"expert/0/1"}, {"expert/0/2"}, {})
    found = [local.replay_cuts({"expert/0/1"}, {"expert/0/2"}, dealt, 0, {}).listed() for _ in range(2)]
    keys = [sorted(entry.key for cut in cuts for entry in cut.entries) for cuts in found]
    assert keys[0] == keys[1] == ["replay/model/layers.0.moe.w", "replay/optim/0/layers.0.moe.w/step"]
    assert found[0][1] is found[1][1]
    assert all(p.entry.operator == "expert/0/1" for p in pieces_of(local, {"expert/0/1"}, dealt, 0))


@given(st.sets(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**62 - 1)), max_size=20), st.integers(0, 62))
def test_rows_are_sorted_however_large_a_tensor_is(rows, fewer):
    """One number holds both columns only where places are small."""
    rows = {(order, place >> fewer) for order, place in rows}
    table = np.array([[*row, 0, 0, 0, 0, 0] for row in rows], dtype=np.int64).reshape(-1, 7)
    assert [tuple(row) for row in table[sorted_rows(table)][:, :2].tolist()] == sorted(rows)
