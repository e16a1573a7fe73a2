"""Names of tensor dtypes in safetensors headers, and their torch counterparts."""

from __future__ import annotations

import torch

from moe_ckpt.errors import UnsupportedError

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype, of: str | None = None) -> str:
    """Header name of a torch dtype.

    Args:
        dtype: Of a tensor.
        of: What the tensor is, for the message.

    Raises:
        UnsupportedError: The format cannot hold it.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        named = "" if of is None else f"{of}: "
        raise UnsupportedError(
            f"{named}tensors of {dtype} cannot be stored; supported are {', '.join(map(str, _NAMES))}. Keep it in one "
            "of these; a buffer that each start computes again may be registered with persistent=False"
        ) from None


def itemsize(name: str) -> int:
    """Bytes per element of a header dtype name. Raises ``KeyError`` for an unknown name."""
    return TORCH_DTYPES[name].itemsize
