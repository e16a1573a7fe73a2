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


def dtype_name(dtype: torch.dtype) -> str:
    """Header name of a torch dtype. Raises ``UnsupportedError`` for one that the format cannot hold."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise UnsupportedError(
            f"tensors of {dtype} cannot be stored; supported are {', '.join(map(str, _NAMES))}"
        ) from None


def itemsize(name: str) -> int:
    """Bytes per element of a header dtype name. Raises ``KeyError`` for an unknown name."""
    return TORCH_DTYPES[name].itemsize
