"""The profile of a run as the simulator reads it: bytes -> frozen records, all of it checked. See docs/profile.md.

All fields must be there and none besides, so that a number with a misspelt name is never taken for one that is not
known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from moe_ckpt.core.operators import expert_id, gate_id
from moe_ckpt.errors import DamagedError
from moe_ckpt.format.manifest import MOST_EXPERTS, OPERATOR_ID, LayerRecord
from moe_ckpt.format.profile import PROFILE_KIND, Life, OperatorRow, ProfiledModel
from moe_ckpt.format.schema import Check, Schema, anything, both, flag, mapping, maybe, number, require, text, whole
from moe_ckpt.format.sealed import check_version, parse_json


@dataclass(frozen=True)
class Profile:
    """The measurements that a run made of itself.

    Attributes:
        fingerprint: ``Catalog.fingerprint``.
        model: None until its tensors were weighed.
        lives: Oldest first.
    """

    fingerprint: str
    model: ProfiledModel | None = None
    lives: tuple[Life, ...] = field(default=())


def decode_profile(raw: bytes | bytearray, path: str) -> Profile:
    """Returns the profile that ``raw`` is.

    Args:
        path: For messages.

    Raises:
        FormatVersionError: It is of another version.
        DamagedError: anything else that is wrong; names the field.
    """
    body = parse_json(raw, path)
    if not isinstance(body, dict) or body.get("kind") != PROFILE_KIND:
        raise DamagedError(path, f"is no profile of a run: its kind is not {PROFILE_KIND!r}")
    check_version(body, path, PROFILE_KIND)
    require(_PROFILE, body, path)
    model = None if body["model"] is None else _decode_model(path, body["model"])
    return Profile(body["fingerprint"], model, tuple(Life(**life) for life in body["lives"]))


def _decode_model(path: str, body: Mapping[str, Any]) -> ProfiledModel:
    model = ProfiledModel(
        tuple(LayerRecord(**layer) for layer in body["layers"]), tuple(OperatorRow(**row) for row in body["operators"])
    )
    _check_operators(path, model)
    return model


def _check_operators(path: str, model: ProfiledModel) -> None:
    """Every MoE layer has its gate and each of its experts once, and nothing is there twice."""
    for at, row in enumerate(model.operators):
        if row.expert is None and row.count != 1:
            raise DamagedError(path, f"model.operators[{at}].count is {row.count}, but {row.id} is one operator")
        if row.layer is not None and row.layer >= len(model.layers):
            raise DamagedError(path, f"model.operators[{at}].id is {row.id}, but there are {len(model.layers)} layers")
        if row.expert is not None and row.expert + row.count > model.layers[row.layer or 0].experts:
            raise DamagedError(path, f"model.operators[{at}] goes beyond the experts of its layer")
    if sum(layer.experts for layer in model.layers) > MOST_EXPERTS:
        raise DamagedError(path, f"model.layers have more than {MOST_EXPERTS:,} experts")
    listed = [op for row in model.operators for op in row.ids]
    expected = {gate_id(at) for at in range(len(model.layers))}
    expected |= {expert_id(at, expert) for at, layer in enumerate(model.layers) for expert in range(layer.experts)}
    missing = sorted(expected.difference(listed))
    if missing:
        raise DamagedError(path, f"model.operators: {', '.join(missing[:4])} missing ({len(missing)} in all)")
    if len(set(listed)) != len(listed):
        raise DamagedError(path, "model.operators: an operator is listed twice")


# --- what a profile must look like ---

_from_one = whole(1)
_rate = maybe(number(above=True))
_BY_TYPE: Mapping[str, Check] = {
    "str": text,
    "bool": flag,
    "int": whole(),
    "float": number(),
    "bool | None": maybe(flag),
    "int | None": maybe(whole()),
    "float | None": maybe(number()),
    "Mapping[str, Any]": mapping(anything),
}
"""Type of a field -> its check."""


def _exactly(schema: Mapping[str, Schema]) -> Check:
    """Returns the check of an object with these fields and no others."""

    def unknown(datum: Mapping[str, Any]) -> str:
        return next((f".{name} is not known" for name in datum if name not in schema), "")

    return both(schema, unknown)


def _fields_of(kind: type[Any], **others: Schema) -> Check:
    """Returns the check of a record with the fields of a dataclass, each by its type or by ``others``."""
    return _exactly({**{field.name: _BY_TYPE[str(field.type)] for field in fields(kind)}, **others})


_LIFE = _fields_of(
    Life,
    **dict.fromkeys(("ranks", "ranks_per_node", "pp", "dp", "ep"), _from_one),
    **dict.fromkeys(("iteration_secs", "recent_iteration_secs"), _rate),
    **dict.fromkeys(("copy_bytes_per_sec", "persist_bytes_per_sec", "send_bytes_per_sec"), _rate),
    skewness=maybe(number(most=1, requirement="a number from 0 to 1")),
)
_LAYER = _exactly({"name": text, "experts": _from_one, "top_k": maybe(_from_one)})
_OPERATOR = _fields_of(OperatorRow, id=OPERATOR_ID, count=_from_one)
_MODEL = _exactly({"layers": [_LAYER], "operators": [_OPERATOR]})


def _life_contradicts_itself(life: Mapping[str, Any]) -> str:
    ranks = life["pp"] * life["dp"] * life["ep"]
    if ranks != life["ranks"]:
        return f": pp * dp * ep is {ranks}, but ranks is {life['ranks']}"
    first, last = life["first_step"], life["last_step"]
    if (first is None) != (last is None) or (first or 0) > (last or 0):
        return f": first_step is {first}, but last_step is {last}"
    return ""


_PROFILE = _exactly(
    {
        "kind": text,
        "format_version": whole(),
        "fingerprint": text,
        "model": maybe(_MODEL),
        "lives": [both(_LIFE, _life_contradicts_itself)],
    }
)
