"""The time of an iteration without checkpointing: arithmetic, links, pipeline bubbles (MoEvement, appendix C).

This is an estimate for planning. It assumes even loads, kernels that all reach the same portion of the peak, no
recomputation, no overlap of messages between stages, and layers divided so that the slowest stage, head included, has
least to do (``ClusterLayout`` decides where state is). For the nine experiments of MoEvement whose iteration follows
from its tables 3 and 7, the estimate is 0.5 to 2.2 times that: a measured ``secs`` is always better, and overrides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum

from moe_ckpt.core.operators import Operator, OperatorKind, non_expert_id
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.checks import MOST, above_zero, at_least, not_none, portion, whole
from moe_ckpt_sim.cluster.cluster import Cluster, ClusterLayout
from moe_ckpt_sim.workload.model import LayerShape, Precision
from moe_ckpt_sim.workload.training import Batch, Iteration

_EMBEDDING, _HEAD = non_expert_id("embedding"), non_expert_id("head")
_FLOPS_PER_PARAMETER = 6
"""Operations per token: 2 forward, 2 for the gradient of the input, 2 for that of the weight."""
_ATTENTION_FLOPS = 12
"""Operations per token and layer, times sequence and width: scores and values, forward and backward, unmasked, as MFU
is counted (PaLM, appendix B)."""


@dataclass(frozen=True)
class Timing:
    """The config group ``iteration``: measured times of an iteration, and assumptions for estimated ones.

    Attributes:
        secs, update_secs, stage_secs: As in ``Iteration``; None: estimated. If only ``secs`` is set, the other two keep
            their share of it in the estimate.
        frozen_saving: As in ``Iteration``.
        overlap: Portion of the gradients' all-reduce that the backward pass hides. Half: gradients are complete only in
            the last micro-batch, and only its backward pass can hide them.
        gradient_bytes: Bytes per parameter in the all-reduce. 2: DeepSpeed reduces in the compute type (Megatron's fp32
            is 4).
        activation_bytes: Bytes per value sent between stages and to experts. 2: fp16, even if matrices are FP8.
        device_bytes_per_sec: Rate of one GPU's memory in the optimizer's update. 1.5e12: three quarters of the nominal
            2.0e12 of an A100 80 GB, which streaming kernels reach.
        fp8_speedup: Speedup of all arithmetic if compute weights have 1 byte. 1.4: FP8 products run at twice the rate,
            and take about 60 % of the time.
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
        above_zero("Timing", **not_none(secs=self.secs, stage_secs=self.stage_secs))
        at_least("Timing", 0, **not_none(update_secs=self.update_secs))
        portion("Timing", frozen_saving=self.frozen_saving, overlap=self.overlap)
        above_zero("Timing", gradient_bytes=self.gradient_bytes, activation_bytes=self.activation_bytes)
        above_zero("Timing", device_bytes_per_sec=self.device_bytes_per_sec, fp8_speedup=self.fp8_speedup)


@dataclass(frozen=True)
class Breakdown:
    """The parts of an estimated iteration's time, in seconds.

    Attributes:
        compute_secs, exchange_secs, send_secs: Arithmetic, all-to-alls and messages to neighbours of one micro-batch on
            the slowest stage, forward and backward.
        bubble_slots: Idle time, in micro-batches.
        sync_secs: The part of the gradients' all-reduce that the backward pass does not hide.
        update_secs: The optimizer's update.
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
        """Time of one micro-batch on the slowest stage (t_s)."""
        return self.compute_secs + self.exchange_secs + self.send_secs

    @property
    def stage_secs(self) -> float:
        """Time of all micro-batches of one stage without bubbles, which localized recovery computes again."""
        return self.micro_batches * self.micro_secs

    @property
    def pipeline_secs(self) -> float:
        return self.stage_secs + self.bubble_slots * self.micro_secs

    @property
    def secs(self) -> float:
        """Time of the iteration (T_iter). All pipelines are equal here."""
        return self.pipeline_secs + self.sync_secs + self.update_secs


def pipeline_slots(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Time from the first forward to the last backward pass, in micro-batches: ``M + (S - 1) / v``; 1F1B has ``v = 1``.

    Raises:
        ConfigError: stages are interleaved, and the micro-batches are no multiple of them.
    """
    whole("pipeline", stages=stages, micro_batches=micro_batches, chunks=chunks)
    if chunks > 1 and micro_batches % stages:
        raise ConfigError(
            f"Parallel(pp={stages}, vpp={chunks}): the interleaved schedule needs micro-batches in multiples of pp, "
            f"and the batch gives {micro_batches} to each pipeline; change sequences or micro_sequences, or use vpp: 1"
        )
    return micro_batches + (stages - 1) / chunks


