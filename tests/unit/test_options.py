"""One options object: what people write for sizes, times and paths, and everything that cannot be, refused by name."""

from __future__ import annotations

import inspect
import math
import pickle
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from moe_ckpt import megatron
from moe_ckpt.core.user_text import parse_bytes, parse_secs
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.megatron.bridge import MoECheckpointCallback
from moe_ckpt.memory.options import Memory
from moe_ckpt.policies import (
    AnyOf,
    CheckFreq,
    Dense,
    Gemini,
    GradientLog,
    Guarded,
    MoC,
    MoEtion,
    MoEvement,
    Needs,
    Wrapper,
)
from moe_ckpt.run.options import Options, OptionValues, make_options


def made(**values):
    return make_options("MoECheckpoint", values.pop("policy", None), values.pop("dirpath", "checkpoints"), values)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        (8e9, 8_000_000_000),
        ("4096", 4096),
        ("800MB", 800_000_000),
        ("1.5 GiB", 1_610_612_736),
        (" 2g ", 2_000_000_000),
        ("1e3 kB", 1_000_000),
        (".5KiB", 512),
        ("1PB", 10**15),
    ],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text, "x") == nbytes
    assert made(host_memory_bytes=text).host_memory_bytes == nbytes


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        "0",
        "0.5",
        "GB",
        "1iB",
        "1 Gb/s",
        "-1GB",
        "",
        "much",
        1.5,
        True,
        math.nan,
        math.inf,
        "1e999GB",
        b"1GB",
        [1],
    ],
)
def test_sizes_that_cannot_be(value):
    with pytest.raises(ConfigError, match=r"MoECheckpoint: host_memory_bytes=.*'8GB'"):
        made(host_memory_bytes=value)


@pytest.mark.parametrize(
    ("text", "secs"),
    [
        (60, 60.0),
        ("60", 60.0),
        ("90s", 90.0),
        ("10min", 600.0),
        ("1.5 h", 5400.0),
        ("7d", 604_800.0),
        (0.2, 0.2),
        ("2 Minutes", 120.0),
    ],
)
def test_durations(text, secs):
    assert parse_secs(text, "x", 1e9) == secs
    assert made(timeout_secs=text).timeout_secs == secs


@pytest.mark.parametrize(
    "value", [0, -1, "0s", "1 fortnight", "min", "", math.inf, math.nan, 1e30, "1e999", True, None, [], "40d"]
)
def test_durations_that_cannot_be(value):
    with pytest.raises(ConfigError, match=r"MoECheckpoint: timeout_secs=.*'10min'"):
        made(timeout_secs=value)


@pytest.mark.parametrize("value", [None, "", "  ", "a\0b", 7, b"bytes", ["a"]])
def test_paths_that_cannot_be(value):
    with pytest.raises(ConfigError, match="dirpath="):
        made(dirpath=value)
    if value is not None:
        with pytest.raises(ConfigError, match="profile="):
            made(profile=value)


