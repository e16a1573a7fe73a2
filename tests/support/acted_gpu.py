"""A GPU that is only acted, for tests on machines without one: it shows who waits for it, and who reads too early.

Tensors lie in host memory and say that they are on ``cuda:0``: those that were moved there, and whatever is computed
from them. Inside ``with ActedGPU() as gpu`` the calling thread is the training thread. What makes a thread wait for a
real device (``item()``, ``cpu()``, a copy into memory that is not page-locked, ``Event.synchronize`` and the like) is
noted in ``gpu.waits`` if it happens on that thread and the package asked for it. Bytes that leave by a non-blocking
``copy_`` into page-locked memory are there only when an event behind it was waited for; until then there is rubbish.
They are those of that moment: what training has written to the tensor by then was too early, unless its stream waited,
or has the copy itself.

Within ``gpu.capturing()`` the training thread captures a CUDA graph, in CUDA's "global" mode: calls of other threads
that would end the capture are noted in ``gpu.disturbances``, those of threads that have left that mode in
``gpu.meanwhile``.

What page-locks mapped memory in place takes as long as on a real one, refuses what is locked already, and leaves an
error behind for the thread's next call, as CUDA does. ``require_mapped`` fails if anything was unmapped while locked.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, ValuesView
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

CUDA = torch.device("cuda", 0)
RUBBISH = 0x5A
TOTAL = 80 << 30
"""Bytes of the device."""
LOCKING_SECS_PER_BYTE = 0.4e-9
"""As measured on an H100: 0.4 s for each GB."""
_GLOBAL = 0
"""``CU_STREAM_CAPTURE_MODE_GLOBAL``."""
_ALREADY_LOCKED, _NOT_LOCKED, _NO_MEMORY = 712, 713, 2

_READS = {"__array__", "__bool__", "__contains__", "__float__", "__format__", "__index__", "__int__", "__repr__"}
_READS |= {"allclose", "equal", "is_nonzero", "item", "numpy", "tolist"}
"""Functions of torch that give Python values of a tensor's elements."""
_KEPT_NBYTES = 512
"""So much is made on a full device, too: torch has it from tensors that are gone."""
_MAKES = {"empty", "empty_like", "full", "ones", "ones_like", "zeros", "zeros_like"}
"""Functions of torch that make a tensor."""
_SIZED_BY_VALUES = ("_local_scalar_dense", "_unique2", "equal", "is_nonzero", "masked_select", "nonzero")
"""Kernels whose result the host needs before it can go on, whatever function calls them."""


_PASS_ON = ("_stepping", "__torch_dispatch__", "wrapped", "preceded", "setup_data")
"""Functions of the package in which others compute: Megatron's optimizer, the model while types are probed, the closure
of an optimizer, what zeroes gradients, and Lightning's setting up of data, before the first step."""


