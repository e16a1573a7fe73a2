"""Which version is safe where."""

from __future__ import annotations

import pytest

from moe_ckpt.core.ledger import Ledger, Version
from moe_ckpt.core.plan import Fidelity, Tier


@pytest.fixture
def ledger():
    held = Ledger()
    held.record(Tier.STORAGE, 10, ["a", "b", "c"])
    held.record(Tier.STORAGE, 12, ["a"])
    held.record(Tier.HOST, 13, ["b"])
    return held


def test_newest_version_per_tier(ledger):
    assert {op: v.step for op, v in ledger.versions().items()} == {"a": 12, "b": 10, "c": 10}
    assert {op: v.step for op, v in ledger.versions(Tier.HOST).items()} == {"b": 13}
    assert ledger.versions(Tier.PEER) == {}


def test_versions_are_a_copy(ledger):
    ledger.versions().clear()
    assert ledger.versions()


def test_versions_only_move_forward(ledger):
    with pytest.raises(ValueError, match="a is recorded at step 12, cannot go back to step 11"):
        ledger.record(Tier.STORAGE, 11, ["a"])
    ledger.record(Tier.STORAGE, 12, ["a"])


def test_missing_is_what_a_tier_has_never_held(ledger):
    assert ledger.missing(["a", "d", "b", "e"]) == ("d", "e")
    assert ledger.missing(["a", "b"], Tier.HOST) == ("a",)
    assert Ledger().missing(["a"]) == ("a",)


def test_oldest_step(ledger):
    assert ledger.oldest_step() == 10
    assert ledger.oldest_step(Tier.HOST) == 13
    assert ledger.oldest_step(Tier.PEER) is None


def test_newest_over_tiers_and_ties(ledger):
    ledger.record(Tier.HOST, 13, ["a", "c"])
    ledger.record(Tier.PEER, 13, ["c"])
    newest = ledger.newest([Tier.PEER, Tier.HOST, Tier.STORAGE])
    assert {op: (tier, v.step) for op, (tier, v) in newest.items()} == {
        "a": (Tier.HOST, 13),
        "b": (Tier.HOST, 13),
        "c": (Tier.PEER, 13),
    }
    assert ledger.newest([Tier.STORAGE])["b"] == (Tier.STORAGE, Version(10))


def test_fidelity_is_kept(ledger):
    ledger.record(Tier.HOST, 14, ["a"], Fidelity.COMPUTE)
    assert ledger.versions(Tier.HOST)["a"].fidelity is Fidelity.COMPUTE