def test_paths():
    assert made(dirpath=Path("a/b")).dirpath == "a/b"
    assert made(dirpath="s3://bucket/run").dirpath == "s3://bucket/run"
    assert made(profile=Path("p.json")).profile == "p.json"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"retention": 3}, r"retention=3: .*RetentionPolicy\(keep_last=3\)"),
        ({"save_last": 1}, "save_last=1"),
        ({"resume": True}, "resume=True: choose from 'auto', 'extend', 'never'"),
        ({"checksum_threads": 0}, "checksum_threads=0: must be a whole number greater than 0"),
        ({"when_busy": None}, "when_busy=None: choose from 'skip', 'wait'"),
        ({"budget_fraction": 0}, "budget_fraction=0: must be a number above 0 and at most 1"),
        ({"budget_fraction": 1.01}, "budget_fraction=1.01"),
        ({"budget_fraction": math.nan}, "budget_fraction=nan"),
        ({"budget_fraction": True}, "budget_fraction=True"),
        ({"budget_fraction": "half"}, "budget_fraction='half'"),
        ({"policy": "moc"}, r"policy='moc' is text; give the policy itself: policy=MoC\(\)"),
        ({"policy": MoC}, r"policy=MoC is the class of a policy; create a policy from it: policy=MoC\(\)"),
        ({"policy": "MoEvement"}, r"policy='MoEvement' is text; .*policy=MoEvement\(\), with MoEvement from"),
        ({"policy": "some/dir"}, r"policy='some/dir': .*MoC\(k=1\).* by name: dirpath='some/dir'"),
        ({"policy": Path("some/dir")}, r"directory of the checkpoints is given by name: dirpath='some/dir'"),
        ({"policy": 5}, r"policy=5: give a policy such as MoC\(k=1\)"),
        ({"plt_budget": 0.1}, r"no such option; it is an option of the policy: policy=MoC\(plt_budget=...\)"),
        ({"guard": "stop"}, r"MoECheckpoint\(guard=...\): no such option; wrap the policy: policy=Guarded\(policy,"),
        ({"profile": "s3://b/p.json"}, "profile='s3://b/p.json': give the path of a local file"),
        ({"timeout_sec": 3}, r"MoECheckpoint\(timeout_sec=...\): no such option; did you mean timeout_secs\?"),
        ({"pinned": True}, r"MoECheckpoint\(pinned=...\): no such option"),
        ({"zzz": 1}, "no such option; there are: .*when_busy"),
        ({"every_n_steps": 5}, r"it is an option of the policy: policy=Dense\(every_n_steps=...\)"),
        ({"keep_last": 5}, r"it is an option of the retention: retention=RetentionPolicy\(keep_last=...\)"),
        ({"timeout_sec": 5}, r"did you mean timeout_secs\?"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values, says):
    with pytest.raises(ConfigError, match=says):
        made(**values)


def test_a_misspelt_option_of_memory_is_named():
    with pytest.raises(ConfigError, match=r"Memory\(storage_evry=...\): no such option; did you mean storage_every\?"):
        Memory(storage_evry=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "begin",
    [
        lambda **options: megatron.attach(None, None, **options),
        megatron.install,
        MoECheckpointCallback,
    ],
    ids=["attach", "install", "bridge"],
)
def test_state_of_another_host_is_refused_before_megatron_begins(begin):
    with pytest.raises(UnsupportedError, match=r"state_from='first'\): Megatron's optimizers .*weights_from="):
        begin(dirpath="second", state_from="first")


GRADIENTS_TO_PEERS = [MoEtion(recompute=True), Guarded(MoEtion(recompute=True))]


@pytest.mark.parametrize("policy", GRADIENTS_TO_PEERS)
def test_gradients_for_peers_ask_for_copies_there(policy):
    with pytest.raises(ConfigError, match=r"recompute=True.*keeps copies on 0: .*Memory\(replicas=1\), or a policy"):
        Options(policy=policy, dirpath="x", memory=Memory(storage_every=10))
    with pytest.raises(ConfigError, match="logs the gradients of each step"):
        Options(policy=policy, dirpath="x")
    assert Options(policy=MoEtion(), dirpath="x", memory=Memory()).needs.replicas == 0


@pytest.mark.parametrize("policy", GRADIENTS_TO_PEERS)
@pytest.mark.parametrize("cadence", [{}, {"storage_every": 1}])
def test_gradients_for_peers_ask_for_steps_that_do_not_go_to_storage(policy, cadence):
    says = r"recompute=True.* sends gradients .*memory=Memory\(.*replicas=2.*storage_every=100\).*or a policy that"
    with pytest.raises(ConfigError, match=says):
        Options(policy=policy, dirpath="x", memory=Memory(replicas=2, **cadence))
    Options(policy=MoEtion(), dirpath="x", memory=Memory(replicas=2, **cadence))
    Options(policy=GradientLog(), dirpath="x", memory=Memory(**cadence))


