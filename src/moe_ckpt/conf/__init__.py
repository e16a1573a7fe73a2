"""Hydra config groups of moe_ckpt: ``moe_ckpt/policy``, ``moe_ckpt/store``, ``moe_ckpt/retention``, ``callbacks``.

An app gets them with one line in its primary config::

    hydra:
      searchpath: [pkg://moe_ckpt.conf]

Hydra imports this package when it first looks there, and that registers the typed schemas. Without
Hydra, importing it does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_ckpt.conf.schema import register

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moe_ckpt.callbacks import MoECheckpoint
    from moe_ckpt.policies import Policy

__all__ = ["build_callback", "register"]


def build_callback(policy: Policy, store: Mapping[str, Any], **options: Any) -> MoECheckpoint:
    """The ``_target_`` of the config ``moe_ckpt: default``.

    The groups are nested, the callback's arguments are not: ``store`` is spread over them here.
    """
    from moe_ckpt.callbacks import MoECheckpoint

    return MoECheckpoint(policy, **store, **options)


register()
