"""The stack of layers that ``pretrain_hybrid.py --spec tests.support.megatron_hybrid local_stack`` builds on a CPU.

Attention and MoE layers of the plain implementation; Megatron-LM's own specs need Transformer Engine, and so does the
norm that every such stack ends in. Imported by the script, in a rank.
"""

from __future__ import annotations

from typing import Any


def _stack() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer import transformer_layer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def layer(kind: str, **parts: Any) -> Any:
        submodules = transformer_layer.TransformerLayerSubmodules(**parts)
        return ModuleSpec(module=getattr(transformer_layer, kind), submodules=submodules)

    hybrid_block.TENorm = WrappedTorchNorm
    dense = get_gpt_layer_local_spec().submodules
    moe = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False).submodules
    attention = {"input_layernorm": dense.input_layernorm, "self_attention": dense.self_attention}
    experts = {"pre_mlp_layernorm": moe.pre_mlp_layernorm, "mlp": moe.mlp}
    return ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            attention_layer=layer("TransformerLayer", **attention, self_attn_bda=get_bias_dropout_add),
            moe_layer=layer("MoETransformerLayer", **experts, mlp_bda=get_bias_dropout_add),
        ),
    )


local_stack = _stack()
