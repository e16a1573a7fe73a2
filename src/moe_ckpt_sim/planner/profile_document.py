"""The profile of a run: frozen records <-> bytes, read strictly. See docs/profile.md.

Plain JSON, not part of a checkpoint: nothing is ever restored from it. All fields must be there and none besides, so
that a number with a misspelt name is never taken for one that is not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from moe_ckpt.core.operators import expert_id, gate_id
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.errors import DamagedError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.manifest import MOST_EXPERTS, OPERATOR_ID, LayerRecord
from moe_ckpt.format.schema import Check, Schema, anything, both, flag, mapping, maybe, number, require, text, whole
from moe_ckpt.format.sealed import check_version, parse_json

PROFILE_KIND = "moe_ckpt.profile"
MAX_PROFILE_BYTES = 1 << 28
"""A larger file is not read; a thousand lives of a large model take a few MB."""


@dataclass(frozen=True)
class OperatorRow:
    """One operator, or ``count`` experts of a layer that follow one another and have the same size.

    Attributes:
        id: Of the first operator.
        elements: Parameters of one operator.
        full_bytes: Weights and optimizer state of one operator, all ranks together.
        compute_bytes: Compute weights of one operator.
        stage: Pipeline stage of the operators.
        gradient_bytes: Gradients of one operator that an update consumes; None if unknown.
        weight_bytes: The part of ``full_bytes`` that is the model's own weights.
    """

    id: str
    count: int
    elements: int
    full_bytes: int
    compute_bytes: int
    stage: int = 0
    gradient_bytes: int | None = None
    weight_bytes: int = 0

    @property
    def size(self) -> OperatorBytes:
        """The bytes of one operator."""
        return OperatorBytes(self.full_bytes, self.compute_bytes, self.gradient_bytes, self.weight_bytes)

    @property
    def layer(self) -> int | None:
        """The MoE layer of an expert or a gate."""
        kind, _, rest = self.id.partition("/")
        return None if kind == "non_expert" else int(rest.partition("/")[0])

    @property
    def expert(self) -> int | None:
        """The first expert's number in its layer."""
        parts = self.id.split("/")
        return int(parts[2]) if parts[0] == "expert" else None

    @property
    def ids(self) -> tuple[str, ...]:
        if self.layer is None or self.expert is None:
            return (self.id,)
        return tuple(expert_id(self.layer, self.expert + at) for at in range(self.count))


@dataclass(frozen=True)
class ProfiledModel:
    """The model that was trained.

    Attributes:
        layers: MoE layers.
        operators: In the order of the run's catalog.
    """

    layers: tuple[LayerRecord, ...]
    operators: tuple[OperatorRow, ...]


