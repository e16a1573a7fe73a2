"""Run the unmodified Megatron-Core on a machine without a GPU: gloo between processes, tensors on the CPU.

For tests and CPU recipes only; nothing else of this package imports it. It replaces names in ``torch`` and in a few
modules of ``megatron.core`` for the life of the process, never a file of either package, and nothing puts them back:
call it in a process that does nothing else. ``torch.cuda.is_available()`` stays False. For Megatron-Core
0.16.1 to 0.19.2::

    from moe_ckpt.testing import megatron_cpu

    megatron_cpu.install()  # before the first import of megatron.core
    from megatron.core import parallel_state

What works: tensor, pipeline (interleaved too), expert and data parallelism, fp32, bf16 and fp16, the distributed
optimizer, SequentialMLP, and GroupedMLP in bf16, the only type its own ``forward`` accepts. What a CPU cannot show:
overlap of communication with computation, the grouped GEMM's own kernel, Transformer Engine, fp8, NCCL, speed.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from moe_ckpt.errors import ConfigError, MissingPackageError

__all__ = ["install"]

_installed = False


def install() -> None:
    """Make ``megatron.core`` importable and trainable here; call once per process before importing it.

    A second call does nothing. Imports ``megatron.core`` itself.

    Raises:
        ConfigError: This machine has a GPU, or ``megatron.core`` is imported already.
        MissingPackageError: Megatron-Core is not installed.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise ConfigError(
            "megatron_cpu.install() makes torch.cuda answer for the CPU, but torch can use a GPU of this machine. "
            "Run Megatron as it is here, or hide the GPU by setting CUDA_VISIBLE_DEVICES to an empty string."
        )
    early = sorted(name for name in sys.modules if name == "megatron.core" or name.startswith("megatron.core."))
    if early:
        raise ConfigError(
            f"megatron_cpu.install() was called after {early[0]} had been imported, which has taken torch.compile and "
            "other names as they were. Call install() before the first import of megatron.core."
        )
    for replace_names in (
        *(_device, _streams, _random_state, _factories, _moves, _type_names, _import_without_compiler, _tracker),
        *(_router, _dispatcher, _norm, _latent_attention, _sends, _uneven_collectives, _grouped_gemm),
    ):
        replace_names()
    _installed = True


# --- names of torch that Megatron-Core calls as if a GPU were there ---
#
# Each function replaces one group of names and says which lines of Megatron-Core 0.16.1 need it, as those of 0.19.2 do;
# paths are relative to ``megatron/core``.


_FACTORIES = ("arange", "as_tensor", "empty", "full", "ones", "tensor", "zeros")


def replace(owner: Any, name: str, value: Any) -> None:
    """``owner.name = value``, for an owner that type checkers hold to be constant.

    Raises:
        AttributeError: the owner has no such name, so this layer does not fit the installed version.
    """
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", repr(owner))
        raise AttributeError(f"{where} has no {name!r}: megatron_cpu does not fit this version of it")
    setattr(owner, name, value)


def _device() -> None:
    """``torch.cuda.current_device()`` is handed on as ``device=`` in some 20 places."""
    replace(torch.cuda, "current_device", lambda: "cpu")


class InOrder:
    """A stream, a point in one, or a context that makes one the current: a CPU has only the program's order of work.

    An object may be entered any number of times, and every point of it has been reached.
    """

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any) -> None: ...

    record = wait = synchronize = wait_stream = wait_event = __enter__ = __exit__ = _nothing

    def record_event(self, event: InOrder | None = None) -> InOrder:
        return event or InOrder()

    def query(self) -> bool:
        return True


def _streams() -> None:
    """transformer/moe/token_dispatcher.py:445 and 871-895, pipeline_parallel/p2p_communication.py:242 and 398,
    transformer/moe/shared_experts.py:123-277, optimizer/optimizer.py:362, parallel_state.py:931 and 1319; of release
    0.19 distributed/param_and_grad_buffer.py, which keeps one context and enters it at every step."""
    current = InOrder()
    for name in ("Stream", "Event", "stream"):
        replace(torch.cuda, name, InOrder)
    replace(torch.cuda, "current_stream", lambda *_: current)
    replace(torch.cuda, "default_stream", lambda *_: current)
    replace(torch.cuda, "synchronize", lambda *_: None)
    replace(torch.cuda, "empty_cache", lambda: None)


def _random_state() -> None:
    """The CUDA generator is the CPU's default one: tensor_parallel/random.py:55, 235-238, 422, and
    rerun_state_machine.py:957. Dropout and initialisation on a CPU draw from it."""

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    for owner in (torch.cuda, torch.cuda.random):
        for function in (get_rng_state, set_rng_state, manual_seed):
            replace(owner, function.__name__, function)


def _factories() -> None:
    """``torch.zeros(..., device="cuda")`` and its like: optimizer/clip_grads.py:90-207, optimizer/grad_scaler.py,
    optimizer/optimizer.py:473-485 and 907, pipeline_parallel/schedules.py:596, 983 and 2138, utils.py:1207,
    transformer/moe/moe_utils.py:998, rerun_state_machine.py:261."""
    for name in _FACTORIES:
        replace(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _moves() -> None:
    """``.cuda()``: optimizer/grad_scaler.py:140, optimizer/optimizer.py:375-380, tensor_parallel/data.py:84."""

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    replace(torch.Tensor, "cuda", stay)
    replace(torch.nn.Module, "cuda", stay)


def _type_names() -> None:
    """``param.type()`` says ``torch.cuda.FloatTensor`` to Megatron-Core, and the truth to everybody else.

    The optimizers sort parameters by that string: optimizer/optimizer.py:671-690,
    optimizer/distrib_optimizer.py:361, 420 and 582, optimizer/clip_grads.py:167.
    """
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if args or kwargs or not isinstance(answer, str):
            return answer
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return answer.replace("torch.", "torch.cuda.", 1) if caller.startswith("megatron.core") else answer

    replace(torch.Tensor, "type", type_)


# --- attributes of Megatron-Core's modules that no replacement in torch reaches ---


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


def _tracker() -> None:
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
