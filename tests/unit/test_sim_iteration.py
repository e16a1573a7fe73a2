"""Iteration time: the pipeline's known answers, each cost by hand, and what must grow with what."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.cluster.cluster import Cluster, ClusterLayout, Parallel
from moe_ckpt_sim.workload.iteration import Timing, breakdown, estimate, heaviest_chunk, pipeline_slots
from moe_ckpt_sim.workload.model import ModelSpec, Precision
from moe_ckpt_sim.workload.training import Batch

SPEC = ModelSpec("m", layers=8, hidden=64, experts=16, top_k=2, expert_ffn=128, vocab=1000, seq=128, bias=False)
MODEL = SPEC.build()
CLUSTER = Cluster(
    "c", nodes=256, flops_per_sec=1e12, mfu=0.5, nvlink_bytes_per_sec=1e11, nic_bytes_per_sec=8e9, alpha_secs=1e-6
)
FREE = replace(CLUSTER, nvlink_bytes_per_sec=1e30, nic_bytes_per_sec=1e30, alpha_secs=0.0)
"""Links that cost nothing."""
FP16 = Precision()


def bubble_fraction(stages, micro_batches, chunks=1):
    """Portion of the pipeline's time in which a stage is idle."""
    return 1 - micro_batches / pipeline_slots(stages, micro_batches, chunks)


def cost(batch=64, micro=1, cluster=CLUSTER, model=MODEL, precision=FP16, timing=None, **parallel):
    return breakdown(
        ClusterLayout(model, cluster, Parallel(**parallel)), Batch(batch, micro), precision, timing or Timing()
    )


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks", "slots"),
    [(4, 8, 1, 11), (1, 8, 1, 8), (3, 4, 1, 6), (12, 16, 1, 27), (4, 8, 2, 9.5), (4, 8, 3, 9), (64, 60, 1, 123)],
)
def test_known_pipelines(stages, micro_batches, chunks, slots):
    assert pipeline_slots(stages, micro_batches, chunks) == slots
    assert bubble_fraction(stages, micro_batches, chunks) == pytest.approx((slots - micro_batches) / slots)


def test_bubbles_of_the_textbook():
    assert bubble_fraction(4, 8) == pytest.approx(3 / 11)
    assert bubble_fraction(1, 8) == 0


def test_interleaved_stages_need_a_multiple_of_micro_batches():
    with pytest.raises(ConfigError, match=r"pp=4, vpp=2.*multiples of pp.*gives 6"):
        pipeline_slots(4, 6, 2)


@pytest.mark.parametrize(
    ("parallel", "messages"),
    [({"pp": 1}, 0), ({"pp": 2, "ep": 2}, 1), ({"pp": 4}, 2), ({"pp": 2, "vpp": 2}, 3), ({"pp": 4, "vpp": 2}, 4)],
    ids=["pp1", "pp2-ep2", "pp4", "pp2-vpp2", "pp4-vpp2"],
)
def test_what_crosses_the_boundaries_of_a_stage_by_hand(parallel, messages):
    """Of each micro-batch activations of 2 bytes go on and gradients back; ranks of a stage share it."""
    layout = ClusterLayout(MODEL, CLUSTER, Parallel(**parallel))
    found = estimate(layout, Batch(16, 2), FP16)
    assert found.boundary_bytes == 8 * messages * (2 * 128 * 64 * 2) / parallel.get("ep", 1)
    assert estimate(layout, Batch(16, 2), FP16, Timing(secs=1.0)).boundary_bytes == found.boundary_bytes


def test_arithmetic_by_hand():
    """One rank, free links: 6 FLOPs per used parameter and token, and attention."""
    found = cost(batch=4, cluster=FREE)
    layer = 4 * 64**2 + 2 * 64 + 64 * 16 + 2 * (2 * 64 * 128)
    used = 8 * layer + 64 + 1000 * 64  # final norm, head; the embedding is looked up
    flops = 128 * (6 * used + 8 * 12 * 128 * 64)
    assert found.compute_secs == pytest.approx(flops / 0.5e12, rel=1e-12)
    assert (found.exchange_secs, found.send_secs, found.sync_secs, found.bubble_slots) == (0, 0, 0, 0)
    assert found.secs == pytest.approx(4 * found.micro_secs + found.update_secs, rel=1e-12)


def test_a_tied_head_costs_what_its_own_would():
    tied = replace(SPEC, tied=True).build()
    assert cost(model=tied).compute_secs == pytest.approx(cost().compute_secs, rel=1e-12)


def test_the_slowest_stage_sets_the_pace():
    found = cost(pp=4, cluster=FREE)
    assert found.pipeline_secs == pytest.approx((64 + 3) * found.micro_secs)
    assert found.stage_secs == pytest.approx(64 * found.micro_secs)


