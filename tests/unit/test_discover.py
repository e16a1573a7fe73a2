"""Every family of transformers with routed experts is recognised, with the right rows for each expert."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from moe_ckpt.core.operators import OperatorKind, gate_id
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.modeling import registry
from moe_ckpt.modeling.discover import FoundLayer, build_catalog, find_moe_layers, non_expert_group
from moe_ckpt.modeling.names import tied_aliases
from moe_ckpt.modeling.registry import register_moe
from tests.support.moe_models import FAMILIES, ListMoE, OwnMoE, Stack, family, tokens
from tests.support.tiny_moe import TinyMoE

transformers = pytest.importorskip("transformers")


@pytest.fixture
def registrations():
    before = dict(registry._REGISTERED)
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_recognised_with_its_experts(name):
    model = family(name)
    catalog = build_catalog(model)
    assert catalog.layers
    assert all(layer.experts == 4 for layer in catalog.layers)
    assert set(catalog.parameters) == {n for n, _ in model.named_parameters()}
    for layer in catalog.layers:
        assert gate_id(layer.index) in catalog.by_id
        assert catalog.by_id[gate_id(layer.index)].spans
    assert Counter(op.kind for op in catalog.operators)[OperatorKind.EXPERT] == 4 * len(catalog.layers)
    for op in catalog.operators:
        shared = [s.parameter for s in op.spans if "shared" in s.parameter]
        assert not shared or op.kind is OperatorKind.NON_EXPERT
        router = [s.parameter for s in op.spans if re.search(r"(router|\.gate)\.", s.parameter)]
        assert not router or op.kind is OperatorKind.GATE


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"JetMoe"}))
def test_changing_an_experts_rows_changes_only_the_tokens_routed_to_it(name):
    model = family(name).eval()
    parameters = dict(model.named_parameters())
    found = find_moe_layers(model)[0]
    before, routed = _layer_output(model, found)
    for expert in range(4):
        saved = {}
        with torch.no_grad():
            for span in found.experts[expert]:
                saved[span.parameter] = parameters[span.parameter].clone()
                rows = slice(*span.rows(tuple(parameters[span.parameter].shape)))
                parameters[span.parameter][rows] += 0.7
        after, _ = _layer_output(model, found)
        with torch.no_grad():
            for key, value in saved.items():
                parameters[key].copy_(value)
        changed = (before != after).any(-1)
        assert torch.equal(changed, routed[expert]), expert


def _layer_output(model: nn.Module, found: FoundLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [tokens, hidden] of the layer, bool [E, tokens] of who is routed where), in a second, plain way."""
    outputs: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    layer = model.get_submodule(found.info.name)
    hooks = [layer.register_forward_hook(lambda m, a, o: outputs.append(o[0] if isinstance(o, tuple) else o))]
    if found.source.kind == "rows":
        # The input rows of an expert are rows of the layer's input: find them there by value.
        inputs: list[torch.Tensor] = []
        rows: dict[int, torch.Tensor] = {}
        hooks.append(layer.register_forward_pre_hook(lambda m, a: inputs.append(a[0].flatten(0, -2))))
        for e, module in enumerate(found.source.modules):
            hooks.append(module.register_forward_pre_hook(lambda m, a, e=e: rows.__setitem__(e, a[0])))
    else:
        router = next(m for n, m in layer.named_children() if n in ("gate", "router"))
        hooks.append(router.register_forward_hook(lambda m, a, o: chosen.append(_chosen(o))))
    with torch.no_grad():
        model(**_batch(model), use_cache=False)
    for hook in hooks:
        hook.remove()
    out = outputs[0].flatten(0, -2)
    if found.source.kind == "rows":
        hit = [
            (inputs[0][:, None] == rows[e].reshape(1, -1, inputs[0].shape[-1])).all(-1).any(-1)
            if e in rows
            else torch.zeros(len(out), dtype=torch.bool)
            for e in range(4)
        ]
        return out, torch.stack(hit)
    return out, torch.stack([(chosen[0] == e).any(-1) for e in range(4)])


def _batch(model: nn.Module) -> dict[str, torch.Tensor]:
    batch = {"input_ids": tokens()}
    return {**batch, "decoder_input_ids": tokens(2)} if model.config.is_encoder_decoder else batch


def _chosen(output: object) -> torch.Tensor:
    """[tokens, k] from a router's output: its integer tensor, else (Llama 4) where its scores are not zero."""
    parts = output if isinstance(output, tuple) else (output,)
    whole = [p for p in parts if isinstance(p, torch.Tensor) and not p.is_floating_point()]
    return whole[0].flatten(0, -2) if whole else parts[0].argmax(-1, keepdim=True)


