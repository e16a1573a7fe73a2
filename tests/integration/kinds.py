"""The modules that ``crash_run`` trains, by name.

Each has ``losses`` (batch index -> loss), and draws random numbers in its forward pass.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torchdata.stateful_dataloader import StatefulDataLoader

from moe_ckpt import register_moe
from tests.support.moe_models import family
from tests.support.tiny_moe import CLASSES, WIDTH, MoELayer, Router, TinyMoE


class ManualMoE(TinyMoE):
    """Manual optimization: experts under SGD every second batch, the rest under AdamW every batch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        first, second = self.optimizers()
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
        second.zero_grad()  # gradients carried over to the next batch would be in no checkpoint
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        of_experts = [p for name, p in self.named_parameters() if ".experts." in name]
        others = [p for name, p in self.named_parameters() if ".experts." not in name]
        first = torch.optim.AdamW(others, lr=0.01)
        second = torch.optim.SGD(of_experts, lr=0.05, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(o, 3, 0.9) for o in (first, second)]


class ManualApartMoE(ManualMoE):
    """The same; gradients of both are zeroed at the start of the next batch, and experts are clipped."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(TinyMoE.training_step(self, batch, batch_idx))
        self.clip_gradients(second, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        if batch_idx % 2:
            second.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()


class ManualTwiceMoE(ManualMoE):
    """Two backward passes per batch, as of two players: experts learn from what the others have become in the first."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer, others in ((first, second), (second, first)):
            self.manual_backward(TinyMoE.training_step(self, batch, batch_idx))
            optimizer.step()
            optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)
            others.zero_grad()
        for scheduler in self.lr_schedulers():
            scheduler.step()


class ManualOnceMoE(TinyMoE):
    """Manual optimization with one optimizer that steps once per batch, after a clip of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()


class OverflowingMoE(TinyMoE):
    """Every fifth batch gives an infinite loss, which the gradient scaler must skip."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx % 5 == 3 else loss


class EpochScheduledMoE(TinyMoE):
    """A scheduler that steps once per epoch, when the last batch's checkpoint has long begun."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class NoMoE(TinyMoE):
    """No MoE layer at all: four plain blocks with dropout."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, WIDTH)) for _ in range(4)
        )
        assert self.head.out_features == CLASSES


class BiasedRouter(Router):
    """Chooses by score plus a bias, which is no parameter: each step favours experts that got few tokens."""

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__(width, experts, top_k)
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.load = torch.zeros(experts)

    def forward(self, x):
        scores = F.softmax(F.linear(x, self.weight).float(), dim=-1)
        indices = (scores + self.expert_bias).topk(self.top_k, dim=-1).indices
        self.load = torch.bincount(indices.flatten(), minlength=len(self.expert_bias)).float()
        return scores.gather(-1, indices).to(x.dtype), indices


class BiasedMoE(TinyMoE):
    """Balanced without an auxiliary loss, as DeepSeek-V3: the routers' biases move once per step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.blocks:
            block.moe.gate = BiasedRouter(WIDTH, self.hparams.experts, self.hparams.top_k)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for block in self.blocks:
            router = block.moe.gate
            router.expert_bias += 0.05 * (router.load.mean() - router.load).sign()


class BiasedExperts(nn.Module):
    """Stacked experts with a bias each: under Adafactor the factor of a stack's columns is no expert's (GPT-OSS)."""

    def __init__(self, experts: int, flat: bool) -> None:
        super().__init__()
        self.num_experts = experts
        shape = (experts * WIDTH, WIDTH) if flat else (experts, WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(shape) * 0.2)
        self.bias = nn.Parameter(torch.zeros(experts * WIDTH if flat else (experts, WIDTH)))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        weight, bias = self.weight.view(-1, WIDTH, WIDTH), self.bias.view(-1, WIDTH)
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            y = F.gelu(F.linear(hidden_states[token], weight[expert], bias[expert]))
            out.index_add_(0, token, (y * top_k_weights[token, slot, None]).to(out.dtype))
        return out


class BiasedExpertsMoE(TinyMoE):
    """Experts with biases ``[E, D]``."""

    flat = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.blocks:
            block.moe.experts = BiasedExperts(self.hparams.experts, self.flat)


class FlatMoELayer(MoELayer):
    """Experts in one matrix ``[E * D, D]``."""


register_moe(FlatMoELayer, flat=True)


class FlatExpertsMoE(BiasedExpertsMoE):
    """The same in one matrix."""

    flat = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.blocks:
            block.moe.__class__ = FlatMoELayer


class ShrinkingMoE(TinyMoE):
    """Changes weights when a batch ends, after every callback's hook."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter *= 0.99


class SilentlyShrinkingMoE(TinyMoE):
    """As ``ShrinkingMoE``, by a way that torch does not count."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for parameter in self.parameters():
            parameter.data.mul_(0.99)


class ReplacingMoE(TinyMoE):
    """As ``ShrinkingMoE``, in memory of their own; right after the optimizer's update."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.99


