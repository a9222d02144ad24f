"""Inside a process with stand-in GPUs: what has been logged, and assertions about it.

import nullgpu_client as gpu
with gpu.marked("step"):
    train_one_step()
gpu.assert_only_device(1)
assert gpu.syncs(between=("step", "/step")) == []
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

MAX_DEVICES = 64
SYNCS = ("sync_device", "sync_stream", "sync_event", "sync_memcpy")
IMPLICIT_SYNCS = ("free", "host_alloc")
WORK = ("kernel", "blas", "nccl", "memcpy", "memset", "op", "graph")


class Record(NamedTuple):
    """One call, in the order in which they were made."""

    pid: int
    thread: int
    kind: str
    """malloc free host_alloc memcpy memset kernel blas nccl op stream_create stream_wait
    event_create event_record sync_device sync_stream sync_event sync_memcpy mark fault error
    unimplemented; race (in the shared memory of a Triton kernel); of CUDA graphs: capture_begin,
    captured, uncaptured (work on the default stream meanwhile), capture_end; graph (a launch of
    one; bytes: how many nodes), replayed (each node); dali: outputs of a pipeline, with the device
    and stream that they were bound to"""
    device: int
    stream: int
    """0: the default stream; others are numbered in the order in which they were made."""
    bytes: int
    name: str


class NotANullGPU(RuntimeError):
    pass


@cache
def library() -> Any:
    """The stand-in GPU that is loaded into this process."""
    loaded = ctypes.CDLL(None)
    if not hasattr(loaded, "nullgpu_note"):
        raise NotANullGPU("this process has no stand-in GPU: start it with nullgpu.py run")
    loaded.nullgpu_note.argtypes = [
        *(ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_char_p, ctypes.c_size_t)
    ]
    loaded.nullgpu_stream_number.argtypes = [ctypes.c_void_p]
    loaded.nullgpu_stream_number.restype = ctypes.c_long
    loaded.nullgpu_owner.argtypes = [ctypes.c_void_p]
    loaded.nullgpu_mark.argtypes = loaded.nullgpu_fault_on.argtypes = [ctypes.c_char_p]
    return loaded


def is_null() -> bool:
    """Whether this process has stand-in GPUs."""
    try:
        library()
    except NotANullGPU:
        return False
    return True


def prepare_torch() -> None:
    """Called when torch has been imported: there is no cuDNN; functional mode computes results."""
    import torch

    if not is_null():
        return
    torch.backends.cudnn.enabled = False
    atexit.register(_let_threads_start)
    if os.environ.get("NULLGPU_MODE") == "functional":
        import nullgpu_functional

        nullgpu_functional.install()


def prepare_triton() -> None:
    """Called when Triton has been imported."""
    if is_null() and os.environ.get("NULLGPU_MODE") == "functional":
        import nullgpu_emulation

        nullgpu_emulation.prepare_triton()


def prepare_dali() -> None:
    """Called when DALI has been imported."""
    if is_null():
        import nullgpu_dali

        nullgpu_dali.install()


def _let_threads_start() -> None:
    """torch aborts a process that ends while its threads for backward, one for each device, have
    only just begun: they need Python for that."""
    import torch

    if torch.cuda.is_initialized():
        time.sleep(0.1)


# --- writing to the log


def mark(name: str) -> None:
    """Add a line to the log, for `between`."""
    library().nullgpu_mark(name.encode())


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Add the marks `name` before and `/name` after."""
    mark(name)
    try:
        yield
    finally:
        mark(f"/{name}")


def mark_calls(owner: Any, *methods: str) -> None:
    """From now on, each call of these methods is marked: Class.method, /Class.method."""
    for method in methods:
        setattr(owner, method, _with_mark(getattr(owner, method), f"{owner.__name__}.{method}"))


def _with_mark(function: Any, name: str) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        with marked(name):
            return function(*arguments, **options)

    return call


def logging(on: bool) -> bool:
    """Switch the log on or off; returns whether it was on."""
    return bool(library().nullgpu_logging(int(on)))


def note(kind: str, name: str = "", device: int = -1, stream: int = 0, size: int = 0) -> None:
    library().nullgpu_note(kind.encode(), device, stream, name.encode(), size)


# --- state


def current_device() -> int:
    """The current device of the CUDA runtime in this thread."""
    return library().nullgpu_current()


