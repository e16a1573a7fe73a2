"""A model as checkpointing sees it: its operators and the parameters of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moe_ckpt.core.operators import Catalog, MoELayer, Operator, OperatorKind, Span, expert_id, gate_id, non_expert_id
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.checks import MOST_WHOLE, above_zero, not_none, whole


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of compute weights, of master weights, and of both moments together.

    Attributes:
        gradient_bytes: Bytes of the gradient that the optimizer consumes; None: those of the masters, and at least 2.
        full_bytes: Bytes in a full snapshot. As in the papers, it has masters and moments but no compute weights (12
            bytes with fp32 Adam).
    """

    compute_bytes: float = 2.0
    master_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    name: str = "fp16, fp32 + fp32"
    gradient_bytes: float | None = None

    def __post_init__(self) -> None:
        above_zero("Precision", **not_none(gradient_bytes=self.gradient_bytes))
        above_zero("Precision", compute_bytes=self.compute_bytes, master_bytes=self.master_bytes)
        above_zero("Precision", optimizer_bytes=self.optimizer_bytes)

    @property
    def full_bytes(self) -> float:
        return self.master_bytes + self.optimizer_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes per parameter of a full snapshot that forward and backward read, if these are the masters."""
        return self.master_bytes if self.compute_bytes >= self.master_bytes else 0.0

    @property
    def consumed_bytes(self) -> float:
        """Bytes per parameter that the optimizer consumes in one update."""
        return max(2.0, self.master_bytes) if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True)
class PaperFigure:
    """The parameters of the model that a paper states.

    Attributes:
        total, active: Parameters; None if the paper does not state them.
        matched: The figures that the widths reproduce: "total" or "both".
    """

    name: str
    total: float
    active: float | None = None
    matched: str = "both"


@dataclass(frozen=True)
class ModelSpec:
    """A GPT-MoE by its widths. The names are those of recipes/gpt_moe_megatron.

    Attributes:
        moe_every: Every n-th layer has experts; 1: all layers.
        dense_layers: Number of first layers without experts.
        expert_ffn, ffn, shared_expert_ffn: Width of an expert, of the FFN of layers without experts, of all shared
            experts together; ``ffn`` None: 4 * hidden.
        gated: Three matrices in each FFN instead of two.
        bias: Biases in attention and FFNs, those of experts included.
        attention_params: Parameters of attention in a layer, if not 4 * hidden**2 (latent attention, grouped queries).
        learned_positions: ``seq`` x ``hidden`` further parameters.
        tied: The head is the embedding.
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
        whole(owner, **not_none(ffn=self.ffn, attention_params=self.attention_params))
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
        """The layers that have experts."""
        return tuple(i for i in range(self.dense_layers, self.layers) if (i + 1) % self.moe_every == 0)

    def ffn_params(self, width: int) -> int:
        """The parameters of a feed-forward block of that width."""
        matrices = (3 if self.gated else 2) * self.hidden * width
        return matrices + (width * (2 if self.gated else 1) + self.hidden if self.bias else 0)

    @cached_property
    def attention(self) -> int:
        """The parameters of attention and both norms of one layer."""
        norms = 2 * self.hidden * (2 if self.bias else 1)
        if self.attention_params is not None:
            return self.attention_params + norms
        return 4 * self.hidden**2 + (4 * self.hidden if self.bias else 0) + norms

    def build(self) -> SimModel:
        """Make the model, with its operators in the order of the network."""
        shapes = (LayerShape(self.seq, self.hidden, self.seq),) * self.layers
        return assemble(self.name, self._weights(), self.moe_layers, self.experts, self.top_k, self.seq, shapes)

    def _weights(self) -> Iterator[Weight]:
        embedding = self.vocab * self.hidden + (self.seq * self.hidden if self.learned_positions else 0)
        yield single("embedding", embedding, -1)
        at = {layer: index for index, layer in enumerate(self.moe_layers)}
        for layer in range(self.layers):
            yield single(f"layers.{layer}.attention", self.attention, layer)
            if layer not in at:
                yield single(f"layers.{layer}.ffn", self.ffn_params(self.ffn or 4 * self.hidden), layer)
                continue
            if self.shared_expert_ffn:
                yield single(f"layers.{layer}.shared", self.ffn_params(self.shared_expert_ffn), layer)
            expert_params = self.ffn_params(self.expert_ffn)
            yield from experts_of(at[layer], self.experts, self.hidden * self.experts, expert_params, layer)
        yield single("final_norm", self.hidden * (2 if self.bias else 1), self.layers)
        if not self.tied:
            yield single("head", self.vocab * self.hidden, self.layers)


