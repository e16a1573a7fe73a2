"""Documents that somebody edited and sealed again, by the hundred: every reader takes them, or says in this package's
words what is wrong with them. No other error ever comes out, and nothing is half done.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from moe_ckpt.cli.main import main as moe_ckpt
from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.core.operators import Catalog, MoELayer, Operator, OperatorKind, Span
from moe_ckpt.errors import DamagedError, FormatVersionError, MoECheckpointError
from moe_ckpt.format.contents import state_contents
from moe_ckpt.format.sealed import digest, seal, unseal
from moe_ckpt.interop.dcp import MoEStorageReader
from moe_ckpt.interop.export import export
from moe_ckpt.interop.whole import lightning_dict, open_lightning
from moe_ckpt.modeling.rng import restore_rng
from moe_ckpt.reading.reader import StoreReader, open_step
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.run.run_ledger import RunLedger
from moe_ckpt.storage import LocalStorage
from tests.support.collecting import clean_start
from tests.support.store_builder import OPERATOR_OF, PARAMETERS, STACK, LiveState, TinyRun, megatron_state
from tests.support.verifying import verify_store

STEP = "step_00000002"
MANIFEST = f"{STEP}/MANIFEST.json"
STATE = f"{STEP}/rank_00000_state.json"
SHARD = f"{STEP}/rank_00000_non_expert.safetensors"
PART = f"{STEP}/PART.json"

Edit = tuple[str, tuple[Any, ...], Any]
"""(document, where in it, what is put there); ``DELETED`` removes it."""
DELETED = object()


def nested(times: int) -> Any:
    found: Any = []
    for _ in range(times):
        found = [found]
    return found


REPLACEMENTS = (
    DELETED,
    None,
    True,
    "x",
    "\ud800",
    7,
    -1,
    1.5,
    2**62,
    2**63,
    -(10**400),
    [],
    [None],
    [[1]],
    {},
    {"a": {"b": None}},
    nested(100),
    nested(3000),
    {"$": "float", "v": "nan"},
    {"$": "set", "v": [[]]},
    {"$": "tensor", "v": "no such tensor"},
    {"$": "array", "v": ["plain/buffers/running", "O"]},
    {"$": "array", "v": ["plain/buffers/running", ","]},
    {"$": "dict", "v": [[{"$": "dict", "v": []}, 1]]},
    {"$": "bytes", "v": "\x00"},
    {"$": ["unhashable"], "v": 1},
)


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document; of long lists of numbers only the ends."""
    yield at
    if isinstance(document, dict):
        for name, item in document.items():
            yield from places(item, (*at, name))
    elif isinstance(document, list):
        long = len(document) > 8
        for number, item in enumerate(document):
            if not long or number in (0, 1, len(document) - 1):
                yield from places(item, (*at, number))


