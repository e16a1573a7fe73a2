"""The profile that a run writes down of itself: bytes <-> frozen records. See docs/profile.md.

Plain JSON for people and for the simulator, not part of a checkpoint: nothing is ever restored from it. All fields of a
version must be there and none besides, so that a number with a misspelt name is never taken for one that is not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from moe_ckpt.core.operators import expert_id, gate_id
from moe_ckpt.errors import DamagedError, FormatVersionError
from moe_ckpt.format.manifest import LayerRecord

PROFILE_VERSION = 1
PROFILE_KIND = "moe_ckpt.profile"
_MOST_EXPERTS = 1 << 20
"""A file that claims more, of all layers, is damaged: nobody is to run out of memory over it."""
_HUGE = 1e300
_OPERATOR = re.compile(r"expert/(0|[1-9]\d*)/(0|[1-9]\d*)|gate/(0|[1-9]\d*)|non_expert/.+", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class OperatorRow:
    """One operator, or ``count`` experts of a layer that follow one another and weigh the same.

    id: of the first. elements: parameters of one. full_bytes: one's weights and optimizer state, of all ranks together.
    compute_bytes: what forward and backward read of one. stage: pipeline stage that holds it.
    """

    id: str
    count: int
    elements: int
    full_bytes: int
    compute_bytes: int
    stage: int = 0

    @property
    def layer(self) -> int | None:
        """MoE layer of an expert or a gate."""
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
    """layers: MoE layers. operators: in the order of the run's catalog."""

    layers: tuple[LayerRecord, ...]
    operators: tuple[OperatorRow, ...]


@dataclass(frozen=True)
class Life:
    """One life of a run: from the start of its processes to its end or to the last that was heard of it.

    run_id, generation: of the store. finished: training ended well.
    ranks, pp, dp, ep: pipeline stages, and ranks of a stage as pipelines x expert-parallel width.
    host_memory_bytes: budget of one rank's snapshots.

    started_unix_secs: the process began. opened_unix_secs: the store was opened. ready_unix_secs: the state is loaded,
        and the loop is entered. training_unix_secs: likewise, but after a sparse window was computed again.
        last_unix_secs: when this was written down, the end of the life if it came to one.
    load_secs: from the opening of the store to the restored state. restored_step: None for a run that began anew.
    first_step, last_step: of this life, steps computed again aside. first_step_secs: from ``training_unix_secs`` on.
        last_step_unix_secs: the last one's end.

    iteration_secs, recent_iteration_secs, checkpoint_cost_secs, persist_secs, copy_bytes_per_sec,
        persist_bytes_per_sec: medians over many looks at ``policies.base.Measured``, on which the ranks agreed.
    clean_steps, clean_secs: iterations without checkpoint work beside them, and what they took together.
    update_secs: median from the join before the optimizer to the step's end, in which no copy may run.
    stall_secs, agree_secs: sums of ``StepRecord``'s over all steps, of rank 0. waited_secs: of ``stall_secs``, at steps
        for which no buffer was free.
    begun, committed, failed, skipped: snapshots; each step of a sparse window takes one. snapshot_bytes: rank 0's, all
        that were begun together.
    assignments: tokens times top-k of all MoE layers in this life. skewness: mean over looks now and then.
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

    @property
    def steps(self) -> int:
        """Optimizer steps done in this life."""
        return 0 if self.first_step is None or self.last_step is None else self.last_step - self.first_step + 1


@dataclass(frozen=True)
class Profile:
    """fingerprint: ``Catalog.fingerprint``. model: None until its tensors were weighed. lives: oldest first."""

    fingerprint: str
    model: ProfiledModel | None = None
    lives: tuple[Life, ...] = field(default=())


def encode_life(life: Life) -> str:
    return json.dumps(asdict(life))


def encode_model(model: ProfiledModel | None) -> str:
    if model is None:
        return "null"
    return f'{{"layers": {_lines(map(asdict, model.layers))}, "operators": {_lines(map(asdict, model.operators))}}}'


def encode_profile(fingerprint: str, model: str, lives: Sequence[str]) -> bytes:
    """model, lives: as the functions above encode them, so that what is known to be the same is encoded once."""
    head = f'"kind": "{PROFILE_KIND}", "format_version": {PROFILE_VERSION}, "fingerprint": {json.dumps(fingerprint)}'
    listed = ",\n  ".join(lives)
    return f'{{{head},\n"model": {model},\n"lives": [\n  {listed}\n]}}\n'.encode()


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "[\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n]"


def decode_profile(raw: bytes | bytearray, path: str) -> Profile:
    """path: for messages.

    Raises:
        FormatVersionError: a version that is not known here.
        DamagedError: anything else that is wrong; names the field.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DamagedError(path, f"is no JSON ({error})") from error
    if not isinstance(body, dict) or body.get("kind") != PROFILE_KIND:
        raise DamagedError(path, f"is no profile of a run: its kind is not {PROFILE_KIND!r}")
    if body.get("format_version") != PROFILE_VERSION or isinstance(body["format_version"], bool):
        raise FormatVersionError(path, body.get("format_version"), (PROFILE_VERSION,))
    top = _Fields(path, "", body, ("kind", "format_version", *(each.name for each in fields(Profile))))
    model = None if body["model"] is None else _decode_model(path, body["model"])
    lives = tuple(_decode_life(path, f"lives[{at}]", raw) for at, raw in enumerate(top.rows("lives")))
    return Profile(top.take("fingerprint", _text), model, lives)


