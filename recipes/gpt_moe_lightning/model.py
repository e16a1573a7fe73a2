"""A GPT-2-style language model with Mixture-of-Experts layers, in plain torch, as a LightningModule.

Pre-norm blocks, learned positions, causal attention, tied embeddings. Every ``moe_every``-th block has
an MoE layer in place of its MLP: E expert MLPs stacked in ``[E, ...]`` parameters, and a gate that sends
each token to its top k of them (GShard, arXiv 2006.16668; Switch, arXiv 2101.03961).

Legend: B batch, S sequence, T = B * S tokens, H hidden, F expert hidden, E experts, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

if TYPE_CHECKING:
    from moe_ckpt.boost.layer import LayerBoost


@dataclass(frozen=True)
class GPTMoEConfig:
    """Sizes of the model.

    moe_every: the blocks with index ``moe_every - 1, 2 * moe_every - 1, ...`` are MoE blocks; 2 means
    every other one, as in the PEC paper's GPT2-MoE-Small.
    capacity_factor: an expert takes at most ``ceil(capacity_factor * T * k / E)`` tokens of a batch and
    drops the rest, which then pass the layer by the residual path only; None takes all.
    init_std: 0.02 is GPT-2's. A small model needs more, about ``hidden ** -0.5``: with tokens too much alike
    at the start, whole batches change experts from one step to the next, and the loss jumps by nats.
    """

    vocab_size: int = 256
    context: int = 128
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    moe_every: int = 2
    ffn_multiple: int = 4
    dropout: float = 0.0
    aux_loss: float = 0.01
    capacity_factor: float | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} must be a multiple of heads={self.heads}")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k={self.top_k} must lie between 1 and experts={self.experts}")
        if not 1 <= self.moe_every <= self.layers:
            raise ValueError(f"moe_every={self.moe_every} must lie between 1 and layers={self.layers}")


class Gate(nn.Module):
    """Top-k softmax router: scores every token against every expert and keeps the k best."""

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.num_experts = config.experts
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))

    def forward(self, hidden_states: Tensor, boost: LayerBoost | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``[T, H]`` -> probabilities ``[T, E]``, chosen experts ``[T, k]``, their weights ``[T, k]``.

        Computed in fp32 under autocast too: rounding here would change which experts are chosen. With
        k > 1 the weights of a token sum to 1; with k = 1 the weight stays the probability, because
        otherwise the gate would get no gradient from the loss (Switch, section 2.1).
        """
        with torch.autocast(hidden_states.device.type, enabled=False):
            probabilities = F.linear(hidden_states.float(), self.weight.float()).softmax(dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if boost is not None:
            chosen = boost.select(probabilities, chosen)
            weights = probabilities.gather(-1, chosen)
        if self.top_k > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return probabilities, chosen, weights


class Experts(nn.Module):
    """E two-layer MLPs stacked along dim 0: slice e of every parameter is expert e."""

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__()
        inner = config.ffn_multiple * config.hidden
        self.num_experts = config.experts
        self.up_proj = nn.Parameter(torch.empty(config.experts, inner, config.hidden))
        self.up_bias = nn.Parameter(torch.zeros(config.experts, inner))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.hidden, inner))
        self.down_bias = nn.Parameter(torch.zeros(config.experts, config.hidden))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[T, H]``, ``[T, k]``, ``[T, k]`` -> ``[T, H]``, the weighted sum of the chosen experts' outputs.

        An index of ``num_experts`` means: dropped, no expert. The loop goes over experts in order, so
        the sums are formed in one order and runs repeat bit for bit.
        """
        output = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            inner = F.linear(hidden_states[token], self.up_proj[expert], self.up_bias[expert])
            out = F.linear(F.gelu(inner, approximate="tanh"), self.down_proj[expert], self.down_bias[expert])
            output = output.index_add(0, token, (out * top_k_weights[token, slot, None]).to(output.dtype))
        return output


class MoELayer(nn.Module):
    """Gate and experts in place of an MLP. ``aux_loss`` holds the balancing loss of the last forward.

    ``moe_boost`` is set by MoECheckpoint while experts have lost tokens to make up (docs/moetion.md).
    """

    moe_boost: LayerBoost | None = None

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts: nn.Module = Experts(config)
        self.capacity_factor = config.capacity_factor
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``[B, S, H]`` -> ``[B, S, H]``."""
        tokens = x.reshape(-1, x.shape[-1])
        probabilities, chosen, weights = self.gate(tokens, self.moe_boost if self.capacity_factor is None else None)
        self.aux_loss = load_balancing_loss(probabilities, chosen)
        if self.capacity_factor is not None:
            chosen = drop_over_capacity(chosen, self.gate.num_experts, self.capacity_factor, self.moe_boost)
        mixed: Tensor = self.experts(tokens, chosen, weights)
        return mixed.reshape(x.shape)