class ForgettingMoE(TinyMoE):
    """Its optimizer's state is set to zero, replaced or removed in turn (ReLoRA), before or behind an update."""

    def on_train_batch_start(self, batch, batch_idx):
        self._forget(self.global_step % 6)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self._forget(self.global_step % 6 - 3)

    def _forget(self, turn):
        state = self.optimizers(use_pl_optimizer=False).state
        for parameter in [*state] if turn in (0, 1, 2) else []:
            moment = state[parameter]["exp_avg"]
            if turn == 0:
                moment.zero_()
            elif turn == 1:
                state[parameter]["exp_avg"] = moment * 0.5
            else:
                del state[parameter]


class OddMoE(TinyMoE):
    """AMSGrad under a schedule that changes betas, a scalar, a part that nothing reads, one that is seldom read."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale, self.idle = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3))
        self.seldom = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * self.scale
        return loss + self.seldom.weight.sum() if self.global_step % 3 == 2 else loss

    def configure_optimizers(self):
        groups = [{"params": [*self.seldom.parameters()], "weight_decay": 0.0, "maximize": True}]
        known = {id(p) for p in groups[0]["params"]}
        groups.append({"params": [p for p in self.parameters() if id(p) not in known], "eps": 1e-6})
        optimizer = torch.optim.NAdam(groups, lr=0.01) if self.hparams.optimizer == "sgd" else None
        optimizer = optimizer or torch.optim.Adam(groups, lr=0.01, amsgrad=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AddingMoE(TinyMoE):
    """Its optimizer gets a param group in the second epoch, of a part that no update reaches yet."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.later = nn.Linear(3, 3)

    def configure_optimizers(self):
        chosen = [p for name, p in self.named_parameters() if not name.startswith("later")]
        return torch.optim.AdamW(chosen, lr=0.01)

    def on_train_epoch_start(self):
        if self.current_epoch == 1 and len(self.trainer.optimizers[0].param_groups) == 1:
            self.trainer.optimizers[0].add_param_group({"params": [*self.later.parameters()], "lr": 0.005})


class TensorRateMoE(TinyMoE):
    """Its learning rate is a tensor, as compiled optimizers have it, which the schedule writes to at each step."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01), foreach=False)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class HookedMoE(ManualOnceMoE):
    """A hook of the user's own halves the gradients before each update."""

    def configure_optimizers(self):
        found = super().configure_optimizers()
        found["optimizer"].register_step_pre_hook(self._halve)
        return found

    def _halve(self, optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)


class TargetAtEndMoE(TinyMoE):
    """A copy of the head, a buffer, follows it when a batch ends, as targets of self-distillation do."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("target", torch.zeros(CLASSES, WIDTH))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.target.lerp_(self.head.weight, 0.3)


class FamilyMoE(pl.LightningModule):
    """A language model of transformers, freshly initialised, with dropout on its embeddings."""

    name = ""

    def __init__(self, optimizer: str = "adamw", **_: Any) -> None:
        super().__init__()
        self.model = family(self.name)
        self.losses: dict[int, float] = {}
        self.kind = optimizer

    def training_step(self, batch, batch_idx):
        embedded = F.dropout(self.model.get_input_embeddings()(batch), 0.1)
        loss: torch.Tensor = self.model(inputs_embeds=embedded, labels=batch, use_cache=False).loss
        self.losses[self.trainer.fit_loop.epoch_loop.total_batch_idx] = loss.item()
        return loss

    def configure_optimizers(self):
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class MixtralMoE(FamilyMoE):
    name = "Mixtral"


class Qwen3MoE(FamilyMoE):
    name = "Qwen3Moe"


KINDS: dict[str, type[Any]] = {
    "plain": TinyMoE,
    "hooked": HookedMoE,
    "odd": OddMoE,
    "adding": AddingMoE,
    "tensor-rate": TensorRateMoE,
    "manual": ManualMoE,
    "manual-apart": ManualApartMoE,
    "manual-twice": ManualTwiceMoE,
    "manual-once": ManualOnceMoE,
    "overflowing": OverflowingMoE,
    "epoch-scheduled": EpochScheduledMoE,
    "no-moe": NoMoE,
    "biased": BiasedMoE,
    "biased-experts": BiasedExpertsMoE,
    "flat-experts": FlatExpertsMoE,
    "shrinking": ShrinkingMoE,
    "shrinking-silently": SilentlyShrinkingMoE,
    "replacing": ReplacingMoE,
    "forgetting": ForgettingMoE,
    "target-at-end": TargetAtEndMoE,
    "mixtral": MixtralMoE,
    "qwen3": Qwen3MoE,
}


def text_loader(samples: int, batch: int = 4, length: int = 8) -> StatefulDataLoader:
    """Shuffled random token ids ``[batch, length]``, for the language models."""
    ids = torch.randint(3, 64, (samples, length), generator=torch.Generator().manual_seed(1))
    return StatefulDataLoader(list(ids), batch_size=batch, shuffle=True)
