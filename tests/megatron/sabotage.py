"""What the last life of a Megatron run can do wrong on purpose: one thing that exact recovery needs is left out.

Everything here replaces parts of the library in the ranks of that life, which end with it, so nothing is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_ckpt.megatron import checkpoint, host, optimizers
from moe_ckpt.megatron.training_state import MegatronTrainingState
from moe_ckpt.modeling.rng import restore_rng
from moe_ckpt.reading.shared_reading import TensorLoader
from moe_ckpt.windows import replay


def tracker_not_restored() -> None:
    """Megatron's own generators go on from the seed."""
    host.restore_generators = restore_rng


def generators_not_restored() -> None:
    """torch's, numpy's and Python's generators go on from the seed."""
    host.restore_generators = lambda stored: None


def master_weights_not_loaded() -> None:
    _load_only(lambda key: not key.endswith("/fp32_param"))


def compute_weights_not_loaded() -> None:
    _load_only(lambda key: not key.startswith("model/"))


def moments_not_loaded() -> None:
    _load_only(lambda key: not key.endswith("/exp_avg_sq"))


def router_not_loaded() -> None:
    _load_only(lambda key: ".router." not in key)


def _load_only(wanted: Callable[[str], bool]) -> None:
    write = TensorLoader.write

    def some(self: TensorLoader, tensors: Any, stored_of: Mapping[str, Any] | None = None) -> None:
        slices = self.kinds[0] if stored_of is None else stored_of
        write(self, tensors, {key: stored for key, stored in slices.items() if wanted(key)})

    TensorLoader.write = some


def experts_swapped() -> None:
    """Everything of the first two local experts of each layer changes places."""
    resume = checkpoint.MegatronCheckpoint.resume

    def swapped(self: checkpoint.MegatronCheckpoint) -> checkpoint.Progress:
        progress = resume(self)
        of = {(tensor.key, tuple(tensor.offsets)): tensor.local for tensor in self._host.state.tensors()}
        for (key, offsets), local in of.items():
            other = of.get((key.replace(".experts.0.", ".experts.1."), offsets))
            if ".experts.0." in key and other is not None and other.shape == local.shape:
                kept = local.detach().clone()
                local.detach().copy_(other.detach())
                other.detach().copy_(kept)
        return progress

    checkpoint.MegatronCheckpoint.resume = swapped


def advance_skipped() -> None:
    """What the window holds of its second step does not replace what the optimizer made of it."""
    _load_steps(lambda window, step: step != window.steps[1])


def replay_one_step_late() -> None:
    """Training goes on at the window's first step, but what it holds of later ones is never loaded."""
    _load_steps(lambda window, step: step == window.steps[0])


def _load_steps(wanted: Callable[[replay.WindowReplay, int], bool]) -> None:
    stored = replay.WindowReplay._stored
    replay.WindowReplay._stored = lambda self, step: stored(self, step) if wanted(self, step) else {}


def step_count_not_loaded() -> None:
    optimizers.write_step = lambda optimizer, step: None


def loss_scale_not_loaded() -> None:
    write = optimizers.write_plain
    checkpoint_write = lambda optimizer, stored: write(optimizer, {**stored, "scalers": []})  # noqa: E731
    optimizers.write_plain = checkpoint_write


def buffers_not_loaded() -> None:
    load = MegatronTrainingState.load_plain

    def without(self: MegatronTrainingState, plain: Mapping[str, Any]) -> None:
        kept = {name: buffer.clone() for name, buffer in self._inventory.buffers.items()}
        load(self, plain)
        with torch.no_grad():
            for name, buffer in self._inventory.buffers.items():
                buffer.copy_(kept[name])

    MegatronTrainingState.load_plain = without


def scheduler_not_loaded() -> None:
    whole = host.restore_stateful
    host.restore_stateful = lambda stateful, stored, path: whole(
        {name: each for name, each in stateful.items() if name != "scheduler"},
        {name: each for name, each in stored.items() if name != "scheduler"},
        path,
    )
