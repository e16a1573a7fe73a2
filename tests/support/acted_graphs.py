"""CUDA graphs that are only acted, for Megatron-Core on machines without a GPU (after ``megatron_cpu.install()``).

As on a device, a capture runs Python once and computes nothing: what its operations would write is taken back, and
what they made is overwritten with rubbish. A replay runs no Python of the model, hence no hook and no patch: it
executes the recorded operations again, one by one, on the very storages of the capture. What would make the host wait
for the device raises an error during a capture, as CUDA does.

All random numbers come from the default generator, in graphs and without: what switches generators is Python, and not
recorded. As on a device, a replay draws the next ones, a capture moves no generator, and the passes before it do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support import megatron_gpt
from tests.support.megatron_gpt import Setup

GRAPHED = "cuda_graph_scope" if version("megatron-core").startswith(("0.16", "0.17")) else "cuda_graph_modules"
"""The option that says what CUDA graphs capture."""
RUBBISH = 0x5A
_WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "unique_dim"}
"""Operations after which the host needs a result. ``masked_select`` is not among them: Megatron-Core permutes tokens
with it where Transformer Engine's kernel, which gives as many rows, is missing; a replay checks that they are as many.
"""


def _tensors(*trees: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Capture(TorchDispatchMode):
    """Records what is executed. ``undo`` takes back what was written.

    Attributes:
        operations: (operation, arguments, keyword arguments, tensors that it made).
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._made: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._generator = torch.get_rng_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.partition("::")[2] in _WAITS:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({func})")
        for value in _written(func, args, kwargs):
            self._keep(value)
        taken = {_memory(tensor) for tensor in _tensors(args, kwargs)}
        result = func(*args, **kwargs)
        made = [None if _memory(tensor) in taken else tensor for tensor in _tensors(result)]
        self._made |= {_memory(tensor): tensor for tensor in made if tensor is not None}
        self.operations.append((func, args, kwargs, made))
        return result

    def _keep(self, written: Any) -> None:
        for tensor in _tensors(written):
            at = _memory(tensor)
            if at not in self._made and at not in self._before:
                self._before[at] = (tensor.untyped_storage(), tensor.untyped_storage().clone())

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        for tensor in self._made.values():
            if tensor.is_floating_point():  # others are indices, which eager operations may take before a replay
                tensor.untyped_storage().fill_(RUBBISH)
        torch.set_rng_state(self._generator)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[at] if at < len(args) else kwargs.get(argument.name)


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``.

    Attributes:
        captures: Of all graphs in this process.
        replays: Likewise.
    """

    capturing = False
    captures = replays = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.operations: list[Any] = []

    def register_generator_state(self, state: Any) -> None:
        """Does nothing: there is one generator."""

    def reset(self) -> None:
        self.operations = []

    def replay(self) -> None:
        Graph.replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, made in self.operations:
                result = func(*args, **kwargs)
                for work in tree_leaves(result):
                    if isinstance(work, torch.ScriptObject):  # of a collective
                        work.wait()
                for before, now in zip(made, _tensors(result), strict=True):
                    if before is not None and not func._schema.name.startswith("aten::empty"):
                        if before.shape != now.shape:
                            raise RuntimeError(f"{func} made {now.shape} in a replay, and {before.shape} when captured")
                        before.copy_(now)


@contextmanager
def _graph(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    Graph.captures, Graph.capturing = Graph.captures + 1, True
    capture = Capture()
    try:
        with capture:
            yield
    finally:
        Graph.capturing = False
        capture.undo()
    graph.operations = capture.operations


def install() -> None:
    """Replaces names in torch and in Megatron-Core's modules for the life of the process."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs

    for name, value in {
        "CUDAGraph": Graph,
        "graph": _graph,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: Graph.capturing,
        "memory_stats": lambda: dict.fromkeys(("allocated_bytes.all.current", "reserved_bytes.all.current"), 0),
        "set_stream": lambda stream: None,
        "get_device_capability": lambda *_: (9, 0),
    }.items():
        setattr(torch.cuda, name, value)
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"):
        setattr(torch._C, name, lambda *_: None)
    tracker = random.CudaRNGStatesTracker
    made = tracker.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.is_inference_rng_tracker = True  # one of those that graphs can be made with

    tracker.__init__ = init
    tracker.fork = lambda *_, **__: nullcontext()
    cuda_graphs.get_all_rng_states = dict