def test_the_head_counts_where_layers_are_dealt_out():
    """A head as heavy as 3.8 of 8 layers: of three stages it has one for itself."""
    heavy = replace(SPEC, vocab=4000).build()
    layer = cost(model=replace(SPEC, vocab=1).build(), cluster=FREE, pp=8).compute_secs
    head = cost(model=heavy, cluster=FREE).compute_secs - 8 * layer
    found = cost(model=heavy, cluster=FREE, pp=3).compute_secs
    assert found == pytest.approx(4 * layer, rel=0.01)
    assert 3.8 < head / layer < 4


@pytest.mark.parametrize(
    ("weights", "chunks", "heaviest"),
    [
        ([1, 1, 1, 1], 2, [1, 1]),
        ([1, 1, 1, 3], 2, [1, 1, 1]),
        ([5, 1, 1, 1], 3, [5]),
        ([0, 2, 2, 2, 2, 3], 3, [0, 2, 2]),
        ([1, 2, 3], 7, [3]),
        ([4], 1, [4]),
    ],
)
def test_neighbours_are_cut_so_that_the_heaviest_chunk_is_lightest(weights, chunks, heaviest):
    assert weights[heaviest_chunk(weights, chunks)] == heaviest


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 9), min_size=1, max_size=7), st.integers(1, 5))
def test_no_cut_is_better(weights, chunks):
    """Against all cuts there are."""
    found = sum(weights[heaviest_chunk(weights, chunks)])
    ends = [
        (0, *cuts, len(weights))
        for count in range(min(chunks, len(weights)))
        for cuts in combinations(range(1, len(weights)), count)
    ]
    best = min(max(sum(weights[a:b]) for a, b in pairwise(cuts)) for cuts in ends)
    assert found == pytest.approx(best, rel=1e-12)


def test_experts_are_reached_over_nvlink_inside_a_node_and_over_nics_beyond():
    inside, beyond = cost(ep=8), cost(ep=16)
    sent = 2 * (128 / 8) * 64 * 2 * 7 / 8
    assert inside.exchange_secs == pytest.approx(8 * 4 * (7e-6 + sent / 1e11), rel=1e-12)
    sent = 2 * (128 / 16) * 64 * 2 * 15 / 16
    assert beyond.exchange_secs == pytest.approx(8 * 4 * (15e-6 + sent / 1e9), rel=1e-12)


def test_neighbours_send_activations_and_gradients_once_per_chunk():
    assert cost(pp=8).send_secs == pytest.approx(2 * (1e-6 + 128 * 64 * 2 / 1e11), rel=1e-12)
    assert cost(pp=8, ep=2).send_secs == pytest.approx(2 * (1e-6 + 64 * 64 * 2 / 1e9), rel=1e-12)
    assert cost(pp=4, vpp=2).send_secs == pytest.approx(2 * cost(pp=4).send_secs, rel=1e-12)


def test_gradients_are_reduced_over_the_ranks_that_hold_the_same():
    """Two nodes of one stage: experts of 8 ranks twice, everything else 16 times."""
    found = cost(dp=2, ep=8, timing=Timing(overlap=0))
    expert, dense = MODEL.expert_total, MODEL.total - MODEL.expert_total
    dense_ring = 2 * 15 * (1e-6 + dense * 2 / 16 / 8e9)
    expert_ring = 2 * 1 * (1e-6 + expert / 8 * 2 / 2 / 1e9)  # eight rings share a node's NICs
    assert found.sync_secs == pytest.approx(dense_ring + expert_ring, rel=1e-12)
    assert cost(dp=2, ep=8, timing=Timing(overlap=0.75)).sync_secs == pytest.approx(found.sync_secs / 4)
    assert cost(dp=2, ep=8, timing=Timing(overlap=1)).sync_secs == 0


def test_fewer_experts_than_ranks_repeat():
    """Four experts over eight ranks: two copies of each, reduced with each other."""
    few = replace(SPEC, experts=4).build()
    found = cost(model=few, ep=8, timing=Timing(overlap=0))
    dense = few.total - few.expert_total
    rings = 2 * 7 * (1e-6 + dense * 2 / 8 / 1e11) + 2 * (1e-6 + few.expert_total / 4 * 2 / 2 / 1e11)
    assert found.sync_secs == pytest.approx(rings, rel=1e-12)


def test_the_update_moves_every_ranks_share_through_memory():
    assert cost(dp=4, ep=8).update_secs == pytest.approx(MODEL.total / 32 * (2 * 12 + 2 + 2) / 1.5e12, rel=1e-12)


def test_arithmetic_in_one_byte_is_faster():
    eight = cost(precision=Precision(1, 4, 8))
    assert eight.compute_secs == pytest.approx(cost().compute_secs / 1.4, rel=1e-12)