def touched() -> list[int]:
    """Devices that were given any work, whether the log was on or not."""
    return [d for d in range(MAX_DEVICES) if library().nullgpu_touched(d)]


def contexts() -> list[int]:
    """Devices that have a context, which takes some 100 MB of a real one: of work, or of
    cudaSetDevice."""
    return [d for d in range(MAX_DEVICES) if library().nullgpu_has_context(d)]


def forget_touched() -> None:
    library().nullgpu_forget_touched()


def owner(tensor: Any) -> int:
    """The device whose memory a tensor has; -1: pinned memory; -2: any other of the host."""
    return library().nullgpu_owner(tensor.data_ptr())


def stream_number(stream: Any) -> int:
    """As in a Record, of a torch.cuda.Stream."""
    return library().nullgpu_stream_number(stream.cuda_stream)


# --- faults


def fault_on(name: str) -> None:
    """Launches whose name contains this make the error 700, which stays; "": none any more."""
    library().nullgpu_fault_on(name.encode())


def error() -> int:
    """The error that every call returns now; 0: none."""
    return library().nullgpu_error()


def clear_error() -> None:
    """Make the GPU usable again in the same process, which a real GPU cannot be."""
    library().nullgpu_set_error(0)


def hang() -> None:
    """From now on, every call that waits for a GPU waits forever."""
    library().nullgpu_hang()


# --- the log


def records(file: str | None = None, *, pid: int | None = None) -> list[Record]:
    """The log of this process; or of a file, all its processes or one."""
    if file is None:
        library().nullgpu_flush()
        file, pid = os.environ.get("NULLGPU_LOG", ""), os.getpid()
        if not file:
            raise NotANullGPU("there is no log: start the process with nullgpu.py run --log FILE")
    found = []
    with open(file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            process, thread, kind, device, stream, size, name = line.rstrip("\n").split("\t", 6)
            if pid is None or int(process) == pid:
                numbers = int(device), int(stream), int(size)
                found.append(Record(int(process), int(thread), kind, *numbers, name))
    return found


Between = tuple[str, str]


def selected(
    kinds: str | Iterable[str] = (),
    *,
    name: str = "",
    between: Between | None = None,
    of: list[Record] | None = None,
) -> list[Record]:
    """Records of these kinds (none: all) whose name contains `name`, from any mark of the first
    name to the next one of the second."""
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    of = records() if of is None else of
    found, inside, seen = [], between is None, False
    for record in of:
        if between is not None and (record.kind, record.name) == ("mark", between[inside]):
            inside, seen = not inside, True
            continue
        if inside and (not kinds or record.kind in kinds) and name in record.name:
            found.append(record)
    if between is not None and not seen:
        raise ValueError(f"there is no mark {between[0]!r} in the log")
    return found


def count(
    kind: str | Iterable[str],
    *,
    name: str = "",
    between: Between | None = None,
    of: list[Record] | None = None,
) -> int:
    return len(selected(kind, name=name, between=between, of=of))


def syncs(
    *,
    between: Between | None = None,
    implicit: bool = False,
    of: list[Record] | None = None,
) -> list[Record]:
    """Calls that make the host wait for a device. implicit: also calls that wait as a side effect:
    freeing, pinning, and copies from or to memory that is not pinned."""
    found = selected(between=between, of=of)

    def waits(record: Record) -> bool:
        pageable = record.kind == "memcpy" and record.name.endswith("pageable")
        return record.kind in SYNCS or (implicit and (record.kind in IMPLICIT_SYNCS or pageable))

    return [record for record in found if waits(record)]


def assert_only_device(device: int, *, of: list[Record] | None = None) -> None:
    """No other device was given work; `of`: by these records, rather than by what is touched."""
    others = set(touched()) if of is None else {r.device for r in of if r.kind != "mark"}
    others -= {device}
    if others:
        examples = [r for r in (of or []) if r.device in others][:5]
        raise AssertionError(f"devices {sorted(others)} were given work, too: {examples}")


def assert_no_errors(*, of: list[Record] | None = None) -> None:
    """Nothing that a real GPU refuses or does not do: launches and events of another device's
    stream, copies of the wrong kind, calls that are not implemented here."""
    found = selected(("error", "unimplemented"), of=of)
    if found:
        raise AssertionError(f"{len(found)} errors, the first: {found[:5]}")