def pages_touched() -> int:
    """Returns how many pages the calling thread has touched for the first time."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


class Transfer:
    """Bytes on their way to the host."""

    def __init__(self, target: torch.Tensor, value: torch.Tensor) -> None:
        self._lock = threading.Lock()
        self._target, self._value = target, value
        self.is_done = self._is_read = False

    def read(self) -> None:
        """The device works on nothing else until the bytes have left it."""
        with self._lock:
            if not (self.is_done or self._is_read):
                self._value, self._is_read = self._value.clone(), True

    def finish(self) -> None:
        with self._lock:
            if not self.is_done:
                self._target.copy_(self._value)
            self.is_done = True
            self._value = self._target


def _under_way(*work: Transfer) -> list[Transfer]:
    """Each once, in order: those that are done need no waiting."""
    return [transfer for transfer in dict.fromkeys(work) if not transfer.is_done]


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.work: list[Transfer] = []

    def wait_event(self, event: Event | Stream) -> None:
        self.work = _under_way(*self.work, *event.work)
        if self is _acted()._training:
            _acted().joins += 1
            for transfer in self.work:
                transfer.read()

    wait_stream = wait_event

    def synchronize(self) -> None:
        _acted().note("Stream.synchronize")
        for transfer in self.work:
            transfer.finish()


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.work: list[Transfer] = []
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or _acted().stream
        self.work, self.at = _under_way(*stream.work), time.perf_counter()

    def query(self) -> bool:
        _acted().unsafe("Event.query")
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3

    def synchronize(self) -> None:
        _acted().note("Event.synchronize")
        for transfer in self.work:
            transfer.finish()


class ActedGPU(TorchFunctionMode):
    """See the module's docstring.

    Attributes:
        waits: (what waited, functions of the package that led to it, innermost first).
        departures: How many transfers of the training thread left by events.
        arrivals: Copies to the device that the training thread began: bytes, and whether their source was page-locked.
        joins: How often the training thread's stream was made to wait for another one.
        secs: Processor time of operations on the device, on the training thread: it computes on the host here.
        pages: Pages that they touched for the first time: its memory is the host's.
        locked: Address -> bytes of mapped memory that was page-locked in place.
        lockers: (name of the thread, bytes) of each time that memory was page-locked, mapped or not.
        unlockers: Names of the threads that unlocked mapped memory.
        locking_secs_per_byte: What that costs.
        disturbances: (name of the thread, call) of what ended a capture.
        meanwhile: The same, of what would have, had its thread not left captures of others alone.
        is_full: Another process has taken all memory of the device: nothing is made, gathered, laid out or converted
            there.
        refusals: How many of the next calls that lock memory fail, for want of memory.
    """

    active: ActedGPU | None = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[str, tuple[str, ...]]] = []
        self.departures = self.joins = self.pages = 0
        self.arrivals: list[tuple[int, bool]] = []
        self.secs = 0.0
        self._streams = threading.local()
        self._training = Stream()
        self._there: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.locked: dict[int, int] = {}
        self.lockers: list[tuple[str, int]] = []
        self.unlockers: list[str] = []
        self.locking_secs_per_byte, self.refusals = LOCKING_SECS_PER_BYTE, 0
        self.is_full = self._is_capturing = False
        self.disturbances: list[tuple[str, str]] = []
        self.meanwhile: list[tuple[str, str]] = []
        self._capture_mode = threading.local()
        self._files: dict[int, str] = {}
        self._errors = threading.local()
        self._thread = threading.current_thread()
        self._stack = contextlib.ExitStack()
        self._special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: lambda func, tensor: CUDA if self.holds(tensor) else func(tensor),
            torch.Tensor.is_cuda.__get__: lambda func, tensor: self.holds(tensor),
            torch.Tensor.is_cpu.__get__: lambda func, tensor: not self.holds(tensor),
            torch.Tensor.is_pinned: lambda func, tensor: self._is_pinned(tensor),
            torch.Tensor.cpu: lambda func, tensor, *_, **__: self._moved(tensor, False, "cpu"),
            torch.Tensor.cuda: lambda func, tensor, *_, **__: self._moved(tensor, True, "cuda"),
            torch.Tensor.to: self._to,
            torch.Tensor.copy_: self._copy,
            torch.cat: self._cat,
        }

    def __enter__(self) -> ActedGPU:
        names = {"Event": Event, "Stream": Stream, "current_stream": lambda *_: self.stream, "stream": self._on_stream}
        names["synchronize"] = lambda *_: self.note("torch.cuda.synchronize")
        names |= {"cudart": lambda: _Runtime(self), "check_error": _check_error}
        names |= {"mem_get_info": lambda *_: (0 if self.is_full else TOTAL, TOTAL), "memory_reserved": lambda *_: 0}
        names["get_device_name"] = lambda *_: "an acted GPU"
        for name, acted in names.items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, acted))
        # Not only on this thread: the copying thread makes host buffers.
        self._stack.enter_context(mock.patch.object(torch, "empty", self._pinning(torch.empty)))
        grouped = self._grouping(torch._C._group_tensors_by_device_and_dtype)
        self._stack.enter_context(mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped))
        self._stack.enter_context(mock.patch.object(ActedGPU, "active", self))
        self._stack.enter_context(mock.patch.object(torch.Tensor, "record_stream"))
        self._stack.enter_context(mock.patch.object(ctypes, "CDLL", self._library(ctypes.CDLL)))
        self._stack.enter_context(_Kernels(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()
        if error[0] is None:
            self.require_mapped()

    def require_mapped(self) -> None:
        """Fails if the pages that are page-locked are not mapped any more, or those of another file are."""
        now = _mappings()
        for address, file in self._files.items():
            assert _file_at(now, address) == file, f"{self.locked[address]} bytes of {file} were unmapped while locked"

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def unsafe(self, call: str) -> None:
        """A thread makes a call that "may be unsafe" in a capture, as CUDA's documentation names it."""
        if self._is_capturing and threading.current_thread() is not self._thread:
            is_global = getattr(self._capture_mode, "value", _GLOBAL) == _GLOBAL
            (self.disturbances if is_global else self.meanwhile).append((threading.current_thread().name, call))

    def _exchange_capture_mode(self, pointer: Any) -> int:
        """``cuThreadExchangeStreamCaptureMode``."""
        before = getattr(self._capture_mode, "value", _GLOBAL)
        self._capture_mode.value, pointer._obj.value = pointer._obj.value, before
        return 0

    def lock(self, address: int, nbytes: int) -> int:
        """Returns the code of CUDA's error; 0 if there is none."""
        self.require_mapped()
        self.unsafe("cudaHostRegister")
        self.lockers.append((threading.current_thread().name, nbytes))
        if any(begin < address + nbytes and address < begin + size for begin, size in self.locked.items()):
            return self.failed(_ALREADY_LOCKED)
        time.sleep(self.locking_secs_per_byte * nbytes)
        self.locked[address], self._files[address] = nbytes, _file_at(_mappings(), address)
        return 0

    def unlock(self, address: int) -> int:
        """As ``lock``."""
        self.require_mapped()
        self.unsafe("cudaHostUnregister")
        self.unlockers.append(threading.current_thread().name)
        self._files.pop(address, None)
        return 0 if self.locked.pop(address, 0) else self.failed(_NOT_LOCKED)

    def failed(self, code: int) -> int:
        """Leaves the error behind."""
        self._errors.last = code
        return code

    def last_error(self) -> int:
        """``cudaGetLastError``: of the calling thread, once."""
        code, self._errors.last = getattr(self._errors, "last", 0), 0
        return code

    def _library(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(name: str | None = None, *more: Any, **how: Any) -> Any:
            if name == "libcuda.so.1":
                return SimpleNamespace(cuThreadExchangeStreamCaptureMode=self._exchange_capture_mode)
            runtime = SimpleNamespace(cudaGetLastError=self.last_error)
            return _Process(load(name), runtime) if name is None else load(name, *more, **how)

        return loaded

    @property
    def stream(self) -> Stream:
        """The calling thread's current stream."""
        return getattr(self._streams, "current", self._training)

    @contextlib.contextmanager
    def _on_stream(self, stream: Stream) -> Iterator[None]:
        before, self._streams.current = self.stream, stream
        try:
            yield
        finally:
            self._streams.current = before

    def holds(self, tensor: torch.Tensor) -> bool:
        return _known(self._there, tensor)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return _known(self._pinned, tensor) or any(begin <= at < begin + size for begin, size in self.locked.items())

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor is on the device from now on."""
        self._there[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def note(self, what: str) -> None:
        """A thread waits for the device."""
        self.unsafe(what)
        if threading.current_thread() is self._thread and (led := _functions_of_package()):
            self.waits.append((what, led))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        special = self._special.get(func)
        if special is not None:
            return special(func, *args, **kwargs)
        there = self._has_one_there(args) or bool(kwargs and self._has_one_there(kwargs.values()))
        if there and getattr(func, "__name__", "") in _READS:
            self.note(func.__name__)
        if (device := kwargs.get("device")) is not None:
            there = torch.device(device).type == "cuda"
            kwargs["device"] = "cpu" if there else device
        if there and threading.current_thread() is self._thread:
            pages, secs = pages_touched(), time.thread_time()
            result = func(*args, **kwargs)
            self.secs += time.thread_time() - secs
            self.pages += pages_touched() - pages
        else:
            result = func(*args, **kwargs)
        self._require_room(not (there and getattr(func, "__name__", "") in _MAKES and result.nbytes > _KEPT_NBYTES))
        if not there or isinstance(result, (int, bool, str, torch.dtype, torch.Size)):
            return result
        return self.take(result) if isinstance(result, torch.Tensor) else tree_map_only(torch.Tensor, self.take, result)

    def _has_one_there(self, values: Iterable[Any]) -> bool:
        """By hand, since this is asked at every call, and training is timed."""
        for value in values:
            if isinstance(value, torch.Tensor):
                if self.holds(value):
                    return True
            elif isinstance(value, dict):
                value = value.values()
            if isinstance(value, (tuple, list, ValuesView)) and self._has_one_there(value):
                return True
        return False

    def _moved(self, tensor: torch.Tensor, there: bool, how: str) -> torch.Tensor:
        if self.holds(tensor) == there:
            return tensor
        if there:
            return self.take(tensor.clone())
        self.note(how)
        return tensor.clone()

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        there = self.holds(tensor)
        if args and isinstance(args[0], torch.Tensor):
            device, dtype = CUDA if self.holds(args[0]) else torch.device("cpu"), args[0].dtype
        else:
            copy = kwargs.pop("copy", False)
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
            tensor = tensor.clone() if copy else tensor
        changed = func(tensor, dtype) if dtype is not None else tensor
        changed = self.take(changed) if there else changed
        return changed if device is None else self._moved(changed, device.type == "cuda", "to")

    def _copy(self, func: Any, into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if self.holds(into) or not self.holds(source):
            if self.holds(into) and not self.holds(source):
                self._require_room(into.is_contiguous() and source.dtype == into.dtype)
                self.arrivals.append((source.numel() * source.element_size(), self._is_pinned(source)))
            return func(into, source)
        self._require_room(source.is_contiguous() and source.dtype == into.dtype)
        if not (non_blocking and self._is_pinned(into)):
            self.note("copy_")
            return func(into, source)
        _check_error(self.last_error())
        self._require_one_piece(into)
        self.departures += 1
        transfer = Transfer(into, source.detach().to(into.dtype))
        into.view(torch.uint8).fill_(RUBBISH) if into.dim() else into.view(1).view(torch.uint8).fill_(RUBBISH)
        self.stream.work.append(transfer)
        if self.stream is self._training:
            transfer.read()
        return into

    def _cat(self, func: Any, tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        there = self._has_one_there(tensors)
        self._require_room(not there)
        joined: torch.Tensor = func(tensors, *args, **kwargs)
        return self.take(joined) if there else joined

    def _require_room(self, needs_none: bool) -> None:
        if self.is_full and not needs_none:
            raise torch.OutOfMemoryError("CUDA out of memory, as it is acted")

    def _require_one_piece(self, into: torch.Tensor) -> None:
        """Fails if a copy begins in memory that is locked, and does not end in the same piece."""
        begin, nbytes = into.data_ptr(), into.numel() * into.element_size()
        piece = next(((at, size) for at, size in self.locked.items() if at <= begin < at + size), None)
        assert piece is None or begin + nbytes <= sum(piece), f"a copy of {nbytes} bytes leaves its locked piece"

    def _pinning(self, empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            if pin_memory and self.refusals:
                self.refusals -= 1
                raise RuntimeError(f"CUDA error {_NO_MEMORY}")
            found = empty(*args, **kwargs)
            if pin_memory:
                self.unsafe("cudaHostAlloc")
                nbytes = found.numel() * found.element_size()
                self.lockers.append((threading.current_thread().name, nbytes))
                time.sleep(self.locking_secs_per_byte * nbytes)
                self._pinned[found.untyped_storage()._cdata] = StorageWeakRef(found.untyped_storage())
            return found

        return made

    def _grouping(self, group: Callable[..., Any]) -> Callable[..., Any]:
        """By which optimizers and clipping ask for devices."""

        def grouped(tensors: Any, *args: Any) -> Any:
            there = any(self.holds(each) for each in tensors[0] if each is not None)
            return {(CUDA if there else device, *more): of for (device, *more), of in group(tensors, *args).items()}

        return grouped


class _Runtime:
    """What page-locks mapped memory in place."""

    def __init__(self, gpu: ActedGPU) -> None:
        self._gpu = gpu

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self._gpu.refusals:
            self._gpu.refusals -= 1
            return self._gpu.failed(_NO_MEMORY)
        return self._gpu.lock(address, nbytes)

    def cudaHostUnregister(self, address: int) -> int:
        return self._gpu.unlock(address)


class _Process:
    """What ``ctypes.CDLL(None)`` finds: functions of the runtime, and those of the C library."""

    def __init__(self, library: Any, runtime: SimpleNamespace) -> None:
        self._library, self._runtime = library, runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime if hasattr(self._runtime, name) else self._library, name)


def _check_error(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")


def _mappings() -> list[tuple[int, int, str]]:
    """(begin, end, file) of what this process has mapped."""
    with open("/proc/self/maps") as lines:
        found = [line.rstrip("\n").split(maxsplit=5) for line in lines]
    ends = [each[0].split("-") for each in found]
    return [(int(a, 16), int(b, 16), f"{each[4]} {each[5:]}") for (a, b), each in zip(ends, found, strict=True)]


def _file_at(mappings: list[tuple[int, int, str]], address: int) -> str:
    """Inode of the file; it has another name once it is deleted."""
    return next((file.partition(" ")[0] for begin, end, file in mappings if begin <= address < end), "nothing")


class _Kernels(TorchDispatchMode):
    def __init__(self, gpu: ActedGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _SIZED_BY_VALUES and any(isinstance(a, torch.Tensor) and self._gpu.holds(a) for a in args):
            self._gpu.note(name)
        return func(*args, **(kwargs or {}))


def _acted() -> ActedGPU:
    assert ActedGPU.active is not None
    return ActedGPU.active


def _known(storages: dict[int, StorageWeakRef], tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata in storages


def _functions_of_package() -> tuple[str, ...]:
    """Functions of the package on the calling thread's stack, innermost first; none if it only passes a call on."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("moe_ckpt.") and not module.startswith("moe_ckpt.testing"):
            if not found and frame.f_code.co_name in _PASS_ON:
                return ()
            found.append(f"{module.removeprefix('moe_ckpt.')}.{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)
