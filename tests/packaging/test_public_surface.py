"""What users and stored files rely on, written down once. A change here is a change for them.

If one of these tests fails and the change is meant: put it right in ``SURFACE``, ``RECORDS`` or ``CONFIG_GROUPS``, and
say it in CHANGELOG.md; for ``RECORDS`` also in docs/format.md (a profile's: docs/profile.md), with a new format version
unless old files still open.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

import pytest

from moe_ckpt import RetentionPolicy, megatron
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies import Needs, PolicyContext
from moe_ckpt.run.options import OptionValues
from tests.packaging import rules

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "moe_ckpt"

SURFACE = {
    "moe_ckpt": (
        "Memory RetentionPolicy __version__ attach load_from_checkpoint newest_step register_moe release_host_memory"
    ),
    "moe_ckpt.callbacks": "MoECheckpoint MoECheckpointIO load_from_checkpoint",
    "moe_ckpt.conf": "build_callback register",
    "moe_ckpt.data": "RecoverableDistributedSampler",
    "moe_ckpt.inprocess": "Restart restartable",
    "moe_ckpt.megatron": (
        "MegatronCheckpoint MegatronLM Progress attach export_torch_dist import_torch_dist install load_weights"
    ),
    "moe_ckpt.megatron.bridge": "MoECheckpointCallback",
    "moe_ckpt.metrics": "CheckpointMetrics",
    "moe_ckpt.plain": "PlainCheckpoint Position attach",
    "moe_ckpt.torchtitan": "CheckpointManager",
    "moe_ckpt.transformers": "MoECheckpointCallback",
    "moe_ckpt.policies": (
        "AnyOf Catalog CheckFreq Dense FaultRecord Gemini GradientLog Guarded Measured MemoryFacts MoC "
        "MoELayer MoEtion MoEvement ModelFacts Needs Operator OperatorKind Policy PolicyContext RunFacts "
        "SnapshotPlan Tier TokenFacts Wrapper expert_id gate_id needs_of non_expert_id"
    ),
    "moe_ckpt.storage": "Chunk LocalStorage RemoteStorage Storage StoreLock open_storage",
    "moe_ckpt.testing": "PHASES FaultyStorage Kill KillHook KillSchedule crash_at kill_process lose_node watch_phases",
    "moe_ckpt.testing.megatron_cpu": "install",
}
"""Module -> its ``__all__``. Every package with an ``__all__`` is listed."""

ERRORS = (
    "ConfigError CoverageError DamagedError DeviceMemoryError FilesGoneError FormatVersionError HostMemoryError "
    "MemoryFullError MemoryGoneError MissingPackageError MoECheckpointError NoCheckpointError NotFiniteError "
    "OtherLayoutError PeerLostError RecoveryLoopError ReplayDivergedError SaveFailedError StepRemovedError StoreError "
    "StoreForbiddenError StoreInUseError StoreUnreadableError StoreUnwritableError UnencodableStateError "
    "UnsupportedError UserError"
)

OPTIONS = (
    "access budget_fraction checksum_threads dirpath host_memory_bytes memory on_read_error policy profile resume "
    "retention save_last state_from timeout_secs weights_from when_busy"
)
"""Of ``MoECheckpoint`` and ``megatron.attach``."""

RETENTION = "keep_last keep_every_n_steps"

POLICY_CONTEXT = {
    "model": "catalog placement sizes coupled",
    "run": "step last_step index missing nothing_safe window next_slot dense_step faults",
    "measured": (
        "iteration_secs checkpoint_cost_secs persist_secs copy_bytes_per_sec persist_bytes_per_sec "
        "recent_iteration_secs update_secs send_bytes_per_sec copy_interference_secs"
    ),
    "tokens": "unsaved expected_unsaved chosen_at routed popularity",
    "memory": "budget_fraction snapshot_bytes at_once tiers sends anchored_at",
}
"""What a policy of one's own decides from, group by group."""

NEEDS = (
    "sizes popularity windows gradients tiers partial lost_tokens alone boost replicas bubbles period_steps next_due "
    "warning"
)
"""What a policy of one's own may say that it needs."""

POLICY_OPTIONS = {
    "Dense": "every_n_steps",
    "CheckFreq": "max_overhead",
    "Gemini": "every_n_steps mtbf_secs",
    "MoC": "k every_n_steps selector snapshot_k plt_budget",
    "MoEtion": "every_n_steps experts capacity_boost recompute",
    "MoEvement": "window order",
    "GradientLog": "window grad_dtype",
}