def edited(document: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return {} if new is DELETED else new
    changed = copy.deepcopy(document)
    here = changed
    for step in at[:-1]:
        here = here[step]
    if new is DELETED:
        del here[at[-1]]
    else:
        here[at[-1]] = new
    return changed


@dataclass
class Store:
    """A store of two steps, and its documents taken apart."""

    root: Path

    def __post_init__(self) -> None:
        self.files = {str(p.relative_to(self.root)): p.read_bytes() for p in self.root.rglob("*") if p.is_file()}
        self.documents = {name: unseal(self.files[name], name) for name in (MANIFEST, PART, STATE, "store.json")}
        raw = self.files[SHARD]
        self.header_nbytes = 8 + int.from_bytes(raw[:8], "little")
        self.documents[SHARD] = json.loads(raw[8 : self.header_nbytes])
        meta = self.documents[SHARD]["__metadata__"]
        meta["moe_ckpt"] = json.loads(meta["moe_ckpt"])
        self.seal_nbytes = 16 + 8 * len(meta["moe_ckpt"]["slices"])

    def apply(self, edit: Edit) -> None:
        """Write the edited document, sealed, and what holds its checksum."""
        name, at, new = edit
        document = edited(self.documents[name], at, new)
        raw = self._shard(document) if name == SHARD else sealed(document)
        (self.root / name).write_bytes(raw)
        if name in (STATE, SHARD):
            part = copy.deepcopy(self.documents[PART])
            for row in part["states"] if name == STATE else ():
                if row[0] == 0:
                    row[1:] = [len(raw), digest(raw)]
            for row in part["files"] if name == SHARD else ():
                if row[:2] == ["non_expert", 0]:
                    header_nbytes = 8 + int.from_bytes(raw[:8], "little") + self.seal_nbytes
                    row[2:] = [len(raw), header_nbytes, digest(raw[:header_nbytes])]
            raw = seal(part)
            (self.root / PART).write_bytes(raw)
        if name in (STATE, SHARD, PART):
            manifest = copy.deepcopy(self.documents[MANIFEST])
            manifest["parts"][0][1:] = [len(raw), digest(raw)]
            (self.root / MANIFEST).write_bytes(seal(manifest))

    def _shard(self, table: Any) -> bytes:
        if isinstance(table, dict) and isinstance(table.get("__metadata__"), dict):
            inner = table["__metadata__"].get("moe_ckpt")
            if isinstance(inner, (dict, list)):
                table["__metadata__"]["moe_ckpt"] = dumped(inner)
        head = dumped(table).encode()
        head += b" " * (-len(head) % 8)
        return len(head).to_bytes(8, "little") + head + self.files[SHARD][self.header_nbytes :]

    def restore(self) -> None:
        for name in (MANIFEST, PART, STATE, SHARD, "store.json"):
            (self.root / name).write_bytes(self.files[name])


def dumped(document: Any) -> str:
    """JSON of anything, however deep."""
    try:
        return json.dumps(document, separators=(",", ":"))
    except RecursionError:
        mark = "%deep%"
        flat = json.dumps(_flattened(document, mark), separators=(",", ":"))
        return flat.replace(f'"{mark}"', "[" * 3001 + "]" * 3001)


def _flattened(document: Any, mark: str) -> Any:
    if isinstance(document, dict):
        return {name: _flattened(item, mark) for name, item in document.items()}
    if isinstance(document, list):
        deep, here = 0, document
        while isinstance(here, list) and len(here) == 1:
            deep, here = deep + 1, here[0]
        return mark if deep > 500 else [_flattened(item, mark) for item in document]
    return document


def sealed(document: Any) -> bytes:
    """A document of anything, with its right checksum."""
    body = dumped(document).encode()
    return b'{"xxh3_128": "' + digest(body).encode() + b'", "body": ' + body + b"}\n"


def lightning_run(root: Path) -> TinyRun:
    run = TinyRun(root)
    run.save(1)
    run.save(2, experts=(0, 1))
    return run


def megatron_run(root: Path) -> TinyRun:
    run = TinyRun(root)
    run._state = lambda step, rank: megatron_state(step, rank, {f"bias.{rank}": torch.zeros(2)})
    run.save(1)
    run.save(2, experts=(0, 1))
    return run


@pytest.fixture(scope="module", params=[lightning_run, megatron_run], ids=["lightning", "megatron"])
def store(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("edited") / "store"
    request.param(root)
    return Store(root)


CATALOG = Catalog(
    (
        *(Operator(f"expert/0/{e}", OperatorKind.EXPERT, (Span(STACK, e, e + 1),), 0, e) for e in range(4)),
        Operator("gate/0", OperatorKind.GATE, (Span("blocks.0.moe.gate.weight"),), 0),
        *(
            Operator(op, OperatorKind.NON_EXPERT, (Span(fqn),))
            for fqn, op in OPERATOR_OF.items()
            if op.startswith("non_expert/")
        ),
    ),
    (MoELayer(0, "blocks.0.moe", 4, 2),),
    {fqn: shape for fqn, (shape, _) in PARAMETERS.items()},
)


# --- the readers: each returns None, or raises ---


def read_verify(root: Path) -> None:
    verify_store(LocalStorage(root))


def read_clean_start(root: Path) -> None:
    copied = root.with_name("copied")
    shutil.copytree(root, copied)
    try:
        clean_start(LocalStorage(copied))
    finally:
        shutil.rmtree(copied)


def read_inspect(root: Path) -> None:
    moe_ckpt(["inspect", str(root)])
    moe_ckpt(["inspect", str(root / STEP), "--json"])


def read_window(root: Path) -> None:
    moe_ckpt(["window", str(root / STEP), "--window", "2", "--explain"])


def read_resume(root: Path) -> None:
    """As the adapters do: state, generators and books."""
    run_ledger = RunLedger(CATALOG)
    state = LiveState()
    told = []

    def admits(manifest: Any, plain: Any) -> None:
        run_ledger.check(manifest)
        told.append(state.untouched() or len(told))

    restored = resume_newest(LocalStorage(root), SoloCommunicator(), state, admits=admits)
    assert restored is not None
    assert told[0] is True
    framework = restored.plain.get("framework")
    if framework in ("lightning", "megatron"):
        restore_rng(restored.plain["rng"])
    run_ledger.resume_from(restored.manifest, same_store=True, tokens_from_host=None)


def read_export(target: str) -> Any:
    def read(root: Path) -> None:
        output = root.with_name("output")
        try:
            export(root / STEP, target, output)
        finally:
            assert sorted(path.name for path in root.parent.iterdir()) in (["store"], ["output", "store"])
            shutil.rmtree(output, ignore_errors=True)
            output.unlink(missing_ok=True)

    return read


def read_dcp(root: Path) -> None:
    wanted = {"model": {fqn: torch.zeros(shape, dtype=dtype) for fqn, (shape, dtype) in PARAMETERS.items()}}
    try:
        dcp.load(wanted, storage_reader=MoEStorageReader(root / STEP), no_dist=True)
    except CheckpointException as error:  # torch's own, around what ``read_data`` raises
        [(cause, _)] = error.failures.values()
        raise cause from None


def read_lightning(root: Path) -> None:
    reader, manifest = open_step(root / STEP)
    lightning_dict(open_lightning(reader, manifest))


ALWAYS = (read_verify, read_resume, read_inspect)
IN_TURN = (
    read_window,
    read_export("safetensors"),
    read_dcp,
    read_lightning,
    read_clean_start,
    read_export("lightning"),
    read_export("dcp"),
)


def read_all(root: Path, readers: Any) -> int:
    """How many readers refused; anything but an error of this package is let through."""
    refused = 0
    for read in readers:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            try:
                read(root)
            except MoECheckpointError:
                refused += 1
    return refused


def all_edits(store: Store) -> list[Edit]:
    return [
        (name, at, new)
        for name, document in store.documents.items()
        for at in places(document)
        for new in REPLACEMENTS
        if at or new is not DELETED
    ]


def sweep(store: Store, edits: list[Edit], *, everywhere: bool) -> int:
    state = torch.get_rng_state()
    refused = 0
    try:
        for number, edit in enumerate(edits):
            store.apply(edit)
            readers = IN_TURN if everywhere else (IN_TURN[number % len(IN_TURN)],)
            try:
                refused += read_all(store.root, (*ALWAYS, *readers)) > 0
            except Exception as error:
                raise AssertionError(f"{edit} gave {type(error).__name__}: {error}") from error
    finally:
        store.restore()
        torch.set_rng_state(state)
        random.seed()
    return refused


def test_the_unedited_store_is_read_by_all(store):
    readers = [read for read in (*ALWAYS, *IN_TURN) if read is not read_lightning]
    if store.documents[STATE]["state"]["framework"] == "megatron":
        readers = [read for read in readers if read is not IN_TURN[5]]  # not to Lightning's format
    assert read_all(store.root, readers) == 0
    assert verify_store(LocalStorage(store.root)) == []


@pytest.mark.quick("lightning")
def test_hundreds_of_edits_give_no_error_but_ours(store):
    chosen = random.Random(11).sample(all_edits(store), 260)
    assert sweep(store, chosen, everywhere=False) > 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(8))
def test_thousands_of_edits_give_no_error_but_ours(store, part):
    chosen = random.Random(7).sample(all_edits(store), 4000)[part::8]
    sweep(store, chosen, everywhere=True)


def test_an_operator_that_is_in_no_file_is_damage_to_everyone(store):
    store.apply((PART, ("files",), []))
    try:
        [damage] = verify_store(LocalStorage(store.root))
        assert (damage.path, damage.affects) == (PART, (STEP,))
        assert "is in no file" in damage.reason
        with pytest.raises(DamagedError, match="is in no file"):
            export(store.root / STEP, "safetensors", store.root.parent / "out")
        assert not (store.root.parent / "out").exists()
        assert moe_ckpt(["verify", str(store.root)]) == 1
    finally:
        store.restore()


def _log(**edits):
    update = {"optimizer": 0, "groups": [{"lr": 0.1}], "parameters": ("w",), "grad_scale": None, "found_inf": None}
    count = {"optimizer": 0, "state": "step", "units": ["w"], "values": torch.ones(1)}
    for name, edit in edits.items():
        (update if name in update else count)[name] = edit
    return {"gradient_log": {"updates": [update], "counts": [count], "since": 3}}


@pytest.mark.parametrize(
    "edit",
    [
        {"units": ["w", "v"]}, {"units": 5}, {"units": [["w"]]}, {"values": [1.0]}, {"values": torch.ones(1, 1)},
        {"parameters": [{}]}, {"parameters": None}, {"groups": [{"betas": "ab"}]}, {"grad_scale": "x"},
    ],
)  # fmt: skip
def test_a_gradient_log_with_a_mistake_is_no_state_of_a_rank(edit):
    assert state_contents(_log()) == ""
    assert "gradient_log" in state_contents(_log(**edit))


@pytest.mark.parametrize("found", ["9" * 100_000, ["9" * 50_000] * 3])
def test_what_a_document_says_is_not_told_whole(found):
    for error in (FormatVersionError("a", found, 1), DamagedError("a", f"is of run {found!r}")):
        assert len(str(error)) < 3000
        assert len(error.args[0]) < 3000


@pytest.mark.parametrize("target", ["dcp", "safetensors"])
def test_an_export_of_a_damaged_step_is_one_line_and_exit_1(store, target, capsys, tmp_path):
    path = store.root / SHARD
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    try:
        assert moe_ckpt(["export", str(store.root / STEP), "--to", target, "-o", str(tmp_path / "out")]) == 1
    finally:
        store.restore()
    [line] = capsys.readouterr().err.splitlines()
    assert SHARD in line
    assert "checksum mismatch" in line
    assert not any(tmp_path.iterdir())


def test_a_wrong_state_is_found_before_anything_is_loaded(store):
    """A state that its trainer could not take back is damage: the checkpoint before it is taken."""
    store.apply((STATE, ("state", "rng", "python"), [3, [1], None]))
    try:
        state = LiveState()
        restored = resume_newest(LocalStorage(store.root), SoloCommunicator(), state)
        assert restored.manifest.directory == "step_00000001"
        reader = StoreReader(LocalStorage(store.root))
        said = rf"^{STATE}, step 2, rank 0: it holds no state of a rank: field rng.python is no state"
        with pytest.raises(DamagedError, match=said):
            reader.state(reader.manifest(STEP), 0)
    finally:
        store.restore()
