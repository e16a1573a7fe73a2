"""How long an iteration takes without checkpointing: arithmetic, links, pipeline bubbles (MoEvement, appendix C).

An estimate for planning, within tens of per cent of a real run at best: loads are even, kernels all reach the same
portion of the peak, and nothing is recomputed. A measured ``secs`` is always better, and overrides it.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_ckpt.core.operators import Operator, OperatorKind, non_expert_id
from moe_ckpt.errors import ConfigError
from moe_ckpt.sim.checks import above_zero, at_least, portion, whole
from moe_ckpt.sim.cluster import Cluster, Layout
from moe_ckpt.sim.model import Precision
from moe_ckpt.sim.training import Batch, Iteration

_EMBEDDING, _HEAD = non_expert_id("embedding"), non_expert_id("head")
_FLOPS_PER_PARAMETER = 6
"""Of one token: 2 forward, 2 for the gradient of the input, 2 for that of the weight."""
_ATTENTION_FLOPS = 12
"""Times sequence and width, of one token in one layer: scores and their values, forward and backward, unmasked, as
MFU is counted (PaLM, appendix B)."""


@dataclass(frozen=True)
class Timing:
    """The group ``iteration``: what is given of an iteration, and what is assumed where it is estimated.

    secs, update_secs, stage_secs: as in ``Iteration``; None: estimated. Where ``secs`` alone is given, the other two
        keep the share of it that they have in the estimate.
    frozen_saving: as in ``Iteration``.
    overlap: portion of the gradients' all-reduce that backward hides. Half: they are complete in the last micro-batch
        only, whose backward pass is all there is to hide behind.
    gradient_bytes: per parameter, as all-reduced. 2: DeepSpeed reduces in the compute type (Megatron's fp32 is 4).
    activation_bytes: per value sent between stages and to experts. 2: fp16, which stays so where matrices are FP8.
    device_bytes_per_sec: of one GPU's memory, as the optimizer's update gets it. 1.5e12: three quarters of the 2.0e12
        nominal of an A100 80 GB, what streaming kernels reach.
    fp8_speedup: of all arithmetic where compute weights have 1 byte. 1.4: FP8 products run at twice the rate, and
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
        above_zero("Timing", secs=self.secs, stage_secs=self.stage_secs)
        at_least("Timing", 0, update_secs=self.update_secs)
        portion("Timing", frozen_saving=self.frozen_saving, overlap=self.overlap)
        above_zero("Timing", gradient_bytes=self.gradient_bytes, activation_bytes=self.activation_bytes)
        above_zero("Timing", device_bytes_per_sec=self.device_bytes_per_sec, fp8_speedup=self.fp8_speedup)


@dataclass(frozen=True)
class Costs:
    """Where an estimated iteration's time goes, in seconds.

    stage: the slowest. compute_secs, exchange_secs, send_secs: of one micro-batch there, forward and backward: its
        arithmetic, its all-to-alls, its messages to neighbours. bubble_slots: micro-batches' worth of idle time.
    sync_secs: of the gradients' all-reduce, what backward does not hide. update_secs: of the optimizer.
    """

    stage: int
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
        """T_iter. All pipelines are alike here, so the slowest is any of them."""
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


def estimate(layout: Layout, batch: Batch, precision: Precision, timing: Timing | None = None) -> Iteration:
    """One iteration, from what ``timing`` gives and otherwise from ``costs``.

    Raises:
        ConfigError: the batch does not divide, or nothing is given and the model's width is not known.
    """
    timing = timing or Timing()
    secs, update, stage = timing.secs, timing.update_secs, timing.stage_secs
    if secs is not None and (layout.model.hidden is None or None not in (update, stage)):
        return Iteration(secs, update or 0.0, stage, timing.frozen_saving)
    found = costs(layout, batch, precision, timing)
    scale = 1.0 if secs is None else secs / found.secs
    return Iteration(
        secs=found.secs if secs is None else secs,
        update_secs=found.update_secs * scale if update is None else update,
        stage_secs=found.stage_secs * scale if stage is None else stage,
        frozen_saving=timing.frozen_saving,
    )


def costs(layout: Layout, batch: Batch, precision: Precision, timing: Timing | None = None) -> Costs:
    """The estimate alone; ``secs``, ``update_secs`` and ``stage_secs`` of ``timing`` are not looked at.

    Raises:
        ConfigError: the batch does not divide, or the model's width is not known.
    """
    timing = timing or Timing()
    parallel, stages = layout.parallel, _stages(layout)
    micro_batches = batch.micro_batches(parallel.dp)
    slots = pipeline_slots(parallel.pp, micro_batches, parallel.vpp)
    # All ranks of a stage share a micro-batch: this is the share of one of them.
    tokens = batch.micro_sequences * layout.model.seq / parallel.ep
    speed = layout.cluster.flops_per_sec * layout.cluster.mfu
    if precision.compute_bytes <= 1:
        speed *= timing.fp8_speedup
    send = _send_secs(layout, tokens, timing)
    exchange = _exchange_secs(layout, tokens, timing)
    compute = [tokens * stage.flops / speed for stage in stages]
    slowest = max(range(parallel.pp), key=lambda s: compute[s] + stages[s].moe_layers * exchange)
    return Costs(
        stage=slowest,
        compute_secs=compute[slowest],
        exchange_secs=stages[slowest].moe_layers * exchange,
        send_secs=send,
        micro_batches=micro_batches,
        bubble_slots=slots - micro_batches,
        sync_secs=(1 - timing.overlap) * max(_all_reduce_secs(layout, stage, timing) for stage in stages),
        update_secs=max(_update_secs(layout, stage, precision, timing) for stage in stages),
    )


@dataclass
class _Stage:
    """flops: of one token, forward and backward. dense, expert: parameters."""

    flops: float = 0.0
    dense: int = 0
    expert: int = 0
    moe_layers: int = 0


def _stages(layout: Layout) -> list[_Stage]:
    model, found = layout.model, [_Stage() for _ in range(layout.parallel.pp)]
    width = _width(layout)
    for operator in model.catalog.operators:
        stage, count = found[layout.stage_of[operator.id]], model.elements[operator.id]
        if operator.kind is OperatorKind.EXPERT:
            stage.expert += count
        else:
            stage.dense += count
        stage.flops += _FLOPS_PER_PARAMETER * count * _used(operator, layout)
    for layer in range(model.network_layers):
        found[layout.stage_at(layer)].flops += _ATTENTION_FLOPS * model.seq * width
    for moe in model.catalog.layers:
        found[layout.stage_of[f"expert/{moe.index}/0"]].moe_layers += 1
    if _HEAD not in model.elements and _EMBEDDING in model.elements:  # tied: the last stage multiplies by it
        found[layout.stage_at(model.network_layers)].flops += _FLOPS_PER_PARAMETER * model.elements[_EMBEDDING]
    return found


def _used(operator: Operator, layout: Layout) -> float:
    """Portion of the operator's parameters that an average token is multiplied by."""
    if operator.kind is OperatorKind.EXPERT:
        return layout.model.top_k / layout.model.catalog.layers[operator.layer or 0].experts
    return 0.0 if operator.id == _EMBEDDING else 1.0  # looked up


def _width(layout: Layout) -> int:
    if layout.model.hidden is None:
        raise ConfigError(
            f"model {layout.model.name!r}: its width (hidden) is not known, so an iteration cannot be estimated; "
            "give iteration.secs"
        )
    return layout.model.hidden


def _spread(layout: Layout) -> int:
    """Ranks over which a layer's experts are spread before they repeat."""
    return min(layout.parallel.ep, *(layer.experts for layer in layout.model.catalog.layers))


def _within_node(cluster: Cluster, layout: Layout, ranks: int) -> bool:
    """Whether groups of so many neighbouring ranks each lie in one node."""
    return cluster.gpus_per_node % ranks == 0 or layout.parallel.ranks <= cluster.gpus_per_node


def _send_secs(layout: Layout, tokens: float, timing: Timing) -> float:
    """Of one micro-batch: activations forward and gradients backward, once per chunk."""
    parallel, cluster = layout.parallel, layout.cluster
    if parallel.pp == 1:
        return 0.0
    near = layout.parallel.ranks <= cluster.gpus_per_node
    rate = cluster.nvlink_bytes_per_sec if near else cluster.nic_bytes_per_sec / cluster.gpus_per_node
    message = cluster.alpha_secs + tokens * _width(layout) * timing.activation_bytes / rate
    return 2 * parallel.vpp * message


def _exchange_secs(layout: Layout, tokens: float, timing: Timing) -> float:
    """Of one micro-batch in one MoE layer: tokens to their experts and back, forward and backward."""
    cluster, ep = layout.cluster, layout.parallel.ep
    if ep == 1:
        return 0.0
    near = _within_node(cluster, layout, ep)
    rate = cluster.nvlink_bytes_per_sec if near else cluster.nic_bytes_per_sec / cluster.gpus_per_node
    nbytes = layout.model.top_k * tokens * _width(layout) * timing.activation_bytes * (ep - 1) / ep
    return 4 * (cluster.alpha_secs * (ep - 1) + nbytes / rate)


def _all_reduce_secs(layout: Layout, stage: _Stage, timing: Timing) -> float:
    """Of one stage's gradients: experts over the ranks that hold the same ones, the rest over the whole stage."""
    width, spread = layout.parallel.stage_ranks, _spread(layout)
    dense = _ring_secs(layout, width, 1, stage.dense * timing.gradient_bytes)
    return dense + _ring_secs(layout, width // spread, spread, stage.expert / spread * timing.gradient_bytes)


def _ring_secs(layout: Layout, ranks: int, stride: int, nbytes: float) -> float:
    """All-reduce of ``nbytes`` in a ring over every ``stride``-th of neighbouring ranks."""
    cluster = layout.cluster
    if ranks == 1:
        return 0.0
    rate = cluster.nvlink_bytes_per_sec
    if not _within_node(cluster, layout, ranks * stride):
        # A node's NICs are shared by as many rings as it has ranks in one stride.
        rate = min(rate, cluster.nic_bytes_per_sec / min(stride, cluster.gpus_per_node))
    return 2 * (ranks - 1) * (cluster.alpha_secs + nbytes / ranks / rate)


def _update_secs(layout: Layout, stage: _Stage, precision: Precision, timing: Timing) -> float:
    """State is read and written, gradients are read, compute weights written; each rank has an equal share (ZeRO-1)."""
    share = (stage.dense + stage.expert) / layout.parallel.stage_ranks
    per_parameter = 2 * precision.full_bytes + timing.gradient_bytes + precision.compute_bytes
    return share * per_parameter / timing.device_bytes_per_sec
