"""The whole model out of what ranks say they hold: who has what, who writes it, and what cannot be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.operators import expert_id, gate_id, non_expert_id
from moe_ckpt.errors import ConfigError, CoverageError, UnsupportedError
from moe_ckpt.megatron.world import HeldTensor, Holding, World, merge, natural_sort_key

SHAPE = (4, 2)
WHOLE = ((0, 0), SHAPE)


def held(name, owner, blocks=(WHOLE,), shape=SHAPE, dtype="F32", trained=True, master=None) -> HeldTensor:
    return HeldTensor(name, dtype, shape, owner, trained, master, tuple(blocks))


def expert(layer: int, number: int, **changes) -> HeldTensor:
    moe = f"decoder.layers.{layer}.mlp"
    return held(f"{moe}.experts.{number}.linear_fc1.weight", (moe, number), **changes)


def router(layer: int) -> HeldTensor:
    moe = f"decoder.layers.{layer}.mlp"
    return held(f"{moe}.router.weight", (moe, None))


def embedding() -> HeldTensor:
    return held("embedding.word_embeddings.weight", (None, "embedding.word_embeddings"))


def attention(layer: int) -> HeldTensor:
    return held(f"decoder.layers.{layer}.self_attention.linear_qkv.weight", (None, f"decoder.layers.{layer}.attention"))


def holding(stage: int, expert_rank: int, experts, layers, total: int = 4, more=()) -> Holding:
    tensors = [expert(layer, e) for layer in layers for e in experts]
    tensors += [part(layer) for layer in layers for part in (router, attention)]
    moe = tuple((f"decoder.layers.{layer}.mlp", total, 2) for layer in layers)
    return Holding(stage, moe, (*tensors, *more), expert_rank)


def world_of(*kinds) -> World:
    return merge(kinds)


def two_by_two() -> World:
    """PP2 x EP2 on four ranks: layers 0 and 1, then 9 and 10; a tied embedding at both ends."""
    return world_of(
        ((0,), holding(0, 0, (0, 1), (0, 1), more=(embedding(),))),
        ((1,), holding(0, 1, (2, 3), (0, 1), more=(embedding(),))),
        ((2,), holding(1, 0, (0, 1), (9, 10), more=(embedding(),))),
        ((3,), holding(1, 1, (2, 3), (9, 10), more=(embedding(),))),
    )


def copies(ranks: int, experts: int = 4) -> World:
    """EP2 x DP(ranks / 2): even ranks hold the first half of the experts."""
    half = experts // 2
    return world_of(
        (tuple(range(0, ranks, 2)), holding(0, 0, range(half), (0,), experts, (embedding(),))),
        (tuple(range(1, ranks, 2)), holding(0, 1, range(half, experts), (0,), experts, (embedding(),))),
    )


def test_layers_count_by_number_and_not_by_letter():
    catalog = two_by_two().catalog
    assert [layer.name.split(".")[2] for layer in catalog.layers] == ["0", "1", "9", "10"]
    assert [layer.index for layer in catalog.layers] == [0, 1, 2, 3]
    assert [op.id for op in catalog.operators if op.layer == 3] == [expert_id(3, e) for e in range(4)] + [gate_id(3)]
    assert non_expert_id("decoder.layers.10.attention") in catalog.by_id


@pytest.mark.parametrize(
    ("first", "second"), [("a.9.b", "a.10.b"), ("a.b", "a.b.c"), ("w2", "w10"), ("a.1.x", "a.1.y"), ("1", "a")]
)
def test_natural_order(first, second):
    assert sorted([second, first], key=natural_sort_key) == [first, second]


def test_what_goes_round_comes_back():
    own = holding(1, 3, (2, 3), (5,), more=(held("norm", (None, "x"), [((), ())], (), "BF16", False, "F32"),))
    assert Holding.decode(own.encode()) == own


def test_holders_are_all_ranks_of_a_kind():
    world = copies(4)
    assert world.holders_of("embedding.word_embeddings.weight") == (0, 1, 2, 3)
    assert world.holders_of(expert(0, 3).name) == (1, 3)


@pytest.mark.parametrize(("experts", "ranks"), [(4, 4), (8, 4), (8, 8), (12, 4), (4, 8)])
def test_copies_of_experts_share_the_writing_evenly(experts, ranks):
    world = copies(ranks, experts)
    writers = [world.expert_writer(expert(0, e).name, WHOLE) for e in range(experts)]
    assert all(writer in world.holders_of(expert(0, e).name) for e, writer in enumerate(writers))
    load = Counter(writers)
    assert max(load.values()) == max(1, experts // ranks)
    assert len(load) == min(experts, ranks)


def test_all_tensors_of_an_expert_have_one_writer():
    first = holding(0, 0, (0, 1), (0,), 2)
    second = [replace(t, name=t.name.replace("fc1", "fc2")) for t in first.tensors if "fc1" in t.name]
    world = world_of(((0, 1), replace(first, tensors=(*first.tensors, *second))))
    for e in (0, 1):
        of = {world.expert_writer(name, WHOLE) for name in world.tensors if f"experts.{e}." in name}
        assert of == {e}


def test_blocks_of_expert_tensor_parallelism_have_writers_of_their_own():
    halves = [((0, 0), (2, 2)), ((2, 0), (2, 2))]
    kinds = []
    for rank, half in enumerate(halves):
        kinds.append(((rank,), Holding(0, (("decoder.layers.0.mlp", 1, 1),), (expert(0, 0, blocks=(half,)),))))
    world = world_of(*kinds)
    assert world.catalog.parameters[expert(0, 0).name] == SHAPE
    assert [world.expert_writer(expert(0, 0).name, half) for half in halves] == [0, 1]
    placement = world.placement((0,), experts_apart=True)
    assert placement.owners == ((0,),), "the first of several that write parts"
    assert placement.expert_ranks == 2


def test_what_a_distributed_optimizer_divides_has_one_owner_for_all_that_hold_it():
    """EP2 x DP4: four ranks hold each expert. Each of them writes a range of it, or one of them all of it."""
    world = copies(8)
    divided = world.placement(range(8), experts_apart=False)
    assert (divided.owners, divided.expert_ranks) == (((0, 0, 1, 1),), 4)
    apart = world.placement(range(8), experts_apart=True)
    assert (apart.owners, apart.expert_ranks) == (((0, 4, 1, 5),), 1)


def test_placement_of_stages():
    placement = two_by_two().placement((2,), experts_apart=True)
    assert placement.owners == ((0, 0, 1, 1), (0, 0, 1, 1), (2, 2, 3, 3), (2, 2, 3, 3))
    assert (placement.peers, placement.stages, placement.experts_apart) == ((2,), (2, 2), True)
    assert placement.stage_of[expert_id(0, 0)] == placement.stage_of[gate_id(1)] == 0
    assert placement.stage_of[expert_id(3, 1)] == placement.stage_of[non_expert_id("decoder.layers.9.attention")] == 1
    assert placement.stage_of[non_expert_id("embedding.word_embeddings")] == 0, "the first of its holders"


def test_ranks_that_disagree_on_a_tensor_are_told_its_name():
    right = holding(0, 0, (0, 1), (0,), more=(embedding(),))
    for change in (
        {"shape": (5, 2), "blocks": (((0, 0), (5, 2)),)},
        {"dtype": "BF16"},
        {"trained": False},
        {"master": "F32"},
        {"owner": (None, "another")},
    ):
        wrong = replace(right, tensors=(*right.tensors[:-1], replace(embedding(), **change)))
        with pytest.raises(ConfigError, match=r"tensor embedding\.word_embeddings\.weight.* on rank 2.*same model"):
            world_of(((0, 1), right), ((2,), wrong))


def test_ranks_that_disagree_on_a_layer_are_told_its_name():
    with pytest.raises(ConfigError, match=r"MoE layer decoder\.layers\.0\.mlp.* on rank 1"):
        world_of(((0,), holding(0, 0, (0, 1), (0,), 4)), ((1,), holding(0, 1, (2, 3), (0,), 8)))


def test_an_expert_on_no_rank():
    world = world_of(((0,), holding(0, 0, (0, 1), (0,))), ((1,), holding(0, 1, (2,), (0,))))
    with pytest.raises(CoverageError, match=r"expert 3 of decoder\.layers\.0\.mlp is on no rank"):
        world.catalog  # noqa: B018


def test_an_expert_on_two_expert_parallel_ranks():
    world = world_of(((0, 2), holding(0, 0, (0, 1), (0,))), ((1, 3), holding(0, 1, (1, 2, 3), (0,))))
    told = r"expert 1 of decoder\.layers\.0\.mlp is on several expert-parallel ranks \(global ranks 0, 1, 2, 3\)"
    with pytest.raises(CoverageError, match=told):
        world.catalog  # noqa: B018


def test_layers_of_two_stages_under_one_number():
    world = world_of(((0,), holding(0, 0, range(4), (0,))), ((1,), holding(1, 0, range(4), (0,))))
    told = r"layers\.0\.self_attention\.linear_qkv\.weight is on several pipeline stages"
    with pytest.raises(CoverageError, match=told):
        world.catalog  # noqa: B018


def test_names_of_experts_that_two_ranks_swapped_cannot_be_told():
    """Names are all that is known: consistently wrong ones are a model of other names, and come back to their ranks."""
    world = world_of(((0,), holding(0, 0, (2, 3), (0,))), ((1,), holding(0, 1, (0, 1), (0,))))
    assert len(world.catalog.experts) == 4


@given(cut=st.integers(1, 3), data=st.data())
def test_a_block_that_is_missing_or_doubled(cut, data):
    top, bottom = ((0, 0), (cut, 2)), ((cut, 0), (4 - cut, 2))
    wrong = data.draw(st.sampled_from([(top,), (bottom,), (top, WHOLE), (bottom, WHOLE)]))
    moe = (("decoder.layers.0.mlp", 1, 1),)
    right = world_of(((0,), Holding(0, moe, (expert(0, 0, blocks=(top, bottom)),))))
    assert right.catalog.parameters[expert(0, 0).name] == SHAPE
    world = world_of(((0,), Holding(0, moe, (expert(0, 0, blocks=wrong),))))
    with pytest.raises(CoverageError, match=r"experts\.0\.linear_fc1\.weight: ranks hold \d+ of 8 elements"):
        world.catalog  # noqa: B018


def test_ranks_on_which_nothing_is_trained():
    whole, other = holding(0, 0, range(4), (0,)), holding(1, 0, range(4), (1,))
    idle = Holding.decode(replace(other, updates=False).encode())
    world_of(((0,), whole), ((1,), other)).require_updates()
    world_of(((0,), replace(whole, updates=False)), ((1, 2), idle)).require_updates()
    with pytest.raises(UnsupportedError, match=r"updates nothing on ranks 1, 2: .* each pipeline stage trainable"):
        world_of(((0,), whole), ((1, 2), idle)).require_updates()