def _decode_model(path: str, raw: Any) -> ProfiledModel:
    found = _Fields(path, "model", raw, ("layers", "operators"))
    layers = [
        _Fields(path, f"model.layers[{at}]", row, ("name", "experts", "top_k"))
        for at, row in enumerate(found.rows("layers"))
    ]
    operators = [
        _Fields(path, f"model.operators[{at}]", row, tuple(each.name for each in fields(OperatorRow)))
        for at, row in enumerate(found.rows("operators"))
    ]
    model = ProfiledModel(
        tuple(
            LayerRecord(row.take("name", _text), row.take("experts", _from_one), row.take("top_k", _maybe(_from_one)))
            for row in layers
        ),
        tuple(
            OperatorRow(
                row.take("id", _operator),
                row.take("count", _from_one),
                *(row.take(name, _from_zero) for name in ("elements", "full_bytes", "compute_bytes", "stage")),
            )
            for row in operators
        ),
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
    if sum(layer.experts for layer in model.layers) > _MOST_EXPERTS:
        raise DamagedError(path, f"model.layers have more than {_MOST_EXPERTS:,} experts")
    found = [op for row in model.operators for op in row.ids]
    wanted = {gate_id(at) for at in range(len(model.layers))}
    wanted |= {expert_id(at, expert) for at, layer in enumerate(model.layers) for expert in range(layer.experts)}
    missing = sorted(wanted.difference(found))
    if missing:
        raise DamagedError(path, f"model.operators: {', '.join(missing[:4])} missing ({len(missing)} in all)")
    if len(set(found)) != len(found):
        raise DamagedError(path, "model.operators: an operator is listed twice")


def _decode_life(path: str, where: str, raw: Any) -> Life:
    found = _Fields(path, where, raw, tuple(_LIFE))
    life = Life(**{name: found.take(name, check) for name, check in _LIFE.items()})
    if life.pp * life.dp * life.ep != life.ranks:
        raise DamagedError(path, f"{where}: pp * dp * ep is {life.pp * life.dp * life.ep}, but ranks is {life.ranks}")
    if (life.first_step is None) != (life.last_step is None) or (life.first_step or 0) > (life.last_step or 0):
        raise DamagedError(path, f"{where}: first_step is {life.first_step}, but last_step is {life.last_step}")
    return life


class _Fields:
    """One JSON object of a profile. names: what it must have, and nothing besides."""

    def __init__(self, path: str, where: str, raw: Any, names: tuple[str, ...]) -> None:
        self._path, self._where, self._raw = path, where, raw
        if not isinstance(raw, dict):
            raise DamagedError(path, f"{where} is {raw!r}, not an object")
        for word, odd in (("missing", set(names) - raw.keys()), ("not known", raw.keys() - set(names))):
            if odd:
                raise DamagedError(path, f"field {self._name(min(odd))} is {word}")

    def _name(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def take(self, name: str, check: Callable[[Any], str]) -> Any:
        """The field, unless ``check`` says what it must be."""
        value = self._raw[name]
        wanted = check(value)
        if wanted:
            raise DamagedError(self._path, f"field {self._name(name)} is {value!r}, but must be {wanted}")
        return value

    def rows(self, name: str) -> list[Any]:
        found: list[Any] = self.take(name, lambda value: "" if isinstance(value, list) else "a list")
        return found


def _text(value: Any) -> str:
    return "" if isinstance(value, str) else "text"


def _operator(value: Any) -> str:
    return "" if isinstance(value, str) and _OPERATOR.fullmatch(value) else "the id of an operator"


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _object(value: Any) -> str:
    return "" if isinstance(value, dict) else "an object"


def _from_zero(value: Any) -> str:
    return "" if _is_whole(value) and value >= 0 else "a whole number of at least 0"


def _from_one(value: Any) -> str:
    return "" if _is_whole(value) and value >= 1 else "a whole number of at least 1"


def _amount(value: Any) -> str:
    return "" if _is_number(value) and value >= 0 else "a finite number of at least 0"


def _above_zero(value: Any) -> str:
    return "" if _is_number(value) and value > 0 else "a finite number above 0"


def _portion(value: Any) -> str:
    return "" if _is_number(value) and 0 <= value <= 1 else "a number from 0 to 1"


def _maybe(check: Callable[[Any], str]) -> Callable[[Any], str]:
    def checked(value: Any) -> str:
        wanted = "" if value is None else check(value)
        return f"{wanted}, or null" if wanted else ""

    return checked


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _HUGE  # NaN is not


_LIFE: Mapping[str, Callable[[Any], str]] = {
    "run_id": _text,
    "policy": _object,
    "finished": _flag,
    **dict.fromkeys(("ranks", "ranks_per_node", "pp", "dp", "ep"), _from_one),
    **dict.fromkeys(
        ("generation", "host_memory_bytes", "begun", "committed", "failed", "skipped", "snapshot_bytes", "assignments"),
        _from_zero,
    ),
    "clean_steps": _from_zero,
    **dict.fromkeys(("started_unix_secs", "opened_unix_secs", "last_unix_secs", "stall_secs", "waited_secs"), _amount),
    **dict.fromkeys(("agree_secs", "clean_secs"), _amount),
    **dict.fromkeys(("ready_unix_secs", "training_unix_secs", "last_step_unix_secs"), _maybe(_amount)),
    **dict.fromkeys(
        ("checkpoint_cost_secs", "persist_secs", "update_secs", "load_secs", "first_step_secs"), _maybe(_amount)
    ),
    **dict.fromkeys(("iteration_secs", "recent_iteration_secs"), _maybe(_above_zero)),
    **dict.fromkeys(("copy_bytes_per_sec", "persist_bytes_per_sec"), _maybe(_above_zero)),
    **dict.fromkeys(("restored_step", "first_step", "last_step"), _maybe(_from_zero)),
    "skewness": _maybe(_portion),
}
"""Field of ``Life`` -> what says what it must be, "" if it is that."""
