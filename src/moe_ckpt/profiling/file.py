"""The file of a run's profile: continued or set aside at the start, and rewritten beside training."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from moe_ckpt.core.operators import Catalog, OperatorKind
from moe_ckpt.core.placement import Placement
from moe_ckpt.errors import DamagedError, FormatVersionError
from moe_ckpt.format.manifest import LayerRecord
from moe_ckpt.format.profile import (
    MAX_PROFILE_BYTES,
    Life,
    OperatorRow,
    ProfiledModel,
    decode_profile,
    encode_life,
    encode_model,
    encode_profile,
)
from moe_ckpt.ports import TensorSpec
from moe_ckpt.slices.assignment import ComputeTypes, operator_bytes
from moe_ckpt.storage.local import read_whole, remove_temporaries_of, replace_file
from moe_ckpt.threads import TaskThread, ThreadName

log = logging.getLogger("moe_ckpt")

_MOST_LIVES = 1000


class ProfileWriter:
    """Owns the file, and the thread that writes it, one write at a time. ``close`` ends the thread."""

    def __init__(self, path: str, catalog: Catalog, placement: Placement) -> None:
        self._path = path
        self._catalog, self._placement, self._fingerprint = catalog, placement, catalog.fingerprint()
        self._idle = threading.Event()
        self._idle.set()
        self._model = encode_model(None)
        self._earlier: tuple[str, ...] = ()
        self._off = self._complained = False
        try:
            self._take_up()
        except OSError as error:
            self._off = True
            log.warning("the profile %s cannot be used, so this run writes no profile: %s", path, error)
        self._thread = TaskThread(ThreadName.PROFILE, self._failed)

    def _take_up(self) -> None:
        """Continue the file that is there, if it is one of this model."""
        remove_temporaries_of(self._path)
        try:
            profile = decode_profile(read_whole(self._path, MAX_PROFILE_BYTES), self._path)
        except FileNotFoundError:
            return
        except (DamagedError, FormatVersionError) as error:
            self._put_aside(str(error))
            return
        if profile.fingerprint != self._fingerprint:
            self._put_aside(f"{self._path} is of another model")
            return
        self._model = encode_model(profile.model)
        self._earlier = tuple(map(encode_life, profile.lives[1 - _MOST_LIVES :]))

    def _put_aside(self, reason: str) -> None:
        aside = next(name for n in range(1, 10000) if not os.path.lexists(name := f"{self._path}.aside-{n}"))
        os.rename(self._path, aside)
        log.warning("%s; it was renamed to %s, and a new profile begins", reason, aside)

    def write(self, life: Life, specs: Sequence[TensorSpec] | None, compute: ComputeTypes) -> bool:
        """Begin to write the file with ``life`` as its last one.

        Args:
            life: Of this process.
            specs: To be weighed; None if they were.
            compute: What kernels read of the parameters.

        Returns:
            False if the write before is still going on.
        """
        if not self._idle.is_set():
            return False
        if not self._off:
            self._idle.clear()
            self._thread.put(functools.partial(self._write, life, specs, compute))
            self._thread.put(self._idle.set)
        return True

    def wait(self, timeout_secs: float) -> None:
        """Until nothing is being written."""
        self._idle.wait(timeout_secs)

    def close(self, timeout_secs: float) -> None:
        """Stop after the writes that were requested; abandon a thread that does not end."""
        self._thread.close(timeout_secs)

    def _write(self, life: Life, specs: Sequence[TensorSpec] | None, compute: ComputeTypes) -> None:
        if specs is not None:
            self._model = encode_model(weighed(self._catalog, self._placement, specs, compute))
        lives = (*self._earlier, encode_life(life))
        replace_file(self._path, encode_profile(self._fingerprint, self._model, lives))

    def _failed(self, error: Exception) -> None:
        """A report is no reason to end training."""
        if not self._complained:
            log.warning("the profile %s cannot be written, training continues: %s", self._path, error)
        self._complained = True


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