def estimate(layout: ClusterLayout, batch: Batch, precision: Precision, timing: Timing | None = None) -> Iteration:
    """Estimate an iteration by ``breakdown``. Times that ``timing`` sets replace the estimates.

    Raises:
        ConfigError: the batch does not divide, or a time is neither set nor can be estimated without the model's width.
    """
    timing = timing or Timing()
    secs, update, stage = timing.secs, timing.update_secs, timing.stage_secs
    sent = 0.0 if layout.model.shapes is None else boundary_bytes(layout, batch, timing)
    if secs is not None and (layout.model.shapes is None or None not in (update, stage)):
        return Iteration(secs, update or 0.0, stage, timing.frozen_saving, boundary_bytes=sent)
    parts = breakdown(layout, batch, precision, timing)
    if parts.secs > MOST:
        cluster = layout.cluster
        raise ConfigError(
            f"Cluster {cluster.name!r}(flops_per_sec={cluster.flops_per_sec:g}, mfu={cluster.mfu:g}, "
            f"nic_bytes_per_sec={cluster.nic_bytes_per_sec:g}, nvlink_bytes_per_sec={cluster.nvlink_bytes_per_sec:g}): "
            "an iteration would never end at these rates"
        )
    scale = 1.0 if secs is None else secs / parts.secs
    return Iteration(
        secs=parts.secs if secs is None else secs,
        update_secs=parts.update_secs * scale if update is None else update,
        stage_secs=parts.stage_secs * scale if stage is None else stage,
        frozen_saving=timing.frozen_saving,
        boundary_bytes=sent,
    )


def boundary_bytes(layout: ClusterLayout, batch: Batch, timing: Timing) -> float:
    """Bytes that the rank that sends most sends to other stages in one iteration, which an upstream log keeps.

    For each micro-batch, every chunk of the model but the last sends activations on, and every one but the first sends
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
    """Estimate the parts of an iteration; ``secs``, ``update_secs`` and ``stage_secs`` of ``timing`` are ignored.

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
    """Cut ``weights`` into at most ``chunks`` chunks whose heaviest is as light as possible, and return that one."""
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
    """Cut into the fewest chunks that are not above ``limit``; a weight above it has its own chunk."""
    chunks, start, total = [], 0, 0.0
    for at, weight in enumerate(weights):
        if at > start and total + weight > limit:
            chunks.append(slice(start, at))
            start, total = at, 0.0
        total += weight
    return [*chunks, slice(start, len(weights))]


def _flops(layout: ClusterLayout) -> list[float]:
    """Operations per token of a sequence, forward and backward: before the first layer, in each layer, after the last.

    The part before the first layer sees as many tokens as that layer; the part after the last, as many as the last.
    """
    model, shapes = layout.model, _shapes(layout)
    per_layer = [0.0] * (len(shapes) + 2)
    for operator in model.catalog.operators:
        used = model.elements[operator.id] * _used(operator, layout)
        per_layer[model.stage_layer[operator.id] + 1] += _FLOPS_PER_PARAMETER * used
    for layer, shape in enumerate(shapes):
        per_layer[layer + 1] += _ATTENTION_FLOPS * shape.span * shape.width
    if _HEAD not in model.elements and _EMBEDDING in model.elements:  # tied: multiplied by at the end
        per_layer[-1] += _FLOPS_PER_PARAMETER * model.elements[_EMBEDDING]
    seen = (shapes[0], *shapes, shapes[-1])
    return [flops * (shape.tokens / model.seq) for flops, shape in zip(per_layer, seen, strict=True)]


def _exchange_layers(layout: ClusterLayout, tokens: float, timing: Timing) -> list[float]:
    """Seconds of all-to-alls, for the same parts of the network as ``_flops``."""
    model, shapes = layout.model, _shapes(layout)
    secs = [0.0] * (len(shapes) + 2)
    for moe in model.catalog.layers:
        layer = model.stage_layer[f"expert/{moe.index}/0"]
        secs[layer + 1] = _exchange_secs(layout, tokens * _values(layout, shapes[layer]), timing)
    return secs


@dataclass
class _Stage:
    """Parameters of one stage."""

    dense: int = 0
    expert: int = 0


