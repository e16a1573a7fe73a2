"""Policies whose constants a test needs smaller than users have them."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import moe_ckpt.policies
from moe_ckpt.policies import MoEtion

Kind = TypeVar("Kind")


@functools.cache
def with_constants(kind: type[Kind], **constants: Any) -> type[Kind]:
    """Returns a policy class with other constants: ``with_constants(CheckFreq, profile_steps=2)(max_overhead=0.9)``."""
    unknown = [name for name in constants if not hasattr(kind, name)]
    assert not unknown, f"{kind.__name__} has no {unknown}"
    return type(kind.__name__, (kind,), constants)


Unprobed = with_constants(MoEtion, probes=False)
"""MoEtion without small checkpoints at the beginning of a run."""


def policy_of(name: str, arguments: dict[str, Any]) -> Any:
    """Returns the policy of that name; ``arguments`` may set its constants, too."""
    kind = getattr(moe_ckpt.policies, name)
    fields = kind.__dataclass_fields__
    constants = {key: value for key, value in arguments.items() if hasattr(kind, key) and not _is_option(fields, key)}
    options = {key: value for key, value in arguments.items() if key not in constants}
    return with_constants(kind, **constants)(**options) if constants else kind(**options)


def _is_option(fields: Any, name: str) -> bool:
    return name in fields and fields[name]._field_type.name == "_FIELD"