RECORDS = {
    "moe_ckpt.format.run_records.Identity": "run_id fingerprint created_unix_secs",
    "moe_ckpt.format.run_records.Finished": "run_id step generation reason limits callbacks",
    "moe_ckpt.format.manifest.Manifest": (
        "run_id step generation world_size index created_unix_secs model files operators states parent policy measured "
        "tokens window parts not_finite"
    ),
    "moe_ckpt.format.manifest.SlotRecord": "step states",
    "moe_ckpt.format.manifest.FileRecord": "path nbytes header_nbytes header_digest step rank",
    "moe_ckpt.format.manifest.StateRecord": "path nbytes digest rank",
    "moe_ckpt.format.manifest.OperatorRecord": "step files",
    "moe_ckpt.format.manifest.LayerRecord": "name experts top_k",
    "moe_ckpt.format.manifest.ModelRecord": "fingerprint layers aliases",
    "moe_ckpt_sim.planner.profile_document.Profile": "fingerprint model lives",
    "moe_ckpt_sim.planner.profile_document.ProfiledModel": "layers operators",
    "moe_ckpt_sim.planner.profile_document.OperatorRow": (
        "id count elements full_bytes compute_bytes stage gradient_bytes weight_bytes"
    ),
    "moe_ckpt_sim.planner.profile_document.Life": (
        "run_id generation policy ranks ranks_per_node pp dp ep host_memory_bytes started_unix_secs opened_unix_secs "
        "last_unix_secs ready_unix_secs training_unix_secs finished load_secs plan_secs replayed_steps restored_step "
        "first_step last_step first_step_secs last_step_unix_secs iteration_secs recent_iteration_secs clean_steps "
        "clean_secs update_secs checkpoint_cost_secs persist_secs copy_bytes_per_sec persist_bytes_per_sec "
        "send_bytes_per_sec replicas sent_bytes saved_bytes stall_secs waited_secs agree_secs begun committed failed "
        "skipped snapshot_bytes assignments skewness held_alike"
    ),
    "moe_ckpt.format.shard.ShardHeader": "run_id step generation rank slices",
    "moe_ckpt.format.shard.SliceEntry": (
        "key operator dtype offsets shape global_shape begin end checksum on_param_device"
    ),
}
"""Record -> its fields in order, which for rows is the order on disk."""

CONFIG_GROUPS = {
    "callbacks": "moe_ckpt",
    "moe_ckpt": "default",
    "moe_ckpt/memory": "local off replicated",
    "moe_ckpt/policy": "any_of checkfreq dense gemini gradient_log guarded moc moc_dynamic moetion moevement",
    "moe_ckpt/retention": "milestones recent",
    "moe_ckpt/store": "local remote",
    "simulate": "simulate",
    "simulate/batch": "deepseek_15360 deepseek_4608 moetion moevement pec pec_swin tiny",
    "simulate/cluster": "a100_64 a100_96 a30_8 gpus_1536 gpus_16384 gpus_4096 gpus_512 h100_128 laptop",
    "simulate/failures": "components gcp_like_6h llama3 none poisson trace weibull",
    "simulate/iteration": (
        "estimated given moevement_deepseek moevement_fp16_fp16_fp16 moevement_fp8_fp16_fp32 "
        "moevement_fp8_fp16_fp8fp16 moevement_fp8_fp32_fp32 moevement_fp8_fp8_fp8fp16 moevement_gpt "
        "moevement_llava moevement_qwen"
    ),
    "simulate/load": "even mild skewed_25 skewed_50 skewed_75 skewed_99",
    "simulate/memory": "local of_policy off replicated",
    "simulate/model": (
        "deepseek_145b deepseek_32b deepseek_671b deepseek_671b_mtp deepseek_67b deepseek_moe gpt2_moe_small "
        "gpt_moe moe_gpt_1_6b_64e moe_gpt_2_9b_16e moe_gpt_3_8b_8e moe_llava qwen_moe swinv2_moe tiny"
    ),
    "simulate/parallel": (
        "ep8 pp12_ep8_dp1 pp16_ep8_dp4 pp24_ep8_dp8 pp32_ep8_dp16 pp3_ep8_dp4 pp4_ep2_dp8 pp64_ep8_dp32 "
        "pp6_ep8_dp2 pp8_ep1_dp8 pp8_ep4_dp2 pp8_ep8_dp2 single"
    ),
    "simulate/policy": (
        "checkfreq dense dense_sync gemini gemini_daly gemini_young gradient_log gradient_log_peers moc moc_peers "
        "moc_peers_fixed "
        "moc_peers_load_aware moetion moetion_peers moevement moevement_peers moevement_peers_freeze "
        "moevement_peers_reorder moevement_peers_sparse"
    ),
    "simulate/precision": (
        "fp16_fp16_fp16 fp16_fp32 fp32 fp8_fp16_fp32 fp8_fp16_fp8fp16 fp8_fp32_fp32 fp8_fp8_fp8fp16 zero1_10"
    ),
    "simulate/setup": (
        "moetion_1_6b moetion_2_9b moetion_3_8b moevement_145b moevement_32b moevement_671b moevement_67b "
        "moevement_deepseek moevement_fp16_fp16_fp16 moevement_fp8_fp16_fp32 moevement_fp8_fp16_fp8fp16 "
        "moevement_fp8_fp32_fp32 moevement_fp8_fp8_fp8fp16 moevement_gpt moevement_llava moevement_qwen pec "
        "pec_swin tiny"
    ),
}

