"""Lays out DDP's buckets alike in every process of a run; else a resume is not exact on three or more ranks.

DDP adds up gradients bucket by bucket, and the place of a gradient in its bucket decides in which order the terms of
the ranks are added. A process begins with buckets in the reverse order of the parameters, and after its first backward
pass lays them out anew, once, in the order in which gradients became ready. So the first step of a resumed process
would be rounded differently from the same step of a run that was not interrupted. Therefore each checkpoint records the
order, and a resumed process lays its buckets out before its first step, by a backward pass of zeros in that order.
"""

from __future__ import annotations

import base64
import binascii
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("moe_ckpt")

BUCKETS_KEY = "moe_ckpt_ddp_buckets"
"""Name in a checkpoint: the order, as ``BucketOrder.recorded``."""
_REBUILT = "rebuilt_per_bucket_param_indices"
"""Key in DDP's log: indices of parameters, separated by blanks, and by commas between buckets."""
_LEAST_RANKS = 3
"""The sum of two terms is the same in either order."""


class BucketOrder:
    """The order of parameters in the buckets of one ``DistributedDataParallel``. For the training thread.

    Does nothing where the order never changes, or does not matter.

    Args:
        model: Before its first step. Others than ``DistributedDataParallel`` have no buckets.
        ranks: The number of ranks.
        hooked: The model gets a communication hook.

    Attributes:
        recorded: The order, for a checkpoint, and of the one that training resumes from; None if it is not known.
    """

    def __init__(self, model: object, ranks: int, *, hooked: bool = False) -> None:
        self._model: DistributedDataParallel | None = None
        if isinstance(model, DistributedDataParallel) and ranks >= _LEAST_RANKS:
            # Where DDP looks for unused parameters, it leaves the buckets as they are at first.
            self._model = model if model.static_graph or not model.find_unused_parameters else None
        self._ranks, self._hooked = ranks, hooked
        self.recorded: str | None = None
        self._settled = False  # ``recorded`` is the order of this process's buckets, or the order cannot be known

    @property
    def why_not(self) -> str | None:
        """Returns what keeps the buckets from being laid out by a backward pass of zeros; None if nothing does."""
        model = self._model
        if model is None:
            return None
        if model.static_graph:
            return "static_graph=True"
        if self._hooked or model._comm_hooks:
            return "a communication hook"
        if model.mixed_precision is not None:
            return "DDP's own mixed precision"
        if model._use_python_reducer or model._delay_all_reduce_params:
            return "a reducer of another kind"
        tables = (table for table in model.modules() if isinstance(table, (nn.Embedding, nn.EmbeddingBag)))
        if any(table.sparse for table in tables):
            return "sparse gradients"
        parameters = _reduced(model)
        if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters):
            return "hooks on parameters, which would see the zeros"
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
            return "updates in the backward pass"
        return None

    @property
    def inexact(self) -> str | None:
        """Returns why the first step of a resumed process would not be exact; None if it will be."""
        if self.why_not is None:
            return None
        return (
            f"DDP adds up the gradients of {self._ranks} ranks in another order in the first step of a process than "
            f"later, and with {self.why_not} its buckets cannot be laid out in advance (give "
            "find_unused_parameters=True, without static_graph, to DDPStrategy or DistributedDataParallel, which "
            "leaves them as they are)"
        )

    def arrange(self) -> None:
        """Lays the buckets out as ``recorded`` before the first step of a resumed process.

        A collective, of all gradients' bytes.
        """
        if self._model is None:
            return
        recorded, self.recorded = self.recorded, None
        if self.why_not is not None:
            return
        parameters = _reduced(self._model)
        order = None if recorded is None else decode_order(recorded, len(parameters))
        if order is None:
            log.warning(
                "the checkpoint does not say how DDP's buckets were laid out%s, so the gradients of the first step of "
                "this process may differ in their last bits from those of a run that was not interrupted",
                "" if recorded is None else f" for the {len(parameters)} parameters of this model",
            )
            return
        _backward_of_zeros(self._model, [parameters[index] for index in order])
        self.recorded = recorded

    def note(self) -> None:
        """Records the order once it is known: after the first backward pass. A collective then, like DDP's own."""
        if self._settled or self._model is None:
            return
        if self.why_not is not None:
            self._settled = True
            return
        self._model._has_rebuilt_buckets |= self._model.reducer._rebuild_buckets()
        logger: Any = self._model.logger
        logger.set_runtime_stats_and_log()
        buckets = logger._get_ddp_logging_data().strs_map.get(_REBUILT)
        if not buckets:
            if self.recorded is None and self._model._has_rebuilt_buckets:  # else no pass has been reduced yet
                self._settled = True
                log.warning(
                    "torch %s does not say how DDP lays out its buckets, so a resume may differ in the last bits of "
                    "its first step (give DDPStrategy or DistributedDataParallel find_unused_parameters=True)",
                    torch.__version__,
                )
            return
        self._settled = True
        order = encode_order([int(index) for bucket in buckets.split(",") for index in bucket.split()])
        if self.recorded not in (None, order):
            log.warning(
                "DDP's buckets are not laid out as they were before: the gradients of steps may differ in their last "
                "bits from those of a run that was not interrupted"
            )
        self.recorded = order


def _reduced(model: DistributedDataParallel) -> list[nn.Parameter]:
    """Returns the parameters that DDP reduces, in the order in which it numbers them."""
    return [parameter for parameter in model._module_parameters if parameter.requires_grad]


def _backward_of_zeros(model: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
    """Makes gradients ready in the order of ``parameters``, lays the buckets out by it, and puts gradients back."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    reducer = model.reducer
    with torch.enable_grad():
        reducer.prepare_for_backward([])
        for parameter in parameters:
            torch.autograd.backward(parameter, torch.zeros_like(parameter))
    model._has_rebuilt_buckets |= reducer._rebuild_buckets()
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient


def encode_order(order: Sequence[int]) -> str:
    """Returns the order as a short text: compressed differences, which repeat from layer to layer."""
    differences = np.diff(np.asarray(order, dtype="<i4"), prepend=np.asarray([0], dtype="<i4"))
    return base64.b64encode(zlib.compress(differences.tobytes())).decode("ascii")


def decode_order(text: str, parameters: int) -> list[int] | None:
    """Returns the order that ``encode_order`` made ``text`` of; None if it is not of this number of parameters."""
    size = 4 * parameters
    try:
        packed = base64.b64decode(text, validate=True)
        differences = zlib.decompressobj().decompress(packed, size + 1)
    except (binascii.Error, zlib.error, ValueError):
        return None
    if len(differences) != size:
        return None
    order = np.cumsum(np.frombuffer(differences, dtype="<i4"), dtype=np.int64)
    if not np.array_equal(np.sort(order), np.arange(parameters)):
        return None
    return [int(index) for index in order]
