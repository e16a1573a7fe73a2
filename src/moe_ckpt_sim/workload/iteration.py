"""How long an iteration takes without checkpointing: arithmetic, links, pipeline bubbles (MoEvement, appendix C).

An estimate for planning: loads are even, kernels all reach the same portion of the peak, nothing is recomputed,
messages between stages are not hidden, and layers are dealt to stages so that the slowest has least to do, the head
counted in (``ClusterLayout`` decides where state lies). Of the nine experiments of MoEvement whose iteration can be
derived from its tables 3 and 7, it gives 0.5 to 2.2 times that: a measured ``secs`` is always better, and overrides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum

from moe_ckpt.core.operators import Operator, OperatorKind, non_expert_id
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.checks import MOST, above_zero, at_least, given, portion, whole
from moe_ckpt_sim.cluster.cluster import Cluster, ClusterLayout
from moe_ckpt_sim.workload.model import LayerShape, Precision
from moe_ckpt_sim.workload.training import Batch, Iteration

_EMBEDDING, _HEAD = non_expert_id("embedding"), non_expert_id("head")
_FLOPS_PER_PARAMETER = 6
"""Of one token: 2 forward, 2 for the gradient of the input, 2 for that of the weight."""
_ATTENTION_FLOPS = 12
"""Times sequence and width, of one token in one layer: scores and their values, forward and backward, unmasked, as
MFU is counted (PaLM, appendix B)."""


@dataclass(frozen=True)
class Timing:
    """The group ``iteration``: what is given of an iteration, and what is assumed where it is estimated.

    Attributes:
        secs, update_secs, stage_secs: As in ``Iteration``; None: estimated. Where ``secs`` alone is given, the other
            two keep the share of it that they have in the estimate.
        frozen_saving: As in ``Iteration``.
        overlap: Portion of the gradients' all-reduce that backward hides. Half: they are complete in the last
            micro-batch only, whose backward pass is all there is to hide behind.
        gradient_bytes: Per parameter, as all-reduced. 2: DeepSpeed reduces in the compute type (Megatron's fp32 is 4).
        activation_bytes: Per value sent between stages and to experts. 2: fp16, which stays so where matrices are FP8.
        device_bytes_per_sec: Of one GPU's memory, as the optimizer's update gets it. 1.5e12: three quarters of the
            2.0e12 nominal of an A100 80 GB, what streaming kernels reach.
        fp8_speedup: Of all arithmetic where compute weights have 1 byte. 1.4: FP8 products run at twice the rate, and
            about 60 % of the time is in them.
    """

    secs: float | None = None
    update_secs: float | None = None
    stage_secs: float | None = None
    frozen_saving: float = 1 / 3
    overlap: float = 0.5
    gradient_bytes: float = 2.0
    activation_bytes: float = 2.0
    device_bytes_per_sec: float = 1.5e12
    fp8_speedup: float = 1.4

    def __post_init__(self) -> None:
        above_zero("Timing", **given(secs=self.secs, stage_secs=self.stage_secs))
        at_least("Timing", 0, **given(update_secs=self.update_secs))
        portion("Timing", frozen_saving=self.frozen_saving, overlap=self.overlap)
        above_zero("Timing", gradient_bytes=self.gradient_bytes, activation_bytes=self.activation_bytes)
        above_zero("Timing", device_bytes_per_sec=self.device_bytes_per_sec, fp8_speedup=self.fp8_speedup)


@dataclass(frozen=True)
class Breakdown:
    """Where an estimated iteration's time goes, in seconds.

    Attributes:
        compute_secs, exchange_secs, send_secs: Of one micro-batch on the slowest stage, forward and backward:
            arithmetic, all-to-alls, messages to neighbours.
        bubble_slots: micro-batches' worth of idle time.
        sync_secs: Of the gradients' all-reduce, what backward does not hide.
        update_secs: Of the optimizer.
    """

    compute_secs: float
    exchange_secs: float
    send_secs: float
    micro_batches: int
    bubble_slots: float
    sync_secs: float
    update_secs: float

    @property
    def micro_secs(self) -> float:
        """t_s of the slowest stage."""
        return self.compute_secs + self.exchange_secs + self.send_secs

    @property
    def stage_secs(self) -> float:
        """Of all micro-batches of one stage without bubbles: what localized recovery computes again."""
        return self.micro_batches * self.micro_secs

    @property
    def pipeline_secs(self) -> float:
        return self.stage_secs + self.bubble_slots * self.micro_secs

    @property
    def secs(self) -> float:
        """T_iter. All pipelines are equal here, so the slowest is any of them."""
        return self.pipeline_secs + self.sync_secs + self.update_secs


def pipeline_slots(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Micro-batch times from the first forward to the last backward: ``M + (S - 1) / v``; 1F1B has ``v = 1``.

    Raises:
        ConfigError: interleaved stages, and the micro-batches are no multiple of the stages.
    """
    whole("pipeline", stages=stages, micro_batches=micro_batches, chunks=chunks)
    if chunks > 1 and micro_batches % stages:
        raise ConfigError(
            f"Parallel(pp={stages}, vpp={chunks}): the interleaved schedule needs micro-batches in multiples of pp, "
            f"and the batch gives {micro_batches} to each pipeline; change sequences or micro_sequences, or use vpp: 1"
        )
    return micro_batches + (stages - 1) / chunks


def bubble_fraction(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Portion of the pipeline's time in which a stage is idle. Raises as ``pipeline_slots``."""
    return 1 - micro_batches / pipeline_slots(stages, micro_batches, chunks)


def estimate(layout: ClusterLayout, batch: Batch, precision: Precision, timing: Timing | None = None) -> Iteration:
    """One iteration, from what ``timing`` gives and otherwise from ``breakdown``.

    Raises:
        ConfigError: the batch does not divide, or nothing is given and the model's width is not known.
    """
    timing = timing or Timing()
    secs, update, stage = timing.secs, timing.update_secs, timing.stage_secs
    sent = 0.0 if layout.model.shapes is None else boundary_bytes(layout, batch, timing)
    if secs is not None and (layout.model.shapes is None or None not in (update, stage)):
        return Iteration(secs, update or 0.0, stage, timing.frozen_saving, boundary_bytes=sent)
    found = breakdown(layout, batch, precision, timing)
    if found.secs > MOST:
        cluster = layout.cluster
        raise ConfigError(
            f"Cluster {cluster.name!r}(flops_per_sec={cluster.flops_per_sec:g}, mfu={cluster.mfu:g}, "
            f"nic_bytes_per_sec={cluster.nic_bytes_per_sec:g}, nvlink_bytes_per_sec={cluster.nvlink_bytes_per_sec:g}): "
            "an iteration would never end at these rates"
        )
    scale = 1.0 if secs is None else secs / found.secs
    return Iteration(
        secs=found.secs if secs is None else secs,
        update_secs=found.update_secs * scale if update is None else update,
        stage_secs=found.stage_secs * scale if stage is None else stage,
        frozen_saving=timing.frozen_saving,
        boundary_bytes=sent,
    )


def boundary_bytes(layout: ClusterLayout, batch: Batch, timing: Timing) -> float:
    """What the rank with most of it sends to other stages in one iteration, which an upstream log keeps.

    Of each micro-batch every chunk of the model but the last sends activations on, and every one but the first sends
    gradients back.

    Raises:
        ConfigError: the batch does not divide, or the model's width is not known.
    """
    parallel = layout.parallel
    if parallel.pp == 1:
        return 0.0
    messages = 2 * parallel.vpp - (parallel.pp == 2)
    return batch.micro_batches(parallel.dp) * messages * _message_bytes(layout, batch, timing)


def breakdown(layout: ClusterLayout, batch: Batch, precision: Precision, timing: Timing | None = None) -> Breakdown:
    """The estimate alone; ``secs``, ``update_secs`` and ``stage_secs`` of ``timing`` are not looked at.

    Raises:
        ConfigError: the batch does not divide, or the model's width is not known.
    """
    timing = timing or Timing()
    parallel, stages = layout.parallel, _stages(layout)
    micro_batches = batch.micro_batches(parallel.dp)
    slots = pipeline_slots(parallel.pp, micro_batches, parallel.vpp)
    tokens = _tokens(layout, batch)
    speed = layout.cluster.flops_per_sec * layout.cluster.mfu
    if precision.compute_bytes <= 1:
        speed *= timing.fp8_speedup
    compute = [tokens * flops / speed for flops in _flops(layout)]
    exchange = _exchange_layers(layout, tokens, timing)
    slowest = heaviest_chunk([a + b for a, b in zip(compute, exchange, strict=True)], parallel.pp * parallel.vpp)
    return Breakdown(
        compute_secs=parallel.vpp * fsum(compute[slowest]),
        exchange_secs=parallel.vpp * fsum(exchange[slowest]),
        send_secs=_send_secs(layout, _message_bytes(layout, batch, timing)),
        micro_batches=micro_batches,
        bubble_slots=slots - micro_batches,
        sync_secs=(1 - timing.overlap) * max(_all_reduce_secs(layout, stage, timing) for stage in stages),
        update_secs=max(_update_secs(layout, stage, precision, timing) for stage in stages),
    )


def heaviest_chunk(weights: Sequence[float], chunks: int) -> slice:
    """Of neighbouring ``weights`` cut into at most ``chunks`` chunks, so that the heaviest is as light as can be."""
    sums = sorted({total for start in range(len(weights)) for total in accumulate(weights[start:])})
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        if len(_cut(weights, sums[middle])) <= chunks:
            high = middle
        else:
            low = middle + 1
    cut = _cut(weights, sums[low])
    return cut[max(range(len(cut)), key=lambda at: fsum(weights[cut[at]]))]


def _cut(weights: Sequence[float], limit: float) -> list[slice]:
    """The fewest chunks none of which is above ``limit``; a weight that is by itself has its own."""
    found, start, total = [], 0, 0.0
    for at, weight in enumerate(weights):
        if at > start and total + weight > limit:
            found.append(slice(start, at))
            start, total = at, 0.0
        total += weight
    return [*found, slice(start, len(weights))]


def _flops(layout: ClusterLayout) -> list[float]:
    """Per token of a sequence, forward and backward: before the first layer, of each layer, and after the last.

    What comes before the first layer sees as many tokens as that one, what comes after the last as many as that.
    """
    model, shapes = layout.model, _shapes(layout)
    found = [0.0] * (len(shapes) + 2)
    for operator in model.catalog.operators:
        used = model.elements[operator.id] * _used(operator, layout)
        found[model.stage_layer[operator.id] + 1] += _FLOPS_PER_PARAMETER * used
    for layer, shape in enumerate(shapes):
        found[layer + 1] += _ATTENTION_FLOPS * shape.span * shape.width
    if _HEAD not in model.elements and _EMBEDDING in model.elements:  # tied: multiplied by at the end
        found[-1] += _FLOPS_PER_PARAMETER * model.elements[_EMBEDDING]
    seen = (shapes[0], *shapes, shapes[-1])
    return [flops * (shape.tokens / model.seq) for flops, shape in zip(found, seen, strict=True)]


def _exchange_layers(layout: ClusterLayout, tokens: float, timing: Timing) -> list[float]:
    """Seconds of each layer with experts, at the places of ``_flops``."""
    model, shapes = layout.model, _shapes(layout)
    found = [0.0] * (len(shapes) + 2)
    for moe in model.catalog.layers:
        layer = model.stage_layer[f"expert/{moe.index}/0"]
        found[layer + 1] = _exchange_secs(layout, tokens * _values(layout, shapes[layer]), timing)
    return found


@dataclass
class _Stage:
    """Parameters of one stage."""

    dense: int = 0
    expert: int = 0


def _stages(layout: ClusterLayout) -> list[_Stage]:
    model, found = layout.model, [_Stage() for _ in range(layout.parallel.pp)]
    for operator in model.catalog.operators:
        stage, count = found[layout.stage_of[operator.id]], model.elements[operator.id]
        if operator.kind is OperatorKind.EXPERT:
            stage.expert += count
        else:
            stage.dense += count
    return found


def _used(operator: Operator, layout: ClusterLayout) -> float:
    """Portion of the operator's parameters that an average token is multiplied by."""
    if operator.kind is OperatorKind.EXPERT:
        return layout.model.top_k / layout.model.catalog.layers[operator.layer or 0].experts
    return 0.0 if operator.id == _EMBEDDING else 1.0  # looked up


def _shapes(layout: ClusterLayout) -> tuple[LayerShape, ...]:
    if layout.model.shapes is None:
        raise ConfigError(
            f"model {layout.model.name!r}: the widths of its layers (shapes) are not known, so an iteration cannot be "
            "estimated; give iteration.secs"
        )
    return layout.model.shapes


def _values(layout: ClusterLayout, shape: LayerShape) -> float:
    """That a layer works on, per token of a sequence."""
    return shape.width * shape.tokens / layout.model.seq


def _spread(layout: ClusterLayout) -> int:
    """Ranks over which a layer's experts are spread before they repeat."""
    return min(layout.parallel.ep, *(layer.experts for layer in layout.model.catalog.layers))


def _within_node(cluster: Cluster, layout: ClusterLayout, ranks: int) -> bool:
    """Whether groups of so many neighbouring ranks each lie in one node."""
    return cluster.gpus_per_node % ranks == 0 or layout.parallel.ranks <= cluster.gpus_per_node


def _tokens(layout: ClusterLayout, batch: Batch) -> float:
    """Of a micro-batch: all ranks of a stage share it, and this is the share of one of them."""
    return batch.micro_sequences * layout.model.seq / layout.parallel.ep


def _message_bytes(layout: ClusterLayout, batch: Batch, timing: Timing) -> float:
    """Of one micro-batch, from one stage to the next, by one rank: the widest that there is."""
    most = max(_values(layout, shape) for shape in _shapes(layout))
    return _tokens(layout, batch) * most * timing.activation_bytes


def _send_secs(layout: ClusterLayout, nbytes: float) -> float:
    """Of one micro-batch: activations forward and gradients backward, once per chunk."""
    parallel, cluster = layout.parallel, layout.cluster
    if parallel.pp == 1:
        return 0.0
    near = layout.parallel.ranks <= cluster.gpus_per_node
    rate = cluster.nvlink_bytes_per_sec if near else cluster.nic_bytes_per_sec / cluster.gpus_per_node
    return 2 * parallel.vpp * (cluster.alpha_secs + nbytes / rate)


def _exchange_secs(layout: ClusterLayout, values: float, timing: Timing) -> float:
    """Of one micro-batch in one MoE layer: tokens to their experts and back, forward and backward."""
    cluster, ep = layout.cluster, layout.parallel.ep
    if ep == 1:
        return 0.0
    near = _within_node(cluster, layout, ep)
    rate = cluster.nvlink_bytes_per_sec if near else cluster.nic_bytes_per_sec / cluster.gpus_per_node
    nbytes = layout.model.top_k * values * timing.activation_bytes * (ep - 1) / ep
    return 4 * (cluster.alpha_secs * (ep - 1) + nbytes / rate)


def _all_reduce_secs(layout: ClusterLayout, stage: _Stage, timing: Timing) -> float:
    """Of one stage's gradients: experts over the ranks that hold the same ones, the rest over the whole stage."""
    width, spread = layout.parallel.stage_ranks, _spread(layout)
    dense = _ring_secs(layout, width, 1, stage.dense * timing.gradient_bytes)
    return dense + _ring_secs(layout, width // spread, spread, stage.expert / spread * timing.gradient_bytes)


def _ring_secs(layout: ClusterLayout, ranks: int, stride: int, nbytes: float) -> float:
    """All-reduce of ``nbytes`` in a ring over every ``stride``-th of neighbouring ranks."""
    cluster = layout.cluster
    if ranks == 1:
        return 0.0
    rate = cluster.nvlink_bytes_per_sec
    if not _within_node(cluster, layout, ranks * stride):
        # A node's NICs are shared by as many rings as it has ranks in one stride.
        rate = min(rate, cluster.nic_bytes_per_sec / min(stride, cluster.gpus_per_node))
    return 2 * (ranks - 1) * (cluster.alpha_secs + nbytes / ranks / rate)


def _update_secs(layout: ClusterLayout, stage: _Stage, precision: Precision, timing: Timing) -> float:
    """State is read and written, gradients are read, compute weights written; each rank has an equal share (ZeRO-1)."""
    share = (stage.dense + stage.expert) / layout.parallel.stage_ranks
    per_parameter = 2 * precision.full_bytes + timing.gradient_bytes + precision.compute_bytes
    return share * per_parameter / timing.device_bytes_per_sec