@dataclass(frozen=True)
class LayerShape:
    """The shape of a layer's activations.

    Attributes:
        tokens: Tokens of one sequence.
        width: Width of each token.
        span: Tokens that each token attends to.
    """

    tokens: int
    width: int
    span: int


@dataclass(frozen=True)
class SimModel:
    """A model with the facts that policies and costs need.

    Attributes:
        elements: Parameters of each operator.
        stage_layer: The layer of the network that an operator belongs to; -1 before the first layer and
            ``network_layers`` after the last.
        seq: Tokens of one sequence that its first MoE layer routes.
        shapes: Shape of each layer of the network; None if unknown, and then iterations cannot be estimated.
        exact_bytes: Bytes of every operator as measured in a run; None: elements times the precision's bytes.
    """

    name: str
    catalog: Catalog
    elements: Mapping[str, int]
    stage_layer: Mapping[str, int]
    network_layers: int
    top_k: int
    seq: int = 2048
    shapes: tuple[LayerShape, ...] | None = None
    exact_bytes: Mapping[str, OperatorBytes] | None = None

    @cached_property
    def total(self) -> int:
        """All parameters."""
        return sum(self.elements.values())

    @cached_property
    def active(self) -> int:
        """The parameters that one token uses, embeddings included."""
        one = {op.layer: self.elements[op.id] for op in self.catalog.experts}
        return self.total - sum((layer.experts - self.top_k) * one[layer.index] for layer in self.catalog.layers)

    @cached_property
    def expert_total(self) -> int:
        """The parameters in experts."""
        return sum(self.elements[op.id] for op in self.catalog.experts)

    def sizes(self, precision: Precision) -> dict[str, OperatorBytes]:
        """The bytes of every operator."""
        if self.exact_bytes is not None:
            return dict(self.exact_bytes)
        return {
            op: OperatorBytes(*(round(n * width) for width in _widths(precision))) for op, n in self.elements.items()
        }


def _widths(precision: Precision) -> tuple[float, float, float, float]:
    return precision.full_bytes, precision.compute_bytes, precision.consumed_bytes, precision.weight_bytes


def assemble(
    name: str,
    weights: Iterable[Weight],
    moe_layers: Sequence[int],
    experts: int,
    top_k: int,
    seq: int,
    shapes: tuple[LayerShape, ...],
) -> SimModel:
    """Make a model of operators, which are in the order of the network.

    Args:
        moe_layers: The layers that have ``experts`` experts.
    """
    rows = tuple(weights)
    total = sum(row.elements for row in rows)
    if total > MOST_WHOLE:
        raise ConfigError(f"model {name!r} would have {total} parameters, and {MOST_WHOLE} are the most that count")
    layers = tuple(MoELayer(at, f"layers.{i}", experts, top_k) for at, i in enumerate(moe_layers))
    # Policies ask for ids, kinds and layers only: one made-up parameter stands for each operator.
    catalog = Catalog(tuple(row.operator for row in rows), layers, {row.operator.id: (1,) for row in rows})
    return SimModel(
        name=name,
        catalog=catalog,
        elements={row.operator.id: row.elements for row in rows},
        stage_layer={row.operator.id: row.layer for row in rows},
        network_layers=len(shapes),
        top_k=top_k,
        seq=seq,
        shapes=shapes,
    )


class Weight(NamedTuple):
    """An operator, its parameters, and the layer of the network that it belongs to, as ``SimModel.stage_layer``."""

    operator: Operator
    elements: int
    layer: int


def single(group: str, elements: int, layer: int) -> Weight:
    """An operator that is neither an expert nor a gate."""
    name = non_expert_id(group)
    return Weight(Operator(name, OperatorKind.NON_EXPERT, (Span(name),)), elements, layer)


def experts_of(index: int, experts: int, gate_params: int, expert_params: int, layer: int) -> Iterator[Weight]:
    """The gate and the experts of one MoE layer.

    Args:
        gate_params, expert_params: Parameters of the gate, and of each expert.
    """
    name = gate_id(index)
    yield Weight(Operator(name, OperatorKind.GATE, (Span(name),), index), gate_params, layer)
    for expert in range(experts):
        name = expert_id(index, expert)
        yield Weight(Operator(name, OperatorKind.EXPERT, (Span(name),), index, expert), expert_params, layer)