def test_an_estimate_is_the_sum_of_its_costs():
    layout, batch = ClusterLayout(MODEL, CLUSTER, Parallel(pp=4, dp=2, ep=2)), Batch(64, 2)
    found, parts = estimate(layout, batch, FP16), breakdown(layout, batch, FP16)
    assert found.secs == pytest.approx(19 * parts.micro_secs + parts.sync_secs + parts.update_secs, rel=1e-12)
    assert (found.update_secs, found.stage_secs, found.frozen_saving) == (parts.update_secs, parts.stage_secs, 1 / 3)


def test_what_is_given_is_taken():
    layout, batch = ClusterLayout(MODEL, CLUSTER, Parallel(pp=4)), Batch(64, 2)
    whole = estimate(layout, batch, FP16)
    half = estimate(layout, batch, FP16, Timing(secs=whole.secs / 2))
    assert half.secs == whole.secs / 2
    assert half.stage_secs == pytest.approx(whole.stage_secs / 2)
    assert half.update_secs == pytest.approx(whole.update_secs / 2)
    given_all = estimate(layout, batch, FP16, Timing(secs=3.0, update_secs=0.5, stage_secs=2.0, frozen_saving=0.1))
    assert (given_all.secs, given_all.update_secs, given_all.stage_secs, given_all.frozen_saving) == (3, 0.5, 2, 0.1)


def test_a_given_time_keeps_its_last_bit():
    layout, batch = ClusterLayout(MODEL, CLUSTER, Parallel(pp=4)), Batch(64, 2)
    for secs in (tenths / 10 for tenths in range(1, 100)):
        assert estimate(layout, batch, FP16, Timing(secs=secs)).secs == secs


def test_without_a_width_the_time_must_be_given():
    layout, batch = ClusterLayout(replace(MODEL, shapes=None), CLUSTER, Parallel(pp=4)), Batch(64, 2)
    with pytest.raises(ConfigError, match=r"model 'm'.*not known.*give iteration.secs"):
        estimate(layout, batch, FP16)
    found = estimate(layout, batch, FP16, Timing(secs=3.0))
    assert (found.secs, found.update_secs, found.stage_secs) == (3.0, 0.0, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"secs": 0}, "secs must be a finite number above 0"),
        ({"overlap": 1.5}, "overlap must be a number from 0 to 1"),
        ({"update_secs": -1}, "update_secs must be"),
        ({"device_bytes_per_sec": 0}, "device_bytes_per_sec must be"),
        ({"fp8_speedup": float("nan")}, "fp8_speedup must be"),
    ],
)
def test_what_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        Timing(**change)


POWERS = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=60, deadline=None)
@given(pp=POWERS, dp=POWERS, ep=POWERS, micro=POWERS)
def test_more_pipelines_share_a_batch_and_none_computes_longer(pp, dp, ep, micro):
    """A batch of 128 sequences. Only reducing gradients over more ranks may take longer (and a way that no longer
    stays in a node, which is why all ways are alike here)."""
    alike = replace(CLUSTER, nvlink_bytes_per_sec=1e9)
    one, two = (cost(batch=128, micro=micro, cluster=alike, pp=pp, dp=n, ep=ep) for n in (dp, 2 * dp))
    assert two.pipeline_secs <= one.pipeline_secs
    assert two.update_secs <= one.update_secs
    same_work = cost(batch=256, micro=micro, cluster=alike, pp=pp, dp=2 * dp, ep=ep)
    assert same_work.pipeline_secs == one.pipeline_secs
    assert same_work.sync_secs >= one.sync_secs


@settings(max_examples=60, deadline=None)
@given(pp=POWERS, dp=POWERS, ep=POWERS, micro=POWERS, data=st.data())
def test_a_faster_machine_is_never_slower(pp, dp, ep, micro, data):
    field = data.draw(st.sampled_from(["flops_per_sec", "nvlink_bytes_per_sec", "nic_bytes_per_sec"]))
    faster = replace(CLUSTER, **{field: 3 * getattr(CLUSTER, field)})
    slow, fast = (cost(batch=128, micro=micro, cluster=c, pp=pp, dp=dp, ep=ep) for c in (CLUSTER, faster))
    assert fast.secs <= slow.secs
    assert 0 < fast.stage_secs <= fast.pipeline_secs <= fast.secs


@settings(max_examples=60, deadline=None)
@given(pp=st.integers(1, 64), groups=st.integers(1, 20), chunks=st.integers(1, 8))
def test_more_chunks_and_more_micro_batches_leave_fewer_bubbles(pp, groups, chunks):
    found = bubble_fraction(pp, groups * pp, chunks)
    assert 0 <= found < 1
    assert bubble_fraction(pp, groups * pp, chunks + 1) <= found + 1e-12
    assert bubble_fraction(pp, (groups + 1) * pp, chunks) <= found + 1e-12
