"""The attributes of modules of Megatron-Core that no replacement in ``torch`` reaches.

Paths are relative to ``megatron/core`` of release 0.16.1.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
from types import SimpleNamespace
from typing import Any

import torch

from moe_ckpt.errors import MissingPackageError
from moe_ckpt.testing.megatron_cpu.torch_names import replace


def install() -> None:
    """Import ``megatron.core`` and replace them.

    Raises:
        MissingPackageError: Megatron-Core is not installed.
    """
    _import_without_compiler()
    _random_state()
    _router()
    _dispatcher()
    _norm()
    _grouped_gemm()


def _import_without_compiler() -> None:
    """jit.py takes ``torch.compile`` as its fuser when it is imported, and every fused function is compiled at its
    first call, some 10 s in all; with the identity in its place they run as they are written."""
    compiler = torch.compile
    replace(torch, "compile", lambda function: function)
    try:
        importlib.import_module("megatron.core.jit")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "megatron":
            raise
        raise MissingPackageError("megatron-core", "megatron_cpu.install()", "megatron") from error
    finally:
        replace(torch, "compile", compiler)


def _random_state() -> None:
    """tensor_parallel/random.py:72 sets the CUDA generator by a call that torch defers until CUDA starts, so never.

    Its tracker warns when the CPU generator has moved within a fork (random.py:264); here both are one, so it always
    has.
    """
    module = importlib.import_module("megatron.core.tensor_parallel.random")

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    replace(module, "_set_cuda_rng_state", set_state)
    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _router() -> None:
    """transformer/moe/moe_utils.py:1192 reads a name that :34 defines only where Transformer Engine is installed."""
    module = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # type: ignore[attr-defined]


def _dispatcher() -> None:
    """transformer/moe/token_dispatcher.py:877-893 moves split sizes off the GPU as numpy arrays, and leaves what is on
    the CPU as it is: a tensor, which tensor_parallel/mappings.py:440 cannot sum into a size."""
    module = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    replace(module, "maybe_move_tensor_to_cpu", move)


def _norm() -> None:
    """transformer/torch_norm.py:32 refuses sequence parallelism, which MoE needs when tensors are split.

    Only the mark on its parameters is missing: distributed/finalize_model_grads.py sums the gradients of marked ones
    over the tensor-parallel group.
    """
    kind = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    original = kind.__new__

    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm: torch.nn.Module = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    kind.__new__ = staticmethod(new)


def grouped_matmul(
    a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_a: bool = False, trans_b: bool = False
) -> torch.Tensor:
    """``grouped_gemm.ops.gmm``: rows [T, K] in groups of ``batch_sizes`` [E] times ``b`` [E, K, N] gives [T, N].

    With ``trans_b``, ``b`` is [E, N, K]. The kernel's layout and gradients, not its rounding or speed.

    Raises:
        NotImplementedError: ``trans_a``, which only the kernel's own backward uses.
    """
    if trans_a:
        raise NotImplementedError("grouped_matmul(trans_a=True): Megatron-Core does not call it")
    groups = torch.split(a, batch_sizes.tolist())
    return torch.cat([rows @ (w.t() if trans_b else w) for rows, w in zip(groups, b.unbind(), strict=True)])


def _grouped_gemm() -> None:
    """transformer/moe/grouped_gemm_util.py asks whether the CUDA package is there, and GroupedMLP calls one function
    of it (transformer/moe/experts.py:248-258)."""
    module = importlib.import_module("megatron.core.transformer.moe.grouped_gemm_util")
    ops = SimpleNamespace(gmm=grouped_matmul)
    replace(module, "grouped_gemm", SimpleNamespace(ops=ops))
    replace(module, "ops", ops)
