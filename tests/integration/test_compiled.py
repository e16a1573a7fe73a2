"""Models that torch.compile runs: a window's replay calls the very programs that the steps were computed by."""

from __future__ import annotations

import contextlib

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moe_ckpt import Memory
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.modeling.names import clean_name, is_compiled
from moe_ckpt.policies import GradientLog, MoEvement
from tests.integration.test_hooks_and_state import Stop, Stopped, fit, loader, same, seeded
from tests.support.tiny_moe import TinyMoE, state_of


def rounds(graph, inputs):
    """A backend whose roundings depend on which inputs require gradients, as those of inductor's fusions do."""
    trained = sum(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs)

    def run(*args):
        made = graph(*args)
        return tuple(
            each * (1 + trained * 2**-10) if isinstance(each, torch.Tensor) and each.is_floating_point() else each
            for each in made
        )

    return run


@torch.compile(backend=rounds)
def linear(x, weight, bias):
    return F.linear(x, weight, bias)


class CompiledLinear(nn.Linear):
    """Calls a function that is compiled; nothing on the module says so."""

    def forward(self, x):
        return linear(x, self.weight, self.bias)


class InPlace(TinyMoE):
    """``module.compile()``, which Lightning's configure_model is the place for."""

    def configure_model(self):
        for block in self.blocks:
            for expert in block.moe.experts:
                expert.up.compile(backend=rounds)
                expert.down.compile(backend=rounds)


class Wrapped(TinyMoE):
    def __init__(self, **options):
        super().__init__(**options)
        for block in self.blocks:
            for expert in block.moe.experts:
                expert.up = torch.compile(expert.up, backend=rounds)


class Functions(TinyMoE):
    def __init__(self, **options):
        super().__init__(**options)
        for block in self.blocks:
            for expert in block.moe.experts:
                expert.up.__class__ = expert.down.__class__ = CompiledLinear


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [InPlace, Wrapped, Functions])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.quick("32-true-InPlace", "32-true-Wrapped", "bf16-mixed-Functions")
def test_a_windows_replay_of_a_compiled_model_is_exact(tmp_path, kind, precision):
    options = {"precision": precision, "max_steps": 12}
    whole, resumed = seeded(kind, stacked=False), seeded(kind, stacked=False)
    reference, _ = fit(tmp_path / "a", whole, MoEvement(window=3), **options)
    fit(tmp_path / "b", seeded(kind, stacked=False), MoEvement(window=3), stop=7, **options)
    torch._dynamo.reset()  # as in a new process
    again, checkpoint = fit(tmp_path / "b", resumed, MoEvement(window=3), **options)
    assert checkpoint.restored_step is not None
    assert same(state_of(whole, reference.optimizers[0]), state_of(resumed, again.optimizers[0])) == []


@pytest.mark.parametrize("then", ["wrapped", "eager"])
def test_a_gradient_log_of_a_compiled_model_goes_on_compiled_or_not(tmp_path, then):
    """A wrapped module's parameters have other names, in the log as in the store they have not."""
    (tmp_path / "a-memory").mkdir()
    (tmp_path / "b-memory").mkdir()

    def run(name, compiled, stop=None):
        model = seeded(TinyMoE, stacked=False)
        if compiled:
            model.head = torch.compile(model.head, backend="eager")
        memory = Memory(directory=str(tmp_path / f"{name}-memory"), storage_every=100)
        checkpoint = MoECheckpoint(GradientLog(window=3), tmp_path / name, memory=memory, when_busy="wait")
        callbacks = [checkpoint, *([Stop(stop)] if stop else [])]
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(callbacks=callbacks, accelerator="cpu", max_steps=10, **quiet)
        pl.seed_everything(5, verbose=False)
        with contextlib.suppress(Stopped):
            trainer.fit(model, loader(32))
        return checkpoint, state_of(model, trainer.optimizers[0])

    _, whole = run("a", compiled=False)
    run("b", compiled=True, stop=7)
    checkpoint, resumed = run("b", compiled=then == "wrapped")
    assert checkpoint.restored_step == 7
    clean = {clean_name(name): tensor for name, tensor in resumed.items()}
    assert same(whole, clean) == []


def test_a_compiled_module_is_told_from_one_that_is_not():
    plain, in_place, by_forward = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    in_place.compile(backend="eager")
    by_forward.forward = torch.compile(by_forward.forward, backend="eager")
    wrapped = torch.compile(nn.Linear(2, 2), backend="eager")
    found = [is_compiled(nn.Sequential(each)) for each in (plain, in_place, by_forward, wrapped)]
    assert found == [False, True, True, True]
