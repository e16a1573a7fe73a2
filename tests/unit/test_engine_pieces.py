"""Who writes what: the ranks' shares tile the plan exactly, whatever the model and its sharding."""

from __future__ import annotations

from collections import Counter
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import everywhere
from moe_ckpt.errors import CoverageError
from moe_ckpt.format.shard import lay_out
from moe_ckpt.ledger.coverage import Box, prove_cover
from moe_ckpt.modeling.training_state import specs_of
from moe_ckpt.ports import StateTensor
from moe_ckpt.slices.assignment import Sharder
from moe_ckpt.slices.claims import Claims
from moe_ckpt.slices.local_state import LocalState
from tests.unit.builders import catalog, pieces_of


def state_shapes(model: Catalog) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Key -> (parameter, global shape): weights, a moment, row and column factors, and a step count each."""
    found = {}
    for name, shape in model.parameters.items():
        found[f"model/{name}"] = (name, shape)
        found[f"optim/0/{name}/exp_avg"] = (name, shape)
        found[f"optim/0/{name}/row"] = (name, shape[:-1])
        found[f"optim/0/{name}/col"] = (name, (*shape[:-2], shape[-1]))
        found[f"optim/0/{name}/step"] = (name, ())
    return found


def whole(shape: tuple[int, ...], key: str) -> torch.Tensor:
    """Values that tell every element of every tensor apart."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) + 1000 * (crc32(key.encode()) % 1000)).view(shape)


