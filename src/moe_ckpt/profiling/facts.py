"""Facts that only a run's profile needs: sizes of operators, the layout, and the process's start."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from moe_ckpt.core.operators import Catalog, OperatorKind
from moe_ckpt.core.placement import Placement
from moe_ckpt.format.manifest import LayerRecord
from moe_ckpt.format.profile import OperatorRow, ProfiledModel
from moe_ckpt.ports import TensorSpec
from moe_ckpt.slices.assignment import ComputeTypes, operator_bytes

_IMPORTED_UNIX_SECS = time.time()


def weighed(
    catalog: Catalog, placement: Placement, specs: Sequence[TensorSpec], compute: ComputeTypes
) -> ProfiledModel:
    """Bytes of each operator, in the form that window policies take; equal neighbours share a row."""
    sizes = operator_bytes(catalog, specs, compute)
    rows: list[OperatorRow] = []
    for op in catalog.operators:
        elements = 0
        for span in op.spans:
            shape = catalog.parameters[span.parameter]
            start, stop = span.rows(shape)
            elements += (stop - start) * prod(shape[1:])
        weight = sizes[op.id]
        stage, gradient, weights = placement.stage_of.get(op.id, 0), weight.gradient, weight.weights
        row = OperatorRow(
            op.id, 1, elements, weight.full, weight.compute, stage, gradient_bytes=gradient, weight_bytes=weights
        )
        if rows and op.kind is OperatorKind.EXPERT and _follows(row, rows[-1]):
            last = rows.pop()
            row = replace(last, count=last.count + 1)
        rows.append(row)
    layers = tuple(LayerRecord(layer.name, layer.experts, layer.top_k) for layer in catalog.layers)
    return ProfiledModel(layers, tuple(rows))


def _follows(row: OperatorRow, before: OperatorRow) -> bool:
    """Whether the expert of ``row`` is the next of the same layer, and alike."""
    if before.expert is None or row.layer != before.layer or row.expert != before.expert + before.count:
        return False
    return (row.elements, row.size, row.stage) == (before.elements, before.size, before.stage)


def parallel(placement: Placement, ranks: int) -> tuple[int, int, int]:
    """(pp, dp, ep), as ``sim.cluster.Parallel`` counts: stages, pipelines, and ranks that experts are split over.

    Without a distributed optimizer pipelines that hold the same experts deal them out, and so count as one wide one.
    """
    pp = len(placement.stages)
    width = placement.stages[0]
    ep = max((len(set(row)) for row in placement.owners), default=1)
    ep = 1 if placement.expert_ranks is None else ep
    if set(placement.stages) != {width} or width % ep or pp * width != ranks:
        return 1, ranks, 1
    return pp, width // ep, ep


def started_unix_secs() -> float:
    """When this process began; when this module was imported, where the system does not tell."""
    try:
        with open("/proc/self/stat", "rb") as file:  # the name, in brackets, may hold anything
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - max(0.0, since_boot)
    except (OSError, ValueError, IndexError, AttributeError):
        pass
    try:
        import psutil

        return float(psutil.Process().create_time())
    except (ImportError, OSError):
        return _IMPORTED_UNIX_SECS
