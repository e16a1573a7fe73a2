"""``moe-ckpt export --to hf`` of Megatron runs: what transformers loads computes what Megatron computes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from moe_ckpt.cli.main import main
from moe_ckpt.errors import ConfigError, CoverageError, UnsupportedError
from moe_ckpt.interop.export import export
from moe_ckpt.interop.hub_names import ListedModel
from moe_ckpt.megatron.inventory import architecture
from moe_ckpt.reading.reader import open_step
from tests.megatron import hub_rank
from tests.support.processes import run_ranks

WARM = "tests.support.megatron_warm"
COMMON = {
    "vocab_size": hub_rank.VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "bos_token_id": None,
    "eos_token_id": None,
}


def config(family: str) -> Any:
    if family == "mixtral":
        return transformers.MixtralConfig(
            **COMMON, intermediate_size=24, num_local_experts=4, tie_word_embeddings=True, sliding_window=None
        )
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "mlp_only_layers": [0], "norm_topk_prob": True}
    return transformers.Qwen3MoeConfig(**COMMON, **experts, intermediate_size=48, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("qwen")
    run_ranks(hub_rank.trained, 1, str(place), "qwen3_moe", {}, preload=WARM)
    config("qwen3_moe").save_pretrained(place / "config")
    return place


@pytest.mark.parametrize(
    ("family", "degrees"),
    [
        ("qwen3_moe", {}),
        ("mixtral", {"expert_model_parallel_size": 2}),
        ("qwen3_moe", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    ],
    ids=["qwen", "mixtral-ep", "qwen-tp"],
)
def test_transformers_computes_the_same_logits(tmp_path: Path, family: str, degrees: dict[str, int], capsys):
    ranks = 2 if degrees else 1
    logits = run_ranks(hub_rank.trained, ranks, str(tmp_path), family, degrees, preload=WARM)[0]
    config(family).save_pretrained(tmp_path / "config")
    command = ["export", f"{tmp_path}/store", "--to", "hf", "--config", f"{tmp_path}/config", "-o", f"{tmp_path}/out"]
    assert main([*command, "--max-file-size", "20KB"]) == 0
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        computed = model.eval()(input_ids=hub_rank.asked()).logits
    torch.testing.assert_close(computed, logits[..., : hub_rank.VOCABULARY], rtol=1e-4, atol=1e-5)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        (
            {"model_type": "deepseek_v3"},
            UnsupportedError,
            "deepseek_v3.*pip install megatron-bridge.*save_hf_pretrained",
        ),
        ({"num_key_value_heads": 4}, ConfigError, "num_query_groups is 2 in the run, 4 by the config"),
        ({"norm_topk_prob": False}, ConfigError, "moe_router_pre_softmax is False in the run, True"),
        ({"rope_parameters": {"rope_theta": 1e6}}, ConfigError, "rotary_base is 5000 in the run"),
        ({"num_local_experts": None}, ConfigError, "needs num_local_experts"),
        ({"num_hidden_layers": 3}, CoverageError, r"model\.layers\.2\.\S+, which the run does not have"),
        ({"num_local_experts": 3}, CoverageError, r"no model\.layers\.1\.mlp\.experts\.3\S+, which the run has"),
        ({"moe_intermediate_size": 12}, CoverageError, r"shape \[12, 32\], and decoder\S+ of the run makes \[24, 32\]"),
        ({"tie_word_embeddings": True}, CoverageError, r"no lm_head\.weight"),
    ],
)
def test_another_models_config_is_refused(tmp_path: Path, run: Path, changed: dict[str, Any], error, text: str):
    content = json.loads((run / "config" / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(error, match=text):
        export(run / "store", "hf", tmp_path / "out", config=tmp_path / "config.json")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(("name", "value"), [("moe_router_topk_scaling_factor", 2.5), ("moe_router_num_groups", 2)])
def test_a_router_that_models_on_the_hub_do_not_have_is_refused(name: str, value: float):
    chunk: Any = torch.nn.Module()
    chunk.config = SimpleNamespace(moe_router_topk=2, **{name: value})
    model = ListedModel(config("qwen3_moe").to_dict())
    model.require_architecture({"moe_router_topk_scaling_factor": 1.0})
    with pytest.raises(ConfigError, match=f"{name} is {value} in the run"):
        model.require_architecture(architecture(chunk))


def test_what_is_needed_is_said(tmp_path: Path, run: Path):
    with pytest.raises(ConfigError, match="--config DIRECTORY"):
        export(run / "store", "hf", tmp_path / "out")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/config.json cannot be read")):
        export(run / "store", "hf", tmp_path / "out", config=tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"config=.* is for hf"):
        export(run / "store", "safetensors", tmp_path / "out", config=run / "config")


def test_transformer_engines_names_are_the_same_tensors(run: Path):
    """It keeps a norm with the matrix behind it, where that is no router."""
    reader, manifest = open_step(run / "store")
    index = reader.index(manifest)
    shapes = {key[6:]: index.meta(key).global_shape for key in index.tensors if key.startswith("model/")}
    fused = {
        re.sub(r"^(\S+\.)input_layernorm", r"\1self_attention.linear_qkv.layer_norm_weight", name)
        .replace("layers.0.pre_mlp_layernorm", "layers.0.mlp.linear_fc1.layer_norm_weight")
        .replace("layer_norm_weight.weight", "layer_norm_weight"): shape
        for name, shape in shapes.items()
    }
    assert len(fused.keys() - shapes.keys()) == 3
    model = ListedModel(json.loads((run / "config" / "config.json").read_text()))
    assert model.tensors(fused, {}).keys() == model.tensors(shapes, {}).keys()
    with pytest.raises(
        UnsupportedError, match=r"1 tensors of the run .* such as decoder\.layers\.1\.mlp\.router\.expert_bias"
    ):
        model.tensors(shapes, {"decoder.layers.1.mlp.router.expert_bias": None, "x.local_tokens_per_expert": None})