def on_ranks(model: Catalog, ranks: int, sharded: dict[str, list[int]], duplicated: frozenset[str]) -> list[list]:
    """Every rank's state tensors.

    sharded: key -> first rows of the ranks' blocks along dim 0 (a rank may have none); other keys are
    replicated. duplicated: sharded keys held by two ranks each, as under HSDP: the upper half repeats the lower.
    """
    found: list[list[StateTensor]] = [[] for _ in range(ranks)]
    for key, (parameter, shape) in state_shapes(model).items():
        values = whole(shape, key)
        for rank in range(ranks):
            if key not in sharded or not shape:
                found[rank].append(StateTensor(key, parameter, values, (0,) * len(shape), shape))
                continue
            copies = key in duplicated and ranks % 2 == 0
            part = rank % (ranks // 2) if copies else rank
            starts = [*sharded[key], shape[0]]
            local = values[starts[part] : starts[part + 1]]
            offsets = (starts[part], *[0] * (len(shape) - 1))
            found[rank].append(
                StateTensor(key, parameter, local, offsets, shape, replicated=False, duplicate=copies and part != rank)
            )
    return found


@st.composite
def worlds(draw):
    """(catalog, ranks, tensors of every rank, a choice of operators)."""
    model = catalog(draw(st.integers(1, 3)), draw(st.integers(1, 6)), stacked=draw(st.booleans()))
    ranks = draw(st.integers(1, 5))
    sharded: dict[str, list[int]] = {}
    duplicated = set()
    for key, (_, shape) in state_shapes(model).items():
        if not shape or not draw(st.booleans()):
            continue
        copies = ranks % 2 == 0 and draw(st.booleans())
        parts = ranks // 2 if copies else ranks
        cuts = draw(st.lists(st.integers(0, shape[0]), min_size=parts - 1, max_size=parts - 1))
        sharded[key] = [0, *sorted(cuts)]
        if copies:
            duplicated.add(key)
    ids = [op.id for op in model.operators]
    chosen = frozenset(draw(st.sets(st.sampled_from(ids))))
    return model, ranks, on_ranks(model, ranks, sharded, frozenset(duplicated)), chosen


def wanted_boxes(model, chosen, specs):
    return Claims(model, specs, 0, 1).boxes(chosen, (), in_window=False)


def shares(model, ranks, tensors, chosen):
    """Every rank's pieces, dealt out by each rank for itself, as in a real run."""
    where = everywhere(model.layers, ranks)
    dealt = [Sharder(model, where, tensors[rank]).assign(chosen) for rank in range(ranks)]
    return [pieces_of(LocalState(model, tensors[rank]), chosen, dealt[rank], rank) for rank in range(ranks)]


@given(worlds())
def test_the_shares_of_all_ranks_tile_the_plan(world):
    model, ranks, tensors, chosen = world
    pieces = [p for share in shares(model, ranks, tensors, chosen) for p in share]
    found = [(p.entry.key, p.entry.box) for p in pieces]
    for rank in range(ranks):  # the claim is the same whoever makes it
        prove_cover("all shares", wanted_boxes(model, chosen, specs_of(tensors[rank])), found)
    assert max(Counter(found).values(), default=1) == 1
    assert {p.entry.operator for p in pieces} == chosen


@given(worlds())
def test_each_piece_is_a_view_of_its_place(world):
    model, ranks, tensors, chosen = world
    for rank, share in enumerate(shares(model, ranks, tensors, chosen)):
        memory = {t.key: t.local.untyped_storage().data_ptr() for t in tensors[rank]}
        for p in share:
            shape = state_shapes(model)[p.entry.key][1]
            expected = whole(shape, p.entry.key)
            for dim, (start, length) in enumerate(zip(p.entry.offsets, p.entry.shape, strict=True)):
                expected = expected.narrow(dim, start, length)
            assert torch.equal(p.source, expected)
            assert p.source.untyped_storage().data_ptr() == memory[p.entry.key], "copied, not viewed"
            assert p.entry.global_shape == shape


@given(worlds())
def test_all_operators_together_hold_every_element(world):
    """The plan's claim itself is whole: no state is left out by every operator."""
    model, ranks, tensors, _ = world
    everything = frozenset(model.by_id)
    wanted = wanted_boxes(model, everything, specs_of(tensors[0]))
    full = {key: [Box((0,) * len(shape), shape)] for key, (_, shape) in state_shapes(model).items()}
    prove_cover("claim", full, [(key, box) for key, boxes in wanted.items() for box in boxes])
    found = [p.entry for share in shares(model, ranks, tensors, everything) for p in share]
    elements = sum(torch.Size(shape).numel() for _, shape in state_shapes(model).values())
    assert sum(e.box.volume for e in found) == elements


@given(worlds())
def test_names_in_one_shard_are_unique(world):
    model, ranks, tensors, chosen = world
    for share in shares(model, ranks, tensors, chosen):
        names = [entry.name for entry in lay_out([p.entry for p in share])]
        assert len(names) == len(set(names))


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 6))
def test_every_expert_has_one_owner_and_they_come_in_blocks(layers, experts, ranks):
    model = catalog(layers, experts)
    owner = everywhere(model.layers, ranks).owner_of
    assert owner.keys() == {op.id for op in model.experts}
    assert set(owner.values()) <= set(range(ranks))
    for layer in range(layers):
        blocks = [owner[f"expert/{layer}/{e}"] for e in range(experts)]
        assert blocks == sorted(blocks)
        per_rank = Counter(blocks)
        assert max(per_rank.values()) <= -(-experts // ranks)


@pytest.fixture
def two_ranks():
    model = catalog(2, 4)
    return model, on_ranks(model, 2, {}, frozenset())


def test_an_expert_of_a_stack_is_its_rows(two_ranks):
    model, tensors = two_ranks
    first, second = shares(model, 2, tensors, frozenset({"expert/1/3"}))
    assert first == []
    expected = [
        ("model/layers.1.moe.w", (3, 0, 0), (1, 4, 3)),
        ("optim/0/layers.1.moe.w/exp_avg", (3, 0, 0), (1, 4, 3)),
        ("optim/0/layers.1.moe.w/row", (3, 0), (1, 4)),
        ("optim/0/layers.1.moe.w/col", (3, 0), (1, 3)),
    ]
    assert [(p.entry.key, p.entry.offsets, p.entry.shape) for p in second] == expected
    assert {p.entry.operator for p in second} == {"expert/1/3"}


def test_state_that_cannot_be_split_goes_with_the_gate(two_ranks):
    """The step count of a stack is one number for all experts: every checkpoint must save it anew."""
    model, tensors = two_ranks
    pieces = [p for share in shares(model, 2, tensors, frozenset({"gate/0"})) for p in share]
    keys = {p.entry.key for p in pieces}
    assert "optim/0/layers.0.moe.w/step" in keys
    assert not any(key.startswith("model/layers.0.moe.w") for key in keys)
    wanted = wanted_boxes(model, frozenset({"gate/0"}), specs_of(tensors[0]))
    assert wanted["optim/0/layers.0.moe.w/step"] == [Box((), ())]


def test_unstacked_experts_keep_their_own_step():
    model = catalog(1, 3, stacked=False)
    pieces = shares(model, 1, on_ranks(model, 1, {}, frozenset()), {"expert/0/1"})[0]
    name = "layers.0.moe.experts.1.w"
    states = {f"optim/0/{name}/{state}" for state in ("exp_avg", "row", "col", "step")}
    assert {p.entry.key for p in pieces} == {f"model/{name}"} | states


def test_a_missing_or_doubled_share_is_seen(two_ranks):
    """The tiling test above can fail: one rank's share less, or twice, is no cover."""
    model, tensors = two_ranks
    chosen = frozenset(model.by_id)
    first, second = [[(p.entry.key, p.entry.box) for p in s] for s in shares(model, 2, tensors, chosen)]
    wanted = wanted_boxes(model, chosen, specs_of(tensors[0]))
    prove_cover("both", wanted, first + second)
    with pytest.raises(CoverageError, match="are missing"):
        prove_cover("one", wanted, first)
    with pytest.raises(CoverageError, match="written twice"):
        prove_cover("three", wanted, first + second + second[:1])


def test_empty_parameters_are_neither_wanted_nor_written():
    model = catalog(1, 2)
    tensor = StateTensor("optim/0/embed.weight/none", "embed.weight", torch.empty(7, 0), (0, 0), (7, 0))
    assert shares(model, 1, [[tensor]], frozenset(model.by_id)) == [[]]
    assert wanted_boxes(model, frozenset(model.by_id), specs_of([tensor])) == {}
