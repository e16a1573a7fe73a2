"""Hydra config groups of moe_ckpt: ``moe_ckpt/policy``, ``/store``, ``/retention``, ``/memory``, and ``callbacks``.

An app gets them with one line in its primary config::

    hydra:
      searchpath: [pkg://moe_ckpt.conf]

Hydra imports this package when it first looks there, and that registers the typed schemas. Without
Hydra, importing it does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_ckpt.conf.schema import register
from moe_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moe_ckpt.callbacks import MoECheckpoint
    from moe_ckpt.memory.options import Memory
    from moe_ckpt.policies import Policy

__all__ = ["build_callback", "register"]


def build_callback(
    policy: Policy,
    store: Mapping[str, Any],
    dirpath: str | None = None,
    timeout_secs: Any = None,
    memory: Memory | None = None,
    **options: Any,
) -> MoECheckpoint:
    """Returns the callback of a composed config: the ``_target_`` of ``moe_ckpt: default``.

    The groups are nested, the callback's arguments are not: ``store`` is spread over them here.

    Args:
        policy: Made from the group ``moe_ckpt/policy``.
        store: The group ``moe_ckpt/store``: ``dirpath``, ``timeout_secs`` and the like.
        dirpath: ``moe_ckpt.dirpath=x`` does what ``moe_ckpt.store.dirpath=x`` does, and goes before it.
        timeout_secs: Likewise.
        memory: Made from the group ``moe_ckpt/memory``; that of ``off`` is empty.
        **options: The callback's other arguments.

    Raises:
        ConfigError: No ``dirpath`` was given, or a value cannot be.
    """
    from moe_ckpt.callbacks import MoECheckpoint

    overrides = {"dirpath": dirpath, "timeout_secs": timeout_secs}
    where = {**store, **{key: value for key, value in overrides.items() if value is not None}}
    if where.get("dirpath") is None:
        raise ConfigError("moe_ckpt.dirpath must be given: a directory, or a URL such as s3://bucket/run")
    return MoECheckpoint(policy, **where, memory=memory or None, **options)


register()
