"""Swin Transformers with experts (PEC, table 2): from stage to stage layers get wider and see fewer tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.checks import whole
from moe_ckpt_sim.workload.model import LayerShape, PaperFigure, SimModel, Weight, assemble, experts_of, single

_BIAS_WIDTH = 512
"""Width of the hidden layer that turns two relative coordinates into one bias per head."""


@dataclass(frozen=True)
class SwinSpec:
    """A Swin-MoE by its widths, with the parameters of Microsoft's published code (Swin-Transformer, ``swin_moe``).

    Attributes:
        image_size, patch_size, window_size: Pixels, pixels and patches along a side.
        embed_dim: Width in the first stage, doubled in each that follows, as the patches along a side are halved.
        depths, num_heads: Layers, and heads of each, of every stage.
        moe_from_stage: In this stage (the first is 0) and those after it, the second of every two layers has experts.
    """

    name: str
    image_size: int
    window_size: int
    embed_dim: int
    depths: Sequence[int]
    num_heads: Sequence[int]
    experts: int
    top_k: int
    moe_from_stage: int
    classes: int
    patch_size: int = 4
    channels: int = 3
    mlp_ratio: int = 4
    paper: PaperFigure | None = None

    def __post_init__(self) -> None:
        owner = f"SwinSpec {self.name!r}"
        whole(owner, image_size=self.image_size, patch_size=self.patch_size, window_size=self.window_size)
        whole(owner, embed_dim=self.embed_dim, experts=self.experts, top_k=self.top_k, classes=self.classes)
        whole(owner, channels=self.channels, mlp_ratio=self.mlp_ratio)
        whole(owner, 0, moe_from_stage=self.moe_from_stage)
        if len(self.depths) != len(self.num_heads) or not self.depths:
            raise ConfigError(
                f"{owner}(depths={list(self.depths)}, num_heads={list(self.num_heads)}): one of each per stage"
            )
        for stage, (depth, heads) in enumerate(zip(self.depths, self.num_heads, strict=True)):
            whole(owner, **{f"depths[{stage}]": depth, f"num_heads[{stage}]": heads})
        if self.top_k > self.experts:
            raise ConfigError(f"{owner}(top_k={self.top_k}, experts={self.experts}): top_k must not exceed experts")
        halved = self.patch_size * 2 ** (len(self.depths) - 1)
        if self.image_size % halved:
            raise ConfigError(
                f"{owner}(image_size={self.image_size}, patch_size={self.patch_size}): with {len(self.depths)} stages, "
                f"image_size must be a multiple of {halved}"
            )
        if not self.moe_layers:
            raise ConfigError(
                f"{owner}(depths={list(self.depths)}, moe_from_stage={self.moe_from_stage}): "
                "no layer is left for experts"
            )

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The stage of each layer of the network, and its index in that stage."""
        return tuple((stage, at) for stage, depth in enumerate(self.depths) for at in range(depth))

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(i for i, (stage, at) in enumerate(self.places) if stage >= self.moe_from_stage and at % 2)

    def shape(self, stage: int) -> LayerShape:
        """The shape of the layers of ``stage``. A window larger than the remaining image covers all of it."""
        side = self.image_size // self.patch_size // 2**stage
        return LayerShape(side**2, self.embed_dim * 2**stage, min(side, self.window_size) ** 2)

    def build(self) -> SimModel:
        """Make the model, in the order of the network. Its ``seq`` is an image's tokens in the first MoE layer."""
        shapes = tuple(self.shape(stage) for stage, _ in self.places)
        seq = shapes[self.moe_layers[0]].tokens
        return assemble(self.name, self._weights(), self.moe_layers, self.experts, self.top_k, seq, shapes)

    def _weights(self) -> Iterator[Weight]:
        first, last = self.embed_dim, self.embed_dim * 2 ** (len(self.depths) - 1)
        yield single("patch_embedding", (self.channels * self.patch_size**2 + 3) * first, -1)
        index = 0
        for layer, (stage, at) in enumerate(self.places):
            width = self.shape(stage).width
            if stage and not at:  # four neighbours become one token of twice the width
                yield single(f"layers.{layer}.merging", 2 * width * width + 4 * width, layer)
            yield single(f"layers.{layer}.attention", self._attention(width, self.num_heads[stage]), layer)
            hidden = self.mlp_ratio * width
            mlp = 2 * width * hidden + hidden  # the second matrix has no bias
            if layer in self.moe_layers:
                yield from experts_of(index, self.experts, width * self.experts, mlp, layer)
                index += 1
            else:
                yield single(f"layers.{layer}.ffn", mlp, layer)
        yield single("final_norm", 2 * last, len(self.places))
        yield single("head", (last + 1) * self.classes, len(self.places))

    def _attention(self, width: int, heads: int) -> int:
        """The parameters of attention, both norms and the position bias."""
        return 4 * width**2 + 4 * width + 4 * width + (2 + 1 + heads) * _BIAS_WIDTH
