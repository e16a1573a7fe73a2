"""Megatron's tensors under the names that Megatron-Bridge knows on the hub, of more families than ``hub_names``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.interop.hub_names import BRIDGE, FAMILIES, HubModel, HubTensor, ListedModel, Shape, rows

_ALIKE = ("AutoMapping", "DirectMapping", "ReplicatedMapping", "ColumnParallelMapping", "RowParallelMapping")
"""Bridge's mappings of a tensor that is the same on the hub."""
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


class BridgeModel(HubModel):
    """A model by what Megatron-Bridge knows of its family.

    Args:
        config: Content of ``config.json``.
        path: Of its directory.

    Raises:
        UnsupportedError: Megatron-Bridge is not installed, or does not know the family.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        try:
            from megatron.bridge import AutoBridge
        except ImportError as error:
            raise UnsupportedError(
                f"--to hf writes Megatron checkpoints as {' and '.join(FAMILIES)}, and this config is of a model_type "
                f"{config.get('model_type')!r}. Of other families Megatron-Bridge has the names, which cannot be "
                f"imported here (pip install megatron-bridge): {error}. {BRIDGE}"
            ) from error
        try:
            bridge: Any = AutoBridge.from_hf_pretrained(str(path))
            self._settings = bridge.to_megatron_provider(load_weights=False)
        except ValueError as error:
            raise UnsupportedError(f"Megatron-Bridge does not know the model of {path}: {error}") from error
        self._names, self._path = bridge._model_bridge.mapping_registry(), path
        heads, groups = self._settings.num_attention_heads, self._settings.num_query_groups
        super().__init__(config, heads, groups or heads, self._settings.kv_channels or 0)

    def _architecture(self) -> Mapping[str, Any]:
        settings = {name: getattr(value, "__name__", value) for name, value in vars(self._settings).items()}
        unused = {name for name, value in settings.items() if value is None}
        if settings.get("multi_latent_attention"):
            unused |= {"kv_channels", "num_query_groups", "position_embedding_type"}
        if settings.get("moe_router_score_function") != "softmax":
            unused.add("moe_router_pre_softmax")
        return {name: value for name, value in settings.items() if name not in unused}

    def _parts(self, name: str, shape: Shape) -> Iterator[tuple[str, HubTensor]]:
        expert = re.sub(r"\.experts\.(\d+)\.", r".experts.local_experts.\1.", name)
        grouped = re.sub(r"\.experts\.(\d+)\.(.+)", r".experts.\2\1", name)
        mapping = self._names.megatron_to_hf_lookup(expert) or self._names.megatron_to_hf_lookup(grouped)
        if mapping is None:
            return
        kind, names = type(mapping).__name__, mapping.hf_param
        half = shape[0] // 2 if shape else 0
        if kind in _ALIKE and isinstance(names, str) and getattr(mapping, "permute_dims", None) is None:
            is_padded = name in _PADDED and shape[0] >= self._vocabulary
            result = (self._vocabulary, *shape[1:]) if is_padded else shape
            yield names, HubTensor(name, result, partial(rows, 0, self._vocabulary) if is_padded else None)
        elif kind == "GatedMLPMapping":
            yield names["gate"], HubTensor(name, (half, *shape[1:]), partial(rows, 0, half))
            yield names["up"], HubTensor(name, (half, *shape[1:]), partial(rows, half, 2 * half))
        elif kind == "QKVMapping":
            for at, (letter, heads) in enumerate((("q", self._heads), ("k", self._groups), ("v", self._groups))):
                result = (heads * self._head, *shape[1:])
                yield names[letter], HubTensor(name, result, partial(self._attention, at))

    def _problems(self, made: Mapping[str, HubTensor]) -> list[str]:
        """Compares sizes alone: transformers has experts under other names than the hub, stacked."""
        from transformers import AutoConfig, AutoModelForCausalLM

        models: Any = AutoModelForCausalLM
        with torch.device("meta"):
            model: nn.Module = models.from_config(AutoConfig.from_pretrained(self._path))
        names = {name for name, _ in model.named_parameters()}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
        needed: Counter[int] = Counter()
        for name, tensor in model.state_dict().items():
            needed[_layer(name)] += 0 if name in tied else tensor.numel()
        saved: Counter[int] = Counter()
        for name, made_of in made.items():
            saved[_layer(name)] += prod(made_of.shape)
        return [
            f"{needed[layer]:,} numbers {'outside of layers' if layer < 0 else f'in layer {layer}'}, and the run has "
            f"{saved[layer]:,}"
            for layer in range(-1, self._number("num_hidden_layers"))  # further ones predict more tokens
            if needed[layer] != saved[layer]
        ]


def _layer(name: str) -> int:
    match = re.search(r"\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def hub_model(config: Mapping[str, Any], path: Path) -> HubModel:
    """Returns the model of a ``config.json`` in the directory ``path``.

    Raises:
        UnsupportedError: Nobody here knows its names.
        ConfigError: It lacks an entry.
    """
    return ListedModel(config) if config.get("model_type") in FAMILIES else BridgeModel(config, path)
