"""Conversion of one checkpoint into files that other tools open without this package.

Tensors are put together and written one after the other (``lightning``: all at once), each verified on the
way. The output appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from moe_ckpt.core.user_text import parse_bytes
from moe_ckpt.errors import ConfigError, MoECheckpointError, StoreUnwritableError, UnsupportedError
from moe_ckpt.format.manifest import Manifest, step_of
from moe_ckpt.format.shard import TORCH_DTYPES
from moe_ckpt.interop.safetensors import MAX_FILE_BYTES, Progress, write_for_hub, write_safetensors
from moe_ckpt.interop.whole import WholeCheckpoint, lightning_dict, open_whole
from moe_ckpt.reading.memory.memory_outside import MemoryOutside, verify_opened
from moe_ckpt.reading.memory.slot_storage import OpenedMemory
from moe_ckpt.reading.reader import StoreReader, locate, with_step
from moe_ckpt.storage.local import why_unwritable

Target = Literal["dcp", "safetensors", "hf", "lightning"]
TARGETS: tuple[Target, ...] = ("dcp", "safetensors", "hf", "lightning")
_Writer = Callable[[WholeCheckpoint, Path, Progress], None]

_log = logging.getLogger("moe_ckpt")


def export(
    step_path: str | os.PathLike[str],
    to: Target = "dcp",
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    *,
    strip_prefix: str | None = None,
    max_file_bytes: int | str | None = None,
    config: str | os.PathLike[str] | None = None,
    chosen: Callable[[Manifest], None] | None = None,
    memory: Sequence[str] = (),
) -> Path:
    """Writes one checkpoint in another format.

    If retention removes the step of a store while it is read, the store's newest one is written in its place.

    Args:
        step_path: A step directory, or a store: its newest good dense step; or a URL.
        to: ``dcp``: directory of torch's own DCP writer, keys ``model.<name>`` and ``optim.state.<name>.<state>``.
            ``safetensors``: directory with ``model.safetensors`` (the model only) and a small JSON file; of a model of
            transformers as ``from_pretrained`` opens it, with ``config.json``.
            ``hf``: a directory that ``from_pretrained`` opens, or an error that says why not; of Megatron's models
            with the names of the hub.
            ``lightning``: one ``.ckpt`` that ``Trainer`` and ``load_from_checkpoint`` open.
        output: Must not exist; by default ``<step directory's name>_<to>`` in the working directory.
        progress: Told bytes.
        strip_prefix: Of ``safetensors``: what to take off names, ``"net."`` for instance. None: what a model of
            transformers has its names from; "": nothing.
        max_file_bytes: Of ``safetensors`` and ``hf``: larger models are split, with an index. "5GB" will do. None:
            50 GB.
        config: Of ``hf``, for checkpoints of Megatron: the directory of the model's ``config.json``, or that file.
        chosen: Told which checkpoint is taken, before anything of it is written; again of one that takes its place.
        memory: Directories as in ``Memory(directory=...)``, of an ended run: it is taken from there if storage has not
            the same step, or a newer one where none is named.

    Returns:
        The path written.

    Raises:
        ConfigError: unknown target, or the output exists.
        StoreUnwritableError: the output cannot be written.
        NoCheckpointError, DamagedError, CoverageError: the checkpoint cannot be read whole. Nothing is left.
        StepRemovedError: the named step was removed meanwhile, or of a store one after the other. Nothing is left.
    """
    if to not in TARGETS:
        raise ConfigError(f"cannot export to {to!r}: choose from {', '.join(TARGETS)}")
    if to != "safetensors" and strip_prefix is not None:
        raise ConfigError(f"strip_prefix={strip_prefix!r} is for safetensors: {to} keeps names as they are")
    if to not in ("safetensors", "hf") and max_file_bytes is not None:
        raise ConfigError(f"max_file_bytes={max_file_bytes!r} is for safetensors: {to} does not split files by size")
    if to != "hf" and config is not None:
        raise ConfigError(f"config={str(config)!r} is for hf: {to} keeps names as they are")
    if output is not None and "://" in os.fspath(output):
        raise ConfigError(
            f"output={os.fspath(output)!r}: export writes to local directories; copy the result from there"
        )
    limit = parse_bytes(MAX_FILE_BYTES if max_file_bytes is None else max_file_bytes, "max_file_bytes")
    writers: dict[str, _Writer] = {
        "dcp": _write_dcp,
        "safetensors": partial(write_safetensors, strip_prefix=strip_prefix, max_file_bytes=limit),
        "hf": partial(write_for_hub, config=config, max_file_bytes=limit),
        "lightning": _write_lightning,
    }
    suffix = ".ckpt" if to == "lightning" else f"_{to}"

    def written(reader: StoreReader, manifest: Manifest) -> Path:
        if chosen is not None:
            chosen(manifest)
        target = Path(output).expanduser() if output is not None else Path(manifest.directory + suffix)
        return _write(reader, manifest, writers[to], target, progress or (lambda done, total: None))

    if not memory:
        return with_step(step_path, written, dense=True)
    storage, directory = locate(step_path)
    with MemoryOutside(StoreReader(storage), memory) as outside:
        stored = outside.stored(directory)
        if stored is not None:
            return with_step(f"{storage.root}/{stored}", written)
        step = None if directory is None else step_of(directory)
        opened = outside.opened(step, partial(_verify, store=storage.root))
        return written(opened.reader, opened.manifest)


def _verify(opened: OpenedMemory, store: str) -> None:
    """Reads every byte of a checkpoint in memory. Raises as ``MemoryOutside.opened``, or ``UnsupportedError``."""
    if opened.logged:
        step = opened.manifest.step
        raise UnsupportedError(
            f"step {step} in memory is a step of a gradient log: write it to the store first, with moe-ckpt densify "
            f"{store} --step {step}"
        )
    verify_opened(opened)


def _write(reader: StoreReader, manifest: Manifest, writer: _Writer, target: Path, progress: Progress) -> Path:
    """Writes a checkpoint under a temporary name, and then gives it its own. Returns ``target``."""
    if os.path.lexists(target):
        raise _exists(target)
    beginning = f".{target.name}.{os.uname().nodename}."
    temporary = target.with_name(f"{beginning}{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.parent, beginning)
        writer(open_whole(reader, manifest), temporary, progress)
        if os.path.lexists(target):  # another export was quicker
            raise _exists(target)
        os.rename(temporary, target)
    except OSError as error:
        elsewhere = error.filename is not None and not str(error.filename).startswith(str(target.parent))
        if elsewhere or isinstance(error, MoECheckpointError):
            raise
        raise StoreUnwritableError(f"the output {target} cannot be written: {why_unwritable(target, error)}") from error
    finally:
        _remove(temporary)
    return target


def _exists(target: Path) -> ConfigError:
    return ConfigError(f"the output {target} exists already: export never overwrites; give another --output")


def _remove_leftovers(directory: Path, beginning: str) -> None:
    """Removes what exports to the same target left that were killed on this machine.

    Args:
        directory: Where they wrote.
        beginning: Of their temporary names, up to the process.
    """
    for path in directory.iterdir():
        pid = re.fullmatch(r"(\d{1,9})\.[0-9a-f]{8}\.tmp", path.name.removeprefix(beginning), re.ASCII)
        if pid is None or not path.name.startswith(beginning):
            continue
        try:
            os.kill(int(pid[1]), 0)
        except ProcessLookupError:
            _remove(path)
        except PermissionError:  # another user's, and alive
            continue


def _remove(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    with contextlib.suppress(NotADirectoryError, PermissionError):
        temporary.unlink(missing_ok=True)


def _write_dcp(checkpoint: WholeCheckpoint, target: Path, progress: Progress) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.state_dict_saver import save

    from moe_ckpt.interop.dcp import entries

    index = checkpoint.reader.index(checkpoint.manifest)
    keys: dict[str, str] = {}
    tree: dict[str, Any] = {}
    for entry in entries(checkpoint):
        value = entry.value
        if entry.key is not None:
            meta = index.meta(entry.key)
            value = torch.empty(meta.global_shape, dtype=TORCH_DTYPES[meta.dtype], device="meta")
            keys[entry.name] = entry.key
        _plant(tree, entry.path, value)
    metas = map(index.meta, keys.values())
    total = sum(prod(meta.global_shape) * TORCH_DTYPES[meta.dtype].itemsize for meta in metas)
    done = 0

    class OneByOne(DefaultSavePlanner):
        """Reads a tensor when the writer asks for it, so that memory holds one at a time."""

        def lookup_object(self, index: MetadataIndex) -> Any:
            nonlocal done
            if index.fqn not in keys:
                return super().lookup_object(index)
            values = checkpoint.tensor(keys[index.fqn])
            done += values.nbytes
            progress(done, total)
            return values

    writer = FileSystemWriter(target, thread_count=1, sync_files=True)
    try:
        save(tree, storage_writer=writer, planner=OneByOne(), **_alone(save))
    except CheckpointException as error:  # torch puts its own around what went wrong
        causes = [cause for cause, _ in error.failures.values()]
        raise next((cause for cause in causes if isinstance(cause, (MoECheckpointError, OSError))), error) from None


def _alone(save: Callable[..., object]) -> dict[str, bool]:
    """Returns the argument that tells torch's ``save`` that this process saves alone, even in a process group.

    Raises:
        UnsupportedError: torch is older than 2.7, whose ``save`` is then a collective of the whole group.
    """
    if "no_dist" in inspect.signature(save).parameters:
        return {"no_dist": True}
    if dist.is_available() and dist.is_initialized():
        raise UnsupportedError(
            f"torch {torch.__version__} cannot save a DCP checkpoint from one process of a group: export it from a "
            "process of its own (moe-ckpt export), or use torch 2.7 or newer"
        )
    return {}


def _plant(tree: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Set a leaf; a number in the path is a place in a list, and places come in order."""
    here: Any = tree
    for step, following in zip(path, (*path[1:], None), strict=True):
        fresh: Any = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(step, int):
            if step == len(here):
                here.append(fresh)
        elif following is None or step not in here:
            here[step] = fresh
        here = here[step]


def _write_lightning(checkpoint: WholeCheckpoint, target: Path, progress: Progress) -> None:
    tree = lightning_dict(checkpoint)
    arrays = list(_arrays(tree, ""))
    if arrays:
        _log.warning("%s will need weights_only=False to load: it holds numpy arrays at %s", target, ", ".join(arrays))
    with target.open("xb") as file:
        torch.save(tree, file)
        file.flush()
        os.fsync(file.fileno())
        total = file.tell()
    progress(total, total)


def _arrays(tree: Any, path: str) -> Iterator[str]:
    if isinstance(tree, np.ndarray):
        yield path
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _arrays(value, f"{path}/{key}")
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from _arrays(value, f"{path}/{number}")