@dataclass(frozen=True)
class Life:
    """One life of a run: from the start of its processes to its end or its last record.

    Attributes:
        run_id, generation: Of the store.
        finished: Training ended well.
        ranks, pp, dp, ep: Pipeline stages, and ranks of a stage as pipelines x expert-parallel width.
        host_memory_bytes: Budget of one rank's snapshots.
        started_unix_secs: The process began.
        opened_unix_secs: The store was opened.
        ready_unix_secs: The state is loaded, and the loop is entered.
        training_unix_secs: Likewise, but after a sparse window was computed again.
        last_unix_secs: When this was written down, the end of the life if it came to one.
        load_secs: From the opening of the store to loaded tensors.
        plan_secs: Of that, until it was known what comes from where.
        replayed_steps: Of a sparse window, computed again.
        restored_step: None for a run that began from scratch.
        first_step, last_step: Of this life, steps computed again aside.
        first_step_secs: From ``training_unix_secs`` on.
        last_step_unix_secs: The last one's end.
        iteration_secs, recent_iteration_secs, checkpoint_cost_secs, persist_secs, copy_bytes_per_sec,
            persist_bytes_per_sec, send_bytes_per_sec: Medians over many looks at ``policies.base.Measured``, on which
            the ranks agreed.
        replicas: Copies that peers' memory holds.
        sent_bytes, saved_bytes: Of those copies, what rank 0 sent, and what its peers had in their own training state.
        clean_steps, clean_secs: Iterations without checkpoint work beside them, and what they took together.
        update_secs: Median from the join before the optimizer to the step's end, in which no copy may run.
        stall_secs, agree_secs: Sums of ``StepRecord``'s over all steps, of rank 0.
        waited_secs: Of ``stall_secs``, at steps for which no buffer was free.
        begun, committed, failed, skipped: Snapshots; each step of a sparse window takes one.
        snapshot_bytes: Rank 0's, all that were begun together.
        assignments: Tokens times top-k of all MoE layers in this life.
        skewness: Mean over looks now and then.
        held_alike: Each rank holds all training state; None until a snapshot told.
    """

    run_id: str
    generation: int
    policy: Mapping[str, Any]
    ranks: int
    ranks_per_node: int
    pp: int
    dp: int
    ep: int
    host_memory_bytes: int
    started_unix_secs: float
    opened_unix_secs: float
    last_unix_secs: float
    ready_unix_secs: float | None = None
    training_unix_secs: float | None = None
    finished: bool = False
    load_secs: float | None = None
    plan_secs: float | None = None
    replayed_steps: int = 0
    restored_step: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    first_step_secs: float | None = None
    last_step_unix_secs: float | None = None
    iteration_secs: float | None = None
    recent_iteration_secs: float | None = None
    clean_steps: int = 0
    clean_secs: float = 0.0
    update_secs: float | None = None
    checkpoint_cost_secs: float | None = None
    persist_secs: float | None = None
    copy_bytes_per_sec: float | None = None
    persist_bytes_per_sec: float | None = None
    send_bytes_per_sec: float | None = None
    replicas: int = 0
    sent_bytes: int = 0
    saved_bytes: int = 0
    stall_secs: float = 0.0
    waited_secs: float = 0.0
    agree_secs: float = 0.0
    begun: int = 0
    committed: int = 0
    failed: int = 0
    skipped: int = 0
    snapshot_bytes: int = 0
    assignments: int = 0
    skewness: float | None = None
    held_alike: bool | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps done in this life."""
        return 0 if self.first_step is None or self.last_step is None else self.last_step - self.first_step + 1


def encode_life(life: Life) -> str:
    return json.dumps(asdict(life))


def encode_model(model: ProfiledModel | None) -> str:
    return "null" if model is None else _model(asdict(model))


def _model(rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> str:
    return f'{{"layers": {_lines(rows["layers"])}, "operators": {_lines(rows["operators"])}}}'


def encode_profile(fingerprint: str, model: str, lives: Sequence[str]) -> bytes:
    """Returns the bytes of a profile.

    Args:
        fingerprint: ``Catalog.fingerprint`` of the model.
        model, lives: Results of ``encode_model`` and ``encode_life``, which callers keep if they do not change.
    """
    head = f'"kind": "{PROFILE_KIND}", "format_version": {FORMAT_VERSION}, "fingerprint": {json.dumps(fingerprint)}'
    listed = ",\n  ".join(lives)
    return f'{{{head},\n"model": {model},\n"lives": [\n  {listed}\n]}}\n'.encode()


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "[\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n]"


def _parse(raw: bytes | bytearray, path: str) -> dict[str, Any]:
    body = parse_json(raw, path)
    if not isinstance(body, dict) or body.get("kind") != PROFILE_KIND:
        raise DamagedError(path, f"is no profile of a run: its kind is not {PROFILE_KIND!r}")
    check_version(body, path, PROFILE_KIND)
    return body


def earlier_lives(raw: bytes | bytearray, path: str) -> tuple[str, str, list[str]]:
    """Returns the arguments of ``encode_profile`` for a file. The numbers are not checked.

    Args:
        raw: A file that may be a profile.
        path: For messages.

    Raises:
        FormatVersionError: The profile is of another version.
        DamagedError: The file is no profile.
    """
    body = _parse(raw, path)
    try:
        model = "null" if body["model"] is None else _model(body["model"])
        return str(body["fingerprint"]), model, list(map(json.dumps, body["lives"]))
    except (KeyError, TypeError) as error:
        raise DamagedError(path, f"is no profile of a run: {error!r}") from error


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
    body = _parse(raw, path)
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
