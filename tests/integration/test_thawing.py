"""What is trained changes as training goes on: parameters are frozen and thawed, groups are added to the optimizer."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning

from moe_ckpt.policies import Dense, MoEvement
from tests.integration.test_hooks_and_state import fit, same, seeded
from tests.support.tiny_moe import TinyMoE, state_of

POLICIES = {"dense": lambda: Dense(1), "windows": lambda: MoEvement(window=3)}
STEPS, PER_EPOCH = 14, 4


class OnlyTrained(TinyMoE):
    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Experts(BaseFinetuning):
    """Thaws the experts of one layer in the second epoch, and of the other in the third, norms with them."""

    def freeze_before_training(self, module):
        for block in module.blocks:
            self.freeze([block.moe.experts, block.norm], train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch in (1, 2):
            block = module.blocks[epoch - 1]
            self.unfreeze_and_add_param_group([block.moe.experts, block.norm], optimizer)


class Backbone(OnlyTrained):
    def __init__(self, **options):
        super().__init__(**options)
        self.backbone = self.blocks


class SecondFrozen:
    """The second block is, at first."""

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks[1].requires_grad_(False)


class AtEpochs(SecondFrozen, TinyMoE):
    """By the module's own hook, at the start of an epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.blocks[1].requires_grad_(True)
            self.blocks[0].moe.requires_grad_(False)


class AddsGroup(SecondFrozen, OnlyTrained):
    """Without a callback of Lightning's."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.blocks[1].requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.blocks[1].parameters()), "lr": 0.005})


class AtFitStart(TinyMoE):
    """Frozen by the module's own ``on_fit_start``, which runs after the checkpoint was loaded."""

    def on_fit_start(self):
        self.embed.requires_grad_(False)

    def on_train_epoch_start(self):
        self.embed.requires_grad_(self.current_epoch > 0)


def backbone():
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.005, lambda_func=lambda _: 1.5)


KINDS = {"callback": (OnlyTrained, Experts), "backbone": (Backbone, backbone), "hook": (AtEpochs, None)}
KINDS |= {"hook adds a group": (AddsGroup, None), "hook at the fit's start": (AtFitStart, None)}


def run(path, kind, policy, *, stop=None, ckpt_path=None):
    model, callback = KINDS[kind]
    module = seeded(model, stacked=False)
    trainer, checkpoint = fit(
        path,
        module,
        policy(),
        stop=stop,
        callbacks=[callback()] if callback else [],
        ckpt_path=ckpt_path,
        limit_train_batches=PER_EPOCH,
        max_steps=STEPS,
    )
    flags = {name: torch.tensor(parameter.requires_grad) for name, parameter in module.named_parameters()}
    tracked = {f"{name}.tracks": torch.tensor(each.track_running_stats) for name, each in norms(module)}
    return state_of(module, trainer.optimizers[0]) | flags | tracked, checkpoint


def norms(module):
    return [(name, each) for name, each in module.named_modules() if isinstance(each, torch.nn.BatchNorm1d)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.quick("dense-callback", "dense-hook at the fit's start", "windows-backbone", "windows-hook adds a group")
def test_a_run_comes_back_as_it_was_thawed(tmp_path, kind, policy):
    whole, _ = run(tmp_path / "a", kind, POLICIES[policy])
    for stop in (3, 7, 10):
        _, checkpoint = run(tmp_path / "b", kind, POLICIES[policy], stop=stop)
    assert checkpoint.restored_step is not None
    again, checkpoint = run(tmp_path / "b", kind, POLICIES[policy])
    assert checkpoint.restored_step >= 7
    assert whole.keys() == again.keys()
    assert same(whole, again) == []


@pytest.mark.parametrize("kind", ["callback", "hook"])
def test_a_step_that_is_named_comes_back_likewise(tmp_path, kind):
    whole, _ = run(tmp_path / "a", kind, POLICIES["dense"])
    run(tmp_path / "b", kind, POLICIES["dense"], stop=10)
    again, checkpoint = run(tmp_path / "c", kind, POLICIES["dense"], ckpt_path=str(tmp_path / "b"))
    assert checkpoint.restored_step == 10
    assert same(whole, again) == []