def build(setup: Setup, how: str, parts: list[str], **options: Any) -> megatron_gpt.Built:
    """``megatron_gpt.build`` with CUDA graphs of ``parts``, in a process in which no graph is made but this model's.

    MoE layers are of the class that lets graphs of Megatron-Core's own capture a part of them.
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import cuda_graphs, transformer_layer

    class MoELayers(transformer_layer.MoETransformerLayer):
        def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
            output = super()._forward_mlp(*args, **kwargs)  # before 0.17, a replay gives a tuple
            return output[0] if isinstance(output, tuple) else output

    def spec(*args: Any, **kwargs: Any) -> Any:
        found = plain_spec(*args, **kwargs)
        if how == "local" and parts:
            for layer in found.layer_specs:
                layer.module = MoELayers
        return found

    cuda_graphs._CudagraphGlobalRecord.cudagraph_created = False
    plain_spec, plain_options = gpt_layer_specs.get_gpt_decoder_block_spec, megatron_gpt._moe_options
    more = options | ({} if how == "none" else {"cuda_graph_impl": how, GRAPHED: parts})
    with (
        mock.patch.object(gpt_layer_specs, "get_gpt_decoder_block_spec", spec),
        mock.patch.object(megatron_gpt, "_moe_options", lambda setup: plain_options(setup) | more),
    ):
        return megatron_gpt.build(setup, seed=1)


class _ByPosition(torch.nn.Module):
    """A layer that is called with tensors by position, as torch's own ``make_graphed_callables`` calls it."""

    def __init__(self, layer: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.layer, self.names = layer, names

    def forward(self, *tensors: torch.Tensor) -> Any:
        least = len(tensors) - len(self.names)
        return self.layer(*tensors[:least], **dict(zip(self.names, tensors[least:], strict=True)))


def _make_graphed_callables(
    callables: Any, sample_args: Any, sample_kwargs: Any, num_warmup_iters: int, **_: Any
) -> Any:
    """Stands for Transformer Engine's, by torch's: samples first, then all forward and all backward captures."""
    names = tuple(sample_kwargs[0])
    layers = tuple(_ByPosition(layer, names) for layer in callables)
    samples = tuple((*args, *kwargs.values()) for args, kwargs in zip(sample_args, sample_kwargs, strict=True))
    torch.cuda.make_graphed_callables(layers, samples, num_warmup_iters, allow_unused_input=True, pool=(0, 0))

    def called(layer: _ByPosition) -> Any:
        return lambda *args, is_first_microbatch, **kwargs: layer(*args, *[kwargs[name] for name in names])

    return [called(layer) for layer in layers]


def capture_as_transformer_engine(built: Any) -> None:
    """Captures the layers as Megatron-LM's training loop does with ``cuda_graph_impl="transformer_engine"``."""
    from megatron.core.transformer import cuda_graphs, transformer_layer

    for name in ("transformer_engine", "transformer_engine.pytorch"):  # a layer imports it, and uses nothing of it
        sys.modules.setdefault(name, ModuleType(name))
    for module in (cuda_graphs, transformer_layer):
        module.is_te_min_version = lambda version: version == "1.10.0"  # since when it takes arguments by name
    cuda_graphs.HAVE_TE_GRAPHS = True
    cuda_graphs.get_num_microbatches = lambda: built.setup.num_microbatches
    cuda_graphs.make_graphed_callables = _make_graphed_callables
    try:
        helper = cuda_graphs.TECudaGraphHelper(
            model=built.chunks,
            config=built.config,
            seq_length=built.setup.seq,
            micro_batch_size=built.setup.micro_batch,
            optimizers=[built.optimizer],
        )
        helper.create_cudagraphs()
        if built.gathers_in_forward:
            helper.cuda_graph_set_manual_hooks()
    finally:
        cuda_graphs.HAVE_TE_GRAPHS = False
