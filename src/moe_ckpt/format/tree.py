"""Plain training state as JSON: dicts, lists, tuples, numbers, strings, bytes, tensors; nothing else.

JSON has no tuples, bytes, non-string keys, NaN or tensors, so that these have tags. Tensors and arrays are not in the
JSON: they are returned by name, and become slices of a shard. Reading makes builtins and tensors only, and never looks
up a class by name.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_ckpt.errors import UnencodableStateError
from moe_ckpt.format.schema import MOST_DEPTH, shown
from moe_ckpt.format.sealed import FixedStrings, Fragment, nesting

_TAG = "$"
_MOST_DEPTH = MOST_DEPTH - 3
"""Without the levels of a state file itself, and of a list of fixed strings."""
_ARRAYS = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64"),
    )
}
_THEMSELVES = frozenset({type(None), bool, int, str})
"""Types whose values are the same in JSON; not those derived from them."""
_TEXT = frozenset({str})
_OF_ITEMS: Mapping[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
"""Tag -> the type of what has items."""
_FLOATS = ("nan", "inf", "-inf")


def encode_tree(tree: Any, prefix: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns (JSON-ready value, tensors by name). Names are paths such as ``callbacks/EMA/n_averaged``.

    The tensors are the caller's own, not copies. Fixed strings become fragments, for ``sealed.seal``.

    Raises:
        UnencodableStateError: names the path and the type of the first value that cannot be held.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        encoded = _encode(tree, prefix, tensors)
        is_too_deep = nesting(encoded, _MOST_DEPTH) > _MOST_DEPTH
    except RecursionError:
        is_too_deep = True
    if is_too_deep:
        kind = f"structure of more than {_MOST_DEPTH} lists and dicts within one another"
        raise UnencodableStateError(prefix or "/", kind)
    return encoded, tensors


def decode_tree(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Inverts ``encode_tree``; ``tensor`` gives the tensor that was stored under a name.

    Raises:
        ValueError, TypeError, KeyError: it is no tree that ``encode_tree`` made. Nothing else, whatever it is, provided
            that it came through ``format.sealed``.
    """
    if isinstance(value, list):
        return [decode_tree(item, tensor) for item in value]
    if isinstance(value, Fragment):
        return decode_tree(value.value, tensor)
    if isinstance(value, dict):
        if _TAG not in value:
            return {key: decode_tree(item, tensor) for key, item in value.items()}
        return _decode_tagged(value[_TAG], value.get("v"), tensor)
    return value


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    kind = type(value)  # nearly all values have exactly one of these types, and isinstance takes longer
    if kind in _THEMSELVES or (kind is float and math.isfinite(value)):
        return value
    if kind is dict:
        return _encode_mapping(value, path, tensors)
    if kind is list:
        return _encode_items(value, path, tensors)
    if kind is tuple:
        return {_TAG: "tuple", "v": _encode_items(value, path, tensors)}
    return _encode_derived(value, path, tensors)


def _encode_derived(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Encodes a tensor, or a value of a derived type."""
    if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value):
        if value.layout is not torch.strided or value.is_meta:
            what = "without memory (device meta)" if value.is_meta else f"of layout {value.layout}"
            raise UnencodableStateError(path or "/", f"tensor {what}")
        return {_TAG: "tensor", "v": _store(value.detach(), path, tensors)}
    if isinstance(value, np.generic) and value.dtype.name in _ARRAYS:  # a number of Python is computed with otherwise
        return {_TAG: "number", "v": [value.dtype.name, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enum member is its name, not its value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {_TAG: "float", "v": repr(number)}
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, FixedStrings):
        return value.fragment
    if isinstance(value, np.ndarray):
        return _encode_array(value, path, tensors)
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors)
    if isinstance(value, list):
        return _encode_items(value, path, tensors)
    for tag, built_in in _OF_ITEMS.items():
        if isinstance(value, built_in):
            return {_TAG: tag, "v": _encode_items(value, path, tensors)}
    raise UnencodableStateError(path or "/", f"{type(value).__module__}.{type(value).__qualname__}")


def _encode_items(
    value: list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any],
    path: str,
    tensors: dict[str, torch.Tensor],
) -> list[Any]:
    """Encodes items. Long lists have numbers (token counts, states of generators), which are taken as they are."""
    kinds = set(map(type, value))
    if kinds <= _THEMSELVES or (kinds == {float} and all(map(math.isfinite, value))):
        return list(value)
    return [_encode(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]


def _encode_array(value: np.ndarray, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    unsigned = {np.dtype(np.uint16): np.int16, np.dtype(np.uint32): np.int32, np.dtype(np.uint64): np.int64}
    value = value.astype(value.dtype.newbyteorder("="), copy=False)
    try:
        tensor = torch.from_numpy(value.view(unsigned.get(value.dtype, value.dtype)).copy())
    except TypeError:
        raise UnencodableStateError(path, f"numpy array of {value.dtype}") from None
    return {_TAG: "array", "v": [_store(tensor, path, tensors), str(value.dtype)]}


def _store(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    """Adds the tensor under ``path``, made unique, since keys such as 1 and "1" may collide. Returns its name."""
    while path in tensors:
        path += "'"
    tensors[path] = tensor
    return path


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if set(map(type, value)) <= _TEXT and _TAG not in value:
        within = f"{path}/" if path else ""
        return {
            key: item if type(item) in _THEMSELVES else _encode(item, within + key, tensors)
            for key, item in value.items()
        }
    pairs = [
        [_encode(key, f"{path}/<key>", tensors), _encode(item, f"{path}/{key}", tensors)] for key, item in value.items()
    ]
    return {_TAG: "dict", "v": pairs}


def _decode_tagged(tag: str, value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if tag == "tensor":
        return tensor(_typed(value, str))
    if tag == "array":
        name, dtype = _typed(value, list)
        return _as_array(tensor(_typed(name, str)), _typed(dtype, str))
    if tag == "number":
        dtype, raw = _typed(value, list)
        return np.frombuffer(base64.b64decode(_typed(raw, str), validate=True), _ARRAYS[_typed(dtype, str)]).reshape(
            ()
        )[()]
    if tag == "float":
        if value not in _FLOATS:
            raise ValueError(f"{value!r} is none of {', '.join(_FLOATS)}")
        return float(value)
    if tag == "bytes":
        return base64.b64decode(_typed(value, str), validate=True)
    if tag in _OF_ITEMS:
        return _OF_ITEMS[tag]([decode_tree(item, tensor) for item in _typed(value, list)])
    if tag == "dict":
        return {decode_tree(key, tensor): decode_tree(item, tensor) for key, item in _typed(value, list)}
    raise ValueError(f"unknown tag {shown(tag)} in stored state")


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{shown(value)} is no {kind.__name__}")
    return value


def _as_array(tensor: torch.Tensor, name: str) -> np.ndarray:
    """Returns the numpy array that was stored as ``tensor``; unsigned integers were stored as signed ones."""
    array, dtype = tensor.numpy(), _ARRAYS.get(name)
    if dtype is None or dtype.itemsize != array.dtype.itemsize:
        raise TypeError(f"a tensor of {tensor.dtype} is no numpy array of {shown(name)}")
    return array.view(dtype)