EXTRAS = "lightning transformers torchtitan hydra plot remote megatron inprocess recipes docs dev"


def has_host(path):
    """Whether the framework that a module is for is there; torchtitan is not among the packages for development."""
    return not path.startswith("moe_ckpt.torchtitan") or None not in map(find_spec, ("torchtitan", "tyro"))


def require_host(path):
    if not has_host(path):
        pytest.skip("torchtitan is not installed")


def names(module):
    """``__all__`` as written in the source; None if there is none."""
    for node in module.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return ast.literal_eval(node.value)
    return None


def test_every_package_with_a_public_surface_is_frozen():
    found = {f"moe_ckpt.{m.name}".rstrip("."): names(m) for m in rules.read_package(SOURCE)}
    found = {name: listed for name, listed in found.items() if not name.endswith(".compat")}
    assert {name for name, listed in found.items() if listed is not None} == set(SURFACE)


@pytest.mark.parametrize("module", SURFACE)
def test_public_names(module):
    require_host(module)
    imported = importlib.import_module(module)
    assert sorted(imported.__all__) == sorted(SURFACE[module].split())
    assert all(hasattr(imported, name) for name in imported.__all__)


def test_errors_and_their_families():
    errors = importlib.import_module("moe_ckpt.errors")
    found = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and name[0] != "_"}
    assert sorted(found) == sorted(ERRORS.split())
    for name in set(found) - {"MoECheckpointError", "UserError", "StoreError"}:
        assert issubclass(found[name], errors.UserError) != issubclass(found[name], errors.StoreError)


@pytest.mark.parametrize("policy", POLICY_OPTIONS)
def test_policy_options(policy):
    kind = getattr(importlib.import_module("moe_ckpt.policies"), policy)
    assert [field.name for field in fields(kind)] == POLICY_OPTIONS[policy].split()
    assert list(kind().describe()) == ["name", *POLICY_OPTIONS[policy].split()]


def test_options():
    """Adapters take ``**options``; an editor completes them from ``OptionValues``, a user reads them in ``Options``."""
    taken = {"policy", "dirpath", *inspect.get_annotations(OptionValues)}
    assert sorted(taken) == sorted(OPTIONS.split())
    for adapter in (MoECheckpoint, megatron.attach):
        assert {"policy", "dirpath", "options"} <= set(inspect.signature(adapter).parameters)


def test_records_that_users_make_and_read():
    assert [field.name for field in fields(RetentionPolicy)] == RETENTION.split()
    groups = get_type_hints(PolicyContext)
    assert {name: [field.name for field in fields(group)] for name, group in groups.items()} == {
        name: names.split() for name, names in POLICY_CONTEXT.items()
    }
    assert [field.name for field in fields(Needs)] == NEEDS.split()


@pytest.mark.parametrize("record", RECORDS)
def test_stored_records(record):
    module, _, name = record.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    assert [field.name for field in fields(kind)] == RECORDS[record].split()


def test_config_groups():
    found = {}
    for conf in (SOURCE / "conf", SOURCE.parent / "moe_ckpt_sim" / "conf"):
        for path in sorted(conf.rglob("*.yaml")):
            found.setdefault(str(path.parent.relative_to(conf)), []).append(path.stem)
    assert found == {group: options.split() for group, options in CONFIG_GROUPS.items()}


def test_extras():
    text = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert re.findall(r"^(\w+) = \[", text, re.M) == EXTRAS.split()


def test_messages_name_extras_that_exist():
    named = []
    for module in rules.read_package(SOURCE):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and rules._name(node.func) == "MissingPackageError":
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                named.append(ast.literal_eval(given["extra"] if "extra" in given else node.args[2]))
    assert named
    assert set(named) <= set(EXTRAS.split())


def test_the_callbacks_link_leads_to_the_package():
    link = ROOT / "callbacks"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == SOURCE / "callbacks"
