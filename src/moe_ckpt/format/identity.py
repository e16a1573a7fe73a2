"""store.json: which run and which model a store belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ckpt.errors import StoreError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.manifest import MOST_UNIX_SECS, check_version
from moe_ckpt.format.schema import number, record, require, text
from moe_ckpt.format.sealed import seal, unseal

_KIND = "moe_ckpt.store"
_FIELDS = record({"run_id": text, "fingerprint": text, "created_unix_secs": number(most=MOST_UNIX_SECS)})


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
        return seal({"kind": _KIND, "format_version": FORMAT_VERSION, **self.__dict__})

    @classmethod
    def decode(cls, raw: bytes | bytearray | memoryview, path: str) -> Identity:
        """Raises ``DamagedError`` or ``FormatVersionError``."""
        body = unseal(raw, path)
        check_version(body, path, _KIND)
        require(_FIELDS, body, path, "not a store identity: ")
        return cls(body["run_id"], body["fingerprint"], float(body["created_unix_secs"]))

    def require_model(self, fingerprint: str, root: str, differences: str = "") -> None:
        """Raise ``StoreError`` unless the store was written by a model of this structure.

        Args:
            differences: What is known of how they differ.
        """
        if self.fingerprint != fingerprint:
            raise StoreError(
                f"the store {root} holds checkpoints of another model (structure {self.fingerprint}, "
                f"this model is {fingerprint}{': ' + differences if differences else ''}). "
                "Choose another dirpath, or restore the model's configuration."
            )
