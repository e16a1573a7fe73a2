"""A model as checkpointing sees it: its operators, and how many parameters each has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from moe_ckpt.core.operators import Catalog, MoELayer, Operator, OperatorKind, Span, expert_id, gate_id, non_expert_id
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.errors import ConfigError
from moe_ckpt.sim.checks import above_zero, whole


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of what forward and backward read, of the master weights, and of both moments together.

    full_bytes: in a snapshot at full fidelity. The papers save masters and moments and no compute weights beside them
    (12 bytes with fp32 Adam), which is what counts here.
    """

    compute_bytes: float = 2.0
    master_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    name: str = "fp16, fp32 + fp32"

    def __post_init__(self) -> None:
        above_zero("Precision", compute_bytes=self.compute_bytes, master_bytes=self.master_bytes)
        above_zero("Precision", optimizer_bytes=self.optimizer_bytes)

    @property
    def full_bytes(self) -> float:
        return self.master_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class PaperFigure:
    """What a paper says of the model. total, active: parameters; None where it does not say. matched: which of the two
    the widths give: "total" or "both"."""

    name: str
    total: float
    active: float | None = None
    matched: str = "both"


@dataclass(frozen=True)
class ModelSpec:
    """A GPT-MoE by its widths. The names are those of recipes/gpt_moe_megatron.

    moe_every: each n-th layer has experts, the last of n; 1 for all. dense_layers: the first so many have none anyway.
    expert_ffn, ffn, shared_expert_ffn: width of an expert, of the FFN of layers without experts, of all shared experts
        together; ``ffn`` None: 4 * hidden.
    gated: three matrices in each FFN instead of two. bias: biases in attention and FFNs, of experts too.
    attention_params: of one layer, where it is not 4 * hidden**2 (latent attention, grouped queries).
    learned_positions: ``seq`` x ``hidden`` more. tied: the head is the embedding.
    """

    name: str
    layers: int
    hidden: int
    experts: int
    top_k: int
    expert_ffn: int
    vocab: int
    seq: int = 2048
    moe_every: int = 1
    dense_layers: int = 0
    ffn: int | None = None
    shared_expert_ffn: int = 0
    gated: bool = False
    bias: bool = True
    attention_params: int | None = None
    learned_positions: bool = False
    tied: bool = False
    paper: PaperFigure | None = None

    def __post_init__(self) -> None:
        owner = f"ModelSpec {self.name!r}"
        whole(owner, layers=self.layers, hidden=self.hidden, experts=self.experts, top_k=self.top_k)
        whole(owner, expert_ffn=self.expert_ffn, vocab=self.vocab, seq=self.seq, moe_every=self.moe_every)
        whole(owner, ffn=self.ffn, attention_params=self.attention_params)
        whole(owner, 0, dense_layers=self.dense_layers, shared_expert_ffn=self.shared_expert_ffn)
        if self.top_k > self.experts:
            raise ConfigError(f"{owner}(top_k={self.top_k}, experts={self.experts}): top_k must not exceed experts")
        if not self.moe_layers:
            raise ConfigError(
                f"{owner}(layers={self.layers}, dense_layers={self.dense_layers}, moe_every={self.moe_every}): "
                "no layer is left for experts"
            )

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Which layers have experts."""
        return tuple(i for i in range(self.dense_layers, self.layers) if (i + 1) % self.moe_every == 0)

    def ffn_params(self, width: int) -> int:
        """Of a feed-forward block ``width`` wide."""
        matrices = (3 if self.gated else 2) * self.hidden * width
        return matrices + (width * (2 if self.gated else 1) + self.hidden if self.bias else 0)

    @cached_property
    def attention(self) -> int:
        """Attention and both norms of one layer."""
        norms = 2 * self.hidden * (2 if self.bias else 1)
        if self.attention_params is not None:
            return self.attention_params + norms
        return 4 * self.hidden**2 + (4 * self.hidden if self.bias else 0) + norms


@dataclass(frozen=True)
class SimModel:
    """What policies and costs need to know of a model.

    elements: parameters of each operator. stage_layer: operator -> layer of the network that it belongs to, -1 for what
        comes before the first and ``network_layers`` for what comes after the last.
    hidden: width of what layers hand on; None where it is not known, and then iterations cannot be estimated.
    exact_bytes: what every operator was weighed to be in a real run; None: elements times the precision's bytes.
    """

    name: str
    catalog: Catalog
    elements: Mapping[str, int]
    stage_layer: Mapping[str, int]
    network_layers: int
    top_k: int
    seq: int = 2048
    hidden: int | None = None
    exact_bytes: Mapping[str, OperatorBytes] | None = None

    @cached_property
    def total(self) -> int:
        """Parameters."""
        return sum(self.elements.values())

    @cached_property
    def active(self) -> int:
        """Parameters that one token uses, embeddings included."""
        one = {op.layer: self.elements[op.id] for op in self.catalog.experts}
        return self.total - sum((layer.experts - self.top_k) * one[layer.index] for layer in self.catalog.layers)

    @cached_property
    def expert_total(self) -> int:
        """Parameters in experts."""
        return sum(self.elements[op.id] for op in self.catalog.experts)

    def sizes(self, precision: Precision) -> dict[str, OperatorBytes]:
        """Bytes of every operator."""
        if self.exact_bytes is not None:
            return dict(self.exact_bytes)
        return {
            op: OperatorBytes(round(n * precision.full_bytes), round(n * precision.compute_bytes))
            for op, n in self.elements.items()
        }


def build(spec: ModelSpec) -> SimModel:
    """The operators of ``spec``, in the order of the network."""
    rows = list(_operators(spec))
    layers = tuple(MoELayer(at, f"layers.{i}", spec.experts, spec.top_k) for at, i in enumerate(spec.moe_layers))
    # Policies ask for ids, kinds and layers only: one made-up parameter stands for each operator.
    catalog = Catalog(tuple(op for op, _, _ in rows), layers, {op.id: (1,) for op, _, _ in rows})
    return SimModel(
        spec.name,
        catalog,
        {op.id: count for op, count, _ in rows},
        {op.id: layer for op, _, layer in rows},
        spec.layers,
        spec.top_k,
        spec.seq,
        spec.hidden,
    )


def _operators(spec: ModelSpec) -> Iterator[tuple[Operator, int, int]]:
    """(operator, parameters, layer of the network)."""
    embedding = spec.vocab * spec.hidden + (spec.seq * spec.hidden if spec.learned_positions else 0)
    yield _non_expert("embedding"), embedding, -1
    at = {layer: index for index, layer in enumerate(spec.moe_layers)}
    for layer in range(spec.layers):
        yield _non_expert(f"layers.{layer}.attention"), spec.attention, layer
        if layer not in at:
            yield _non_expert(f"layers.{layer}.ffn"), spec.ffn_params(spec.ffn or 4 * spec.hidden), layer
            continue
        if spec.shared_expert_ffn:
            yield _non_expert(f"layers.{layer}.shared"), spec.ffn_params(spec.shared_expert_ffn), layer
        index = at[layer]
        gate = gate_id(index)
        yield Operator(gate, OperatorKind.GATE, (Span(gate),), index), spec.hidden * spec.experts, layer
        for expert in range(spec.experts):
            name = expert_id(index, expert)
            yield (
                Operator(name, OperatorKind.EXPERT, (Span(name),), index, expert),
                spec.ffn_params(spec.expert_ffn),
                layer,
            )
    yield _non_expert("final_norm"), spec.hidden * (2 if spec.bias else 1), spec.layers
    if not spec.tied:
        yield _non_expert("head"), spec.vocab * spec.hidden, spec.layers


def _non_expert(group: str) -> Operator:
    name = non_expert_id(group)
    return Operator(name, OperatorKind.NON_EXPERT, (Span(name),))
