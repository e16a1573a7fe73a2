"""A model as checkpointing sees it: its operators, and how many parameters each has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moe_ckpt.core.operators import Catalog, MoELayer, Operator, OperatorKind, Span, expert_id, gate_id, non_expert_id
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.checks import MOST_WHOLE, above_zero, given, whole


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of what forward and backward read, of the master weights, and of both moments together.

    Attributes:
        gradient_bytes: Of what the optimizer consumes; None: as wide as the masters, and 2 at least.
        full_bytes: In a snapshot at full fidelity. The papers save masters and moments and no compute weights beside
            them (12 bytes with fp32 Adam), which is what counts here.
    """

    compute_bytes: float = 2.0
    master_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    name: str = "fp16, fp32 + fp32"
    gradient_bytes: float | None = None

    def __post_init__(self) -> None:
        above_zero("Precision", **given(gradient_bytes=self.gradient_bytes))
        above_zero("Precision", compute_bytes=self.compute_bytes, master_bytes=self.master_bytes)
        above_zero("Precision", optimizer_bytes=self.optimizer_bytes)

    @property
    def full_bytes(self) -> float:
        return self.master_bytes + self.optimizer_bytes

    @property
    def weight_bytes(self) -> float:
        """Per parameter, of a full snapshot, what forward and backward read. Masters beside that are none of it."""
        return self.master_bytes if self.compute_bytes >= self.master_bytes else 0.0

    @property
    def consumed_bytes(self) -> float:
        """Per parameter, what the optimizer consumes in one update."""
        return max(2.0, self.master_bytes) if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True)
class PaperFigure:
    """What a paper says of the model.

    Attributes:
        total, active: Parameters; None where it does not say.
        matched: Which of the two the widths give: "total" or "both".
    """

    name: str
    total: float
    active: float | None = None
    matched: str = "both"


@dataclass(frozen=True)
class ModelSpec:
    """A GPT-MoE by its widths. The names are those of recipes/gpt_moe_megatron.

    Attributes:
        moe_every: Each n-th layer has experts, the last of n; 1 for all.
        dense_layers: That many first layers have none.
        expert_ffn, ffn, shared_expert_ffn: Width of an expert, of the FFN of layers without experts, of all shared
            experts together; ``ffn`` None: 4 * hidden.
        gated: Three matrices in each FFN instead of two.
        bias: Biases in attention and FFNs, of experts too.
        attention_params: Of one layer, where it is not 4 * hidden**2 (latent attention, grouped queries).
        learned_positions: ``seq`` x ``hidden`` more.
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
        whole(owner, **given(ffn=self.ffn, attention_params=self.attention_params))
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

    def build(self) -> SimModel:
        """The operators, in the order of the network."""
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
            each = self.ffn_params(self.expert_ffn)
            yield from experts_of(at[layer], self.experts, self.hidden * self.experts, each, layer)
        yield single("final_norm", self.hidden * (2 if self.bias else 1), self.layers)
        if not self.tied:
            yield single("head", self.vocab * self.hidden, self.layers)


@dataclass(frozen=True)
class LayerShape:
    """What a layer works on.

    Attributes:
        tokens: Of one sequence.
        width: Of each.
        span: Tokens that each attends to.
    """

    tokens: int
    width: int
    span: int


@dataclass(frozen=True)
class SimModel:
    """What policies and costs need to know of a model.

    Attributes:
        elements: Parameters of each operator.
        stage_layer: Operator -> layer of the network that it belongs to, -1 for what comes before the first and
            ``network_layers`` for what comes after the last.
        seq: Tokens of one sequence, as its first MoE layer routes them.
        shapes: Of each layer of the network; None where they are not known, and then iterations cannot be estimated.
        exact_bytes: What every operator was weighed to be in a real run; None: elements times the precision's bytes.
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
        return {op: OperatorBytes(*(round(n * each) for each in _widths(precision))) for op, n in self.elements.items()}


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
    """A model of operators in the order of the network.

    Args:
        moe_layers: Which of its layers have ``experts`` experts.
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
    """What is no part of experts or gates."""
    name = non_expert_id(group)
    return Weight(Operator(name, OperatorKind.NON_EXPERT, (Span(name),)), elements, layer)


def experts_of(index: int, experts: int, gate: int, each: int, layer: int) -> Iterator[Weight]:
    """The gate and the experts of one MoE layer.

    Args:
        gate, each: Parameters.
    """
    name = gate_id(index)
    yield Weight(Operator(name, OperatorKind.GATE, (Span(name),), index), gate, layer)
    for expert in range(experts):
        name = expert_id(index, expert)
        yield Weight(Operator(name, OperatorKind.EXPERT, (Span(name),), index, expert), each, layer)