@dataclass(frozen=True)
class Sending(Wrapper):
    """Gradients to peers, whatever the user sets."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, gradients="as_consumed", replicas=1)


def test_policies_are_named_with_their_settings():
    sending = r"policy=Sending\(policy=Dense\(every_n_steps=1\)\)"
    with pytest.raises(ConfigError, match=rf"{sending} needs .*or a policy that keeps none there$"):
        Options(policy=Sending(Dense()), dirpath="x", memory=Memory())
    with pytest.raises(ConfigError, match=rf"{sending} sends gradients .* or a policy that sends full state$"):
        Options(policy=Sending(Dense()), dirpath="x", memory=Memory(replicas=1))
    with pytest.raises(ConfigError, match=r"policy=Guarded\(policy=MoEtion\(.*recompute=True\).* needs .*"):
        Options(policy=Guarded(MoEtion(recompute=True)), dirpath="x", memory=Memory())


@pytest.mark.parametrize("cadence", [{"storage_every": 2}, {"storage_every": "auto"}, {"storage_every": 60.0}])
def test_any_rarer_cadence_leaves_steps_for_gradients(cadence):
    memory = Memory(replicas=1, **cadence)
    assert Options(policy=MoEtion(recompute=True), dirpath="x", memory=memory).memory == memory


@pytest.mark.parametrize("policy", [Gemini(), Guarded(Gemini(5)), AnyOf([Dense(9), Gemini(5)])])
@pytest.mark.parametrize("memory", [None, Memory()])
def test_a_policy_for_the_memory_of_peers_asks_for_copies_there(policy, memory):
    with pytest.raises(
        ConfigError,
        match=r"at least 1 peer, and memory=(None|Memory\(replicas=0\)) keeps copies on 0: .*Memory\(replicas=1\)",
    ):
        Options(policy=policy, dirpath="x", memory=memory)
    for replicas in (1, 2):
        assert Options(policy=policy, dirpath="x", memory=Memory(replicas=replicas)).policy == policy


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Dense(every_n_step=5), r"^Dense\(every_n_step=\.\.\.\): no such .* mean every_n_steps\?$"),
        (lambda: MoC(kk=1), r"^MoC\(kk=\.\.\.\): no such option; did you mean k\?$"),
        (lambda: MoC(zzz=1), r"^MoC\(zzz=\.\.\.\): no such option; there are: every_n_steps, k, plt_budget"),
        (lambda: MoEvement(windows=4), r"did you mean window\?"),
        (lambda: MoEtion(expert=4), r"did you mean experts\?"),
        (lambda: CheckFreq(max_overheads=4), r"did you mean max_overhead\?"),
        (lambda: Gemini(mtbf=600), r"did you mean mtbf_secs\?"),
        (lambda: Dense(5, False), r"^Dense was given 2 options; there are: every_n_steps$"),
        (lambda: Dense(5, every_n_steps=3), r"^Dense\(every_n_steps=\.\.\.\): every_n_steps is given twice"),
        (lambda: Guarded(budget=0.1), r"^Guarded\(\): policy is missing; write Guarded\(policy=\.\.\.\)"),
        (lambda: RetentionPolicy(keep_lst=5), r"^RetentionPolicy\(keep_lst=\.\.\.\): .*did you mean keep_last\?"),
    ],
)
def test_a_wrong_option_of_a_policy_is_named_with_the_nearest_right_one(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_policies_are_the_dataclasses_that_they_were():
    assert replace(MoC(2, selector="load_aware"), k=3) == MoC(k=3, selector="load_aware")
    assert list(inspect.signature(Dense).parameters) == ["every_n_steps"]
    assert pickle.loads(pickle.dumps(Dense(5))) == Dense(5)


def test_defaults():
    chosen = made(retention=None)
    assert chosen == Options()
    assert (chosen.policy, chosen.retention, chosen.timeout_secs) == (CheckFreq(), RetentionPolicy(), 600.0)


def test_editors_and_type_checkers_see_every_option():
    """``OptionValues`` names the same options as ``Options``; policy and dirpath are arguments of their own."""
    from_adapters = {"policy", "dirpath", "max_in_flight", "pinned", "local_ranks"}
    assert set(inspect.get_annotations(OptionValues)) == {f.name for f in fields(Options)} - from_adapters