def test_an_expert_of_two_layers_is_refused_by_name():
    of_two = "'blocks.0.moe.experts.* belongs to expert {} of MoE layer 'blocks.0.moe' and to expert {} of MoE"
    listed = TinyMoE(stacked=False)
    first, second = (block.moe for block in listed.blocks)
    second.experts[2] = first.experts[3]
    with pytest.raises(UnsupportedError, match=of_two.format(3, 2) + " layer 'blocks.1.moe'.*one whole MoE layer"):
        find_moe_layers(listed)
    second.experts[2], first.experts[0] = second.experts[1], first.experts[3]
    with pytest.raises(UnsupportedError, match=of_two.format(0, 3) + " layer 'blocks.0.moe'"):
        find_moe_layers(listed)
    stacked = TinyMoE()
    stacked.blocks[1].moe.experts._parameters = dict(stacked.blocks[0].moe.experts._parameters)
    with pytest.raises(UnsupportedError, match=of_two.format(0, 0) + " layer 'blocks.1.moe'"):
        find_moe_layers(stacked)
    whole = TinyMoE()
    whole.blocks[1].moe = whole.blocks[0].moe
    assert [layer.info.name for layer in find_moe_layers(whole)] == ["blocks.0.moe"]


def test_every_experts_class_of_transformers_is_recognised():
    """On the meta device with default sizes: whatever *Experts modules a model has, a layer is found for each."""
    folder = Path(transformers.__file__).parent / "models"
    checked, skipped = [], []
    for path in sorted(folder.glob("*/modeling_*.py")):
        if not re.search(r"^class \w*Experts\(", path.read_text(), re.M):
            continue
        model, classes = _any_model(path)
        if model is None:
            skipped.append(path.parent.name)
            continue
        holders = {id(m): n for n, m in model.named_modules() if type(m) in classes}
        catalog = build_catalog(model)
        claimed = {s.parameter for op in catalog.experts for s in op.spans}
        lost = [n for n in holders.values() if not any(c.startswith(n + ".") for c in claimed)]
        assert not lost, f"{path.parent.name}: experts not recognised: {lost[:3]}"
        checked.append(path.parent.name)
    assert len(checked) >= 55, (checked, skipped)


def _any_model(path: Path) -> tuple[nn.Module | None, list[type]]:
    """A model of the file that has routed experts, and the file's classes of routed experts."""
    module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
    own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    classes = [c for c in own if c.__name__.endswith("Experts") and c.__name__ != "InklingSharedExperts"]
    for cls in own:
        if not issubclass(cls, transformers.PreTrainedModel) or cls.config_class is None:
            continue
        try:
            config = cls.config_class()
            if getattr(config, "num_hidden_layers", 0) > 8:
                config.num_hidden_layers = 8
            with torch.device("meta"):
                model = cls(config)
        except Exception:  # no default configuration for this class: try the file's next one
            continue
        if any(type(m) in classes for m in model.modules()):
            return model, classes
    return None, classes


def test_dbrx_rows_lie_in_flat_blocks():
    from transformers.models.dbrx import modeling_dbrx
    from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = DbrxFFNConfig(ffn_hidden_size=6, moe_num_experts=4, moe_top_k=2, hidden_size=8)
            config.moe_normalize_expert_weights = 1.0
            self.ffn = modeling_dbrx.DbrxFFN.__new__(modeling_dbrx.DbrxFFN)
            nn.Module.__init__(self.ffn)
            self.ffn.router = modeling_dbrx.DbrxRouter(config)
            self.ffn.experts = modeling_dbrx.DbrxExperts(config)
            self.ffn.top_k = 2

    catalog = build_catalog(Holder())
    spans = {s.parameter: (s.start, s.stop) for s in catalog.by_id["expert/0/2"].spans}
    assert spans == {f"ffn.experts.mlp.{w}": (12, 18) for w in ("w1", "v1", "w2")}
    assert catalog.layers[0].top_k == 2


def test_zero_computation_experts_rows_go_to_the_gate():
    catalog = build_catalog(family("LongcatFlash"))
    gate = catalog.by_id["gate/0"]
    assert ("model.layers.0.mlp.experts.gate_up_proj", 4, 6) in {(s.parameter, s.start, s.stop) for s in gate.spans}


def test_module_list_experts_beside_a_gate():
    catalog = build_catalog(Stack(ListMoE))
    assert [(layer.name, layer.experts, layer.top_k) for layer in catalog.layers] == [
        ("blocks.0.moe", 4, 2),
        ("blocks.1.moe", 4, 2),
    ]
    assert {s.parameter for s in catalog.by_id["expert/1/3"].spans} == {
        f"blocks.1.moe.experts.3.{n}" for n in ("0.weight", "0.bias", "1.weight", "1.bias")
    }
    assert [s.parameter for s in catalog.by_id["gate/1"].spans] == ["blocks.1.moe.gate.weight"]
    assert catalog.home["blocks.1.moe.experts.3.0.weight"] == "expert/1/3"


def test_lists_that_are_no_experts_are_left_alone():
    class Gated(nn.Module):
        """Four equal branches, but the gate does not choose among four."""

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 1)
            self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    class Convolutions(nn.Module):
        """Three-dimensional parameters of equal first size, but nothing routes."""

        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Parameter(torch.zeros(4, 8, 8))
            self.k = nn.Parameter(torch.zeros(4, 8, 8))
            self.conv = nn.Conv1d(8, 8, 3)

    for layer in (Gated, Convolutions):
        assert find_moe_layers(Stack(layer)) == []
        assert build_catalog(Stack(layer)).layers == ()