def _stages(layout: ClusterLayout) -> list[_Stage]:
    model, stages = layout.model, [_Stage() for _ in range(layout.parallel.pp)]
    for operator in model.catalog.operators:
        stage, count = stages[layout.stage_of[operator.id]], model.elements[operator.id]
        if operator.kind is OperatorKind.EXPERT:
            stage.expert += count
        else:
            stage.dense += count
    return stages


def _used(operator: Operator, layout: ClusterLayout) -> float:
    """The portion of the operator's parameters that an average token is multiplied by."""
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
    """Values of a layer's activations, per token of a sequence."""
    return shape.width * shape.tokens / layout.model.seq


def _spread(layout: ClusterLayout) -> int:
    """The number of ranks over which a layer's experts are spread before they repeat."""
    return min(layout.parallel.ep, *(layer.experts for layer in layout.model.catalog.layers))


def _within_node(cluster: Cluster, layout: ClusterLayout, ranks: int) -> bool:
    """Returns whether each group of so many neighbouring ranks is in one node."""
    return cluster.gpus_per_node % ranks == 0 or layout.parallel.ranks <= cluster.gpus_per_node


def _tokens(layout: ClusterLayout, batch: Batch) -> float:
    """Tokens of a micro-batch on one rank; the ``ep`` ranks of a stage share it."""
    return batch.micro_sequences * layout.model.seq / layout.parallel.ep


def _message_bytes(layout: ClusterLayout, batch: Batch, timing: Timing) -> float:
    """Bytes that one rank sends to the next stage for one micro-batch, at the widest layer."""
    most = max(_values(layout, shape) for shape in _shapes(layout))
    return _tokens(layout, batch) * most * timing.activation_bytes


def _send_secs(layout: ClusterLayout, nbytes: float) -> float:
    """Seconds of messages for one micro-batch: activations forward and gradients backward, once per chunk."""
    parallel, cluster = layout.parallel, layout.cluster
    if parallel.pp == 1:
        return 0.0
    near = layout.parallel.ranks <= cluster.gpus_per_node
    rate = cluster.nvlink_bytes_per_sec if near else cluster.nic_bytes_per_sec / cluster.gpus_per_node
    return 2 * parallel.vpp * (cluster.alpha_secs + nbytes / rate)


def _exchange_secs(layout: ClusterLayout, values: float, timing: Timing) -> float:
    """Seconds of all-to-alls for one micro-batch in one MoE layer: to experts and back, forward and backward."""
    cluster, ep = layout.cluster, layout.parallel.ep
    if ep == 1:
        return 0.0
    near = _within_node(cluster, layout, ep)
    rate = cluster.nvlink_bytes_per_sec if near else cluster.nic_bytes_per_sec / cluster.gpus_per_node
    nbytes = layout.model.top_k * values * timing.activation_bytes * (ep - 1) / ep
    return 4 * (cluster.alpha_secs * (ep - 1) + nbytes / rate)


def _all_reduce_secs(layout: ClusterLayout, stage: _Stage, timing: Timing) -> float:
    """Seconds of all-reduce of a stage's gradients: experts over ranks that hold the same ones, the rest over all."""
    width, spread = layout.parallel.stage_ranks, _spread(layout)
    dense = _ring_secs(layout, width, 1, stage.dense * timing.gradient_bytes)
    return dense + _ring_secs(layout, width // spread, spread, stage.expert / spread * timing.gradient_bytes)


def _ring_secs(layout: ClusterLayout, ranks: int, stride: int, nbytes: float) -> float:
    """Seconds of an all-reduce of ``nbytes`` in a ring over every ``stride``-th of neighbouring ranks."""
    cluster = layout.cluster
    if ranks == 1:
        return 0.0
    rate = cluster.nvlink_bytes_per_sec
    if not _within_node(cluster, layout, ranks * stride):
        # A node's NICs are shared by as many rings as it has ranks in one stride.
        rate = min(rate, cluster.nic_bytes_per_sec / min(stride, cluster.gpus_per_node))
    return 2 * (ranks - 1) * (cluster.alpha_secs + nbytes / ranks / rate)


def _update_secs(layout: ClusterLayout, stage: _Stage, precision: Precision, timing: Timing) -> float:
    """Seconds of an update, which reads and writes state, reads gradients and writes compute weights (ZeRO-1)."""
    share = (stage.dense + stage.expert) / layout.parallel.stage_ranks
    per_parameter = 2 * precision.full_bytes + timing.gradient_bytes + precision.compute_bytes
    return share * per_parameter / timing.device_bytes_per_sec