def load_balancing_loss(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """``E * sum_e f_e * P_e``: 1 when routing is even, E when one expert gets all (Switch, eq. 4).

    f_e is the share of assignments that went to expert e, P_e the mean probability it was given.
    """
    experts = probabilities.shape[-1]
    share = torch.bincount(chosen.flatten(), minlength=experts).to(probabilities.dtype) / chosen.numel()
    return experts * (share * probabilities.mean(dim=0)).sum()


def drop_over_capacity(chosen: Tensor, experts: int, capacity_factor: float, boost: LayerBoost | None = None) -> Tensor:
    """``[T, k]`` with assignments beyond each expert's capacity replaced by ``experts`` (meaning: dropped).

    First choices come before second choices, then earlier tokens before later ones (GShard, alg. 1).
    """
    tokens, top_k = chosen.shape
    capacity = math.ceil(capacity_factor * tokens * top_k / experts)
    by_choice = chosen.t().reshape(-1)
    earlier = F.one_hot(by_choice, experts).cumsum(dim=0).gather(1, by_choice[:, None]).squeeze(1) - 1
    room = capacity if boost is None else boost.capacities(torch.bincount(by_choice, minlength=experts), capacity)
    kept = torch.where(earlier < (room if isinstance(room, int) else room[by_choice]), by_choice, experts)
    return kept.reshape(top_k, tokens).t()


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return projected


class MLP(nn.Sequential):
    """The dense feed-forward part of blocks without experts."""

    def __init__(self, config: GPTMoEConfig) -> None:
        inner = config.ffn_multiple * config.hidden
        super().__init__(nn.Linear(config.hidden, inner), nn.GELU("tanh"), nn.Linear(inner, config.hidden))


class Block(nn.Module):
    def __init__(self, config: GPTMoEConfig, moe: bool) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.hidden)
        self.mlp: nn.Module = MoELayer(config) if moe else MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        out: Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return out


class GPTMoE(nn.Module):
    """Token ids ``[B, S]`` -> logits ``[B, S, vocab]`` and the mean balancing loss of the MoE layers."""

    def __init__(self, config: GPTMoEConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.position_embedding = nn.Embedding(config.context, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, moe=(i + 1) % config.moe_every == 0) for i in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """GPT-2's initialisation: normal, projections back into the residual scaled by 1/sqrt(2 L)."""
        residual_std = self.config.init_std / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2 and not name.endswith("_bias"):
                into_residual = name.endswith(("attention.out.weight", "mlp.2.weight", "down_proj"))
                nn.init.normal_(parameter, std=residual_std if into_residual else self.config.init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if tokens.shape[1] > self.config.context:
            raise ValueError(f"sequence of {tokens.shape[1]} tokens, but context is {self.config.context}")
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token_embedding.weight)
        layers = [block.mlp for block in self.blocks if isinstance(block.mlp, MoELayer)]
        return logits, torch.stack([layer.aux_loss for layer in layers if layer.aux_loss is not None]).mean()


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and inverse-square-root decay (PEC paper, appendix A)."""

    lr: float = 3e-4
    warmup_steps: int = 100
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)


class GPTMoELightning(LightningModule):
    """Next-token training of a ``GPTMoE``. Batches are token ids ``[B, S + 1]``."""

    def __init__(
        self,
        config: GPTMoEConfig | Mapping[str, Any] | None = None,
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.config = config if isinstance(config, GPTMoEConfig) else GPTMoEConfig(**(config or {}))
        self.optimizer_config = (
            optimizer if isinstance(optimizer, OptimizerConfig) else OptimizerConfig(**(optimizer or {}))
        )
        # Plain dicts, so that the hyper-parameters can be written without pickle.
        self.save_hyperparameters({"config": asdict(self.config), "optimizer": asdict(self.optimizer_config)})
        self.model = GPTMoE(self.config)

    def losses(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats per token, and the balancing loss."""
        logits, balance = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()), balance

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        language, balance = self.losses(batch)
        return {"loss": language + self.config.aux_loss * balance, "language_loss": language.detach()}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.losses(batch)[0], sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        decayed = [p for n, p in self.named_parameters() if p.ndim >= 2 and not n.endswith("_bias")]
        plain = [p for n, p in self.named_parameters() if p.ndim < 2 or n.endswith("_bias")]
        groups = [
            {"params": decayed, "weight_decay": self.optimizer_config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        beta_1, beta_2 = self.optimizer_config.betas  # a list where it comes from YAML
        optimizer = torch.optim.AdamW(groups, lr=self.optimizer_config.lr, betas=(beta_1, beta_2))
        warmup = max(1, self.optimizer_config.warmup_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