def test_a_registered_layer(registrations):
    assert find_moe_layers(Stack(OwnMoE)) == []
    register_moe(
        OwnMoE,
        experts=("w_in", "w_out"),
        router="scorer",
        assignments=lambda module, args, kwargs, output: output.argmax(-1),
    )
    catalog = build_catalog(Stack(OwnMoE))
    assert [layer.experts for layer in catalog.layers] == [4, 4]
    assert {(s.parameter, s.start, s.stop) for s in catalog.by_id["expert/0/2"].spans} == {
        ("blocks.0.moe.w_in", 2, 3),
        ("blocks.0.moe.w_out", 2, 3),
    }
    assert {s.parameter for s in catalog.by_id["gate/0"].spans} == {
        "blocks.0.moe.scorer.weight",
        "blocks.0.moe.scorer.bias",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts": "nothing"}, "no submodule or parameter 'nothing'"),
        ({"experts": ("w_in", "w_out"), "router": "gate"}, "no submodule or parameter 'gate'"),
        ({"experts": ("w_in", "scorer"), "router": "scorer", "flat": True}, "num_experts"),
        ({"experts": ("w_in", "w_out"), "router": None}, "cannot be observed"),
    ],
)
def test_a_registration_that_does_not_fit_says_so(registrations, arguments, message):
    register_moe(OwnMoE, **arguments)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        find_moe_layers(Stack(OwnMoE))
    assert "OwnMoE" in str(caught.value)


def test_registering_nonsense_is_refused(registrations):
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module"):
        register_moe("OwnMoE")
    with pytest.raises(ConfigError, match="on='gate'"):
        register_moe(OwnMoE, on="gate")
    with pytest.raises(ConfigError, match="name what holds"):
        register_moe(OwnMoE, experts=())

    with pytest.raises(ConfigError, match="name what holds"):
        register_moe(OwnMoE, experts=3)
    with pytest.raises(ConfigError, match="assignments='output'"):
        register_moe(OwnMoE, assignments="output")


@pytest.mark.parametrize("experts", [3, 8])
def test_a_parameter_list_holds_one_expert_in_each_entry(registrations, experts):
    """Also where there are as many experts as the matrices have rows."""

    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, experts)
            self.w_in = nn.ParameterList(nn.Parameter(torch.zeros(8, 16)) for _ in range(experts))
            self.w_out = nn.ParameterList(nn.Parameter(torch.zeros(16, 8)) for _ in range(experts))

    register_moe(Lists, experts=("w_in", "w_out"), assignments=lambda module, args, kwargs, output: output.argmax(-1))
    catalog = build_catalog(Stack(Lists))
    assert [layer.experts for layer in catalog.layers] == [experts, experts]
    assert {(s.parameter, s.start, s.stop) for s in catalog.by_id["expert/0/2"].spans} == {
        ("blocks.0.moe.w_in.2", None, None),
        ("blocks.0.moe.w_out.2", None, None),
    }
    gate = {s.parameter for s in catalog.by_id["gate/0"].spans}
    assert gate == {"blocks.0.moe.gate.weight", "blocks.0.moe.gate.bias"}


def test_compiled_and_wrapped_models_share_the_catalog():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = build_catalog(Stack(ListMoE))
    assert build_catalog(torch.compile(Stack(ListMoE))).fingerprint == plain.fingerprint
    wrapped = Stack(ListMoE)
    wrapped.blocks[0] = checkpoint_wrapper(wrapped.blocks[0])
    wrapped.blocks[1]["moe"] = torch.compile(wrapped.blocks[1]["moe"])
    assert any("_checkpoint_wrapped_module" in n for n, _ in wrapped.named_parameters())
    assert build_catalog(wrapped).fingerprint == plain.fingerprint


def test_tied_parameters_appear_once_with_an_alias():
    model = Stack(ListMoE)
    model.head.weight = model.embed.weight
    assert tied_aliases(model) == {"head.weight": "embed.weight"}
    assert "head.weight" not in build_catalog(model).parameters
    assert set(model.state_dict()) - set(build_catalog(model).parameters) == {"head.weight"}


def test_lazy_parameters_are_refused():
    with pytest.raises(UnsupportedError, match="has no shape yet"):
        build_catalog(nn.Sequential(nn.LazyLinear(4)))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn"),
        ("model.layers.3.mlp.shared_experts.up.weight", "model.layers.3.mlp"),
        ("model.layers.3.scale", "model.layers.3"),
        ("encoder.block.0.layer.1.mlp.wi.weight", "encoder.block.0.layer.1.mlp"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.weight", "lm_head"),
        ("temperature", "temperature"),
    ],
)
def test_non_expert_groups(name, group):
    assert non_expert_group(name) == group
