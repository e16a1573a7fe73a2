"""The records of a run as a whole.

``store.json`` names the run and the model of a store. ``finished.json`` says that the run ended after its newest
checkpoint, and has the states of other callbacks at the end. The checkpoint itself cannot say that, since it is
committed before the last validation, which a restart must repeat if it did not happen.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from moe_ckpt.errors import DamagedError, StoreError, UnencodableStateError, UnsupportedError
from moe_ckpt.format.manifest import MOST_UNIX_SECS
from moe_ckpt.format.schema import Schema, anything, listing, mapping, number, one_of, row, text, whole
from moe_ckpt.format.sealed import decode_document, encode_document
from moe_ckpt.format.shard import TORCH_DTYPES, dtype_name
from moe_ckpt.format.tree import decode_tree, encode_tree

FINISHED_NAME = "finished.json"
_END = "moe_ckpt.finished"
_MAX_TENSOR_BYTES = 1 << 16
"""The most tensor bytes of one callback: scores and paths are recorded, averaged weights are not."""
_STORE = "moe_ckpt.store"
_STORE_FIELDS: Schema = {"run_id": text, "fingerprint": text, "created_unix_secs": number(most=MOST_UNIX_SECS)}


@dataclass(frozen=True)
class Identity:
    """The identity of a store.

    Attributes:
        run_id: Random hex, one per store.
        fingerprint: ``Catalog.fingerprint`` of the model.
    """

    run_id: str
    fingerprint: str
    created_unix_secs: float

    def encode(self) -> bytes:
        return encode_document(_STORE, self.__dict__)

    @classmethod
    def decode(cls, raw: bytes | bytearray | memoryview, path: str) -> Identity:
        """Raises ``DamagedError`` or ``FormatVersionError``."""
        body = decode_document(raw, path, _STORE, _STORE_FIELDS, "not a store identity: ")
        return cls(body["run_id"], body["fingerprint"], float(body["created_unix_secs"]))

    def require_model(self, fingerprint: str, root: str, differences: str = "") -> None:
        """Raise ``StoreError`` unless the store was written by a model of this structure.

        Args:
            differences: What is known of how they differ.
        """
        if self.fingerprint != fingerprint:
            differences = differences or f"its structure is {self.fingerprint}, that of this model {fingerprint}"
            raise StoreError(
                f"the store {root} holds checkpoints of another model: {differences}. Choose another dirpath, or "
                "restore the model's configuration."
            )


@dataclass(frozen=True)
class Finished:
    """The end of a run.

    Attributes:
        run_id: Of the store.
        step: Of the run's last checkpoint, the newest in the store. If another is the newest, the run went on.
        generation: Likewise.
        reason: What ended it, for people: ``max_steps=200``.
        limits: Name -> number of steps or epochs that training was to run for, -1 for no limit.
        callbacks: Name -> state of the other callbacks at the very end.
    """

    run_id: str
    step: int
    generation: int
    reason: str
    limits: Mapping[str, int] = field(default_factory=dict)
    callbacks: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Returns the sealed document. States that cannot be encoded, or are large, are left out."""
        callbacks, tensors = {}, {}
        for position, (name, state) in enumerate(self.callbacks.items()):
            try:
                tree, parts = encode_tree(state, str(position))
                if sum(part.nbytes for part in parts.values()) <= _MAX_TENSOR_BYTES:
                    tensors.update({key: _row(part) for key, part in parts.items()})
                    callbacks[name] = tree
            except (UnencodableStateError, UnsupportedError):
                continue
        facts = {name: value for name, value in self.__dict__.items() if name != "callbacks"}
        return encode_document(_END, {**facts, "callbacks": callbacks, "tensors": tensors})

    @classmethod
    def decode(cls, raw: bytes | bytearray | memoryview, path: str) -> Finished:
        """Returns the record. ``path`` is for messages only.

        Raises:
            DamagedError: The document is not as it was written.
            FormatVersionError: The document is of a version that this package does not read.
        """
        body = decode_document(raw, path, _END, _END_FIELDS, "not the end of a run: ")
        try:
            tensors = {name: _tensor(*row) for name, row in body["tensors"].items()}
            callbacks = {name: decode_tree(tree, tensors.__getitem__) for name, tree in body["callbacks"].items()}
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(path, f"not the end of a run ({error!r})") from error
        return cls(body["run_id"], body["step"], body["generation"], body["reason"], body["limits"], callbacks)


def _row(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [dtype_name(tensor.dtype), list(tensor.shape), base64.b64encode(flat.numpy().tobytes()).decode()]


def _tensor(dtype: str, shape: list[int], text: str) -> torch.Tensor:
    kind, raw = TORCH_DTYPES[dtype], bytearray(base64.b64decode(text, validate=True))
    if len(raw) != prod(shape) * kind.itemsize or len(raw) > _MAX_TENSOR_BYTES:
        raise ValueError(f"a tensor of shape {shape} has {len(raw)} bytes")
    flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind, device="cpu")
    return flat.reshape(shape).clone()


_SHAPE = listing(whole(0, _MAX_TENSOR_BYTES), most=32)
_END_FIELDS: Schema = {
    "run_id": text,
    "step": whole(),
    "generation": whole(),
    "reason": text,
    "limits": mapping(whole(-1)),
    "callbacks": mapping(anything),
    "tensors": mapping(row({"dtype": one_of(*TORCH_DTYPES), "shape": _SHAPE, "base64": text})),
}
