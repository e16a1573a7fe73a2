"""The attributes of modules of Megatron-Core that no replacement in ``torch`` reaches.

Paths and lines are of ``megatron/core`` of release 0.16.1; 0.19.2 has these names too.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
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
    _latent_attention()
    _sends()
    _uneven_collectives()
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


def _latent_attention() -> None:
    """transformer/multi_latent_attention.py:55-65 takes Transformer Engine to be there if its wrappers can be imported;
    they can without it, as mocks, on which ``isinstance`` at :185 fails. Sets what its ``except`` branch would."""
    if importlib.import_module("megatron.core.extensions.transformer_engine").HAVE_TE:
        return
    module = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    replace(module, "HAVE_TE", False)
    for name in ("TEColumnParallelLinear", "TELinear", "Linear", "set_save_original_input"):
        replace(module, name, None)


def _sends() -> None:
    """A gloo send reads from the tensor it was given until it is waited for, and pipeline_parallel/schedules.py:1600
    (interleaved, ``overlap_p2p_comm``) frees that tensor before, by ``out.data = empty``, as a CUDA stream's order
    allows. A second tensor on the same memory keeps it."""
    module = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    original = module._p2p_ops

    def keeping(**arguments: Any) -> Any:
        for name in ("tensor_send_prev", "tensor_send_next"):
            if arguments[name] is not None:
                arguments[name] = arguments[name].detach()
        return original(**arguments)

    replace(module, "_p2p_ops", keeping)


def _uneven_collectives() -> None:
    """Experts that are split over tensor-parallel ranks gather as many rows from each as it routed to them
    (transformer/moe/token_dispatcher.py). gloo's ``all_gather`` and ``reduce_scatter`` take rows of one number only,
    so tensor_parallel/mappings.py:150 and 200 get them padded to the largest."""
    module = importlib.import_module("megatron.core.tensor_parallel.mappings")
    even_gather, even_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or len(set(output_split_sizes)) == 1:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = even_gather(_padded(input_, max(sizes)), group)
        return torch.cat([part[:size] for part, size in zip(padded.split(max(sizes)), sizes, strict=True)])

    def scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or len(set(input_split_sizes)) == 1:
            return even_scatter(input_, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        padded = torch.cat([_padded(part, max(sizes)) for part in torch.split(input_, sizes)])
        return even_scatter(padded, group)[: sizes[group.rank()]].clone()

    replace(module, "_gather_along_first_dim", gather)
    replace(module, "_reduce_scatter_along_first_dim", scatter)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """``rows`` [R, ...] with rows of zeros after them: [count, ...]."""
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


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
    of it (transformer/moe/experts.py:248-258). Newer releases have neither."""
    if importlib.util.find_spec("megatron.core.transformer.moe.grouped_gemm_util") is None:
        return
    module = importlib.import_module("megatron.core.transformer.moe.grouped_gemm_util")
    ops = SimpleNamespace(gmm=grouped_matmul)
    replace(module, "grouped_gemm", SimpleNamespace(ops=ops))
    replace(module, "ops", ops)
