"""CUDA graphs in functional mode: a captured operator becomes a node that can be run again.

A GPU executes nothing while a graph is captured. Here an operator runs once during capture, so that
the sizes and values that later operators need exist; when the capture ends, all memory that it
wrote gets its earlier content back. A replay runs the nodes in order, in the same memory.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import nullgpu_client as client

if TYPE_CHECKING:  # torch imports this module when it has been imported itself
    from torch import Tensor

ILLEGAL_ADDRESS = 700

Work = Callable[[int], None]
"""Called by a replay, with the handle of the stream that the graph is launched on."""

REPLAY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
ENDED = ctypes.CFUNCTYPE(None, ctypes.c_long)

_work: dict[int, Work] = {}
_keys = itertools.count(1)
_saved: dict[int, dict[tuple[int, int], Tensor]] = {}
"""For each capture: the content of memory, by address and bytes, before the capture wrote to it."""
_hooks: list[Any] = []


def install() -> None:
    library = client.library()
    library.nullgpu_capture_number.argtypes = [ctypes.c_void_p]
    library.nullgpu_capture_number.restype = ctypes.c_long
    library.nullgpu_record_python.argtypes = [
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
    ]
    _hooks[:] = [REPLAY(_replay), RELEASE(_release), ENDED(_restore)]
    library.nullgpu_set_graph_hooks(*_hooks)
    # Graphs may outlive Python, which must not be called then.
    atexit.register(library.nullgpu_set_graph_hooks, None, None, None)


def capture_number(stream: int) -> int:
    """The number of the capture that this stream takes part in; 0 if it does not capture."""
    return client.library().nullgpu_capture_number(stream)


def add_node(stream: int, kind: str, name: str, work: Work) -> None:
    key = next(_keys)
    _work[key] = work
    error = client.library().nullgpu_record_python(stream, kind.encode(), name.encode(), key)
    if error:
        del _work[key]
        raise RuntimeError(
            f"CUDA error: operation failed due to a previous error during capture ({error}, {name})"
        )


def note_uncaptured(stream: int, kind: str, name: str) -> None:
    """Log work on the default stream that is done while another stream captures."""
    client.library().nullgpu_record_python(stream, kind.encode(), name.encode(), None)


def save(capture: int, address: int, length: int) -> None:
    """Keep this memory's content until the capture ends, unless it is kept already."""
    kept = _saved.setdefault(capture, {})
    if length and (address, length) not in kept:
        kept[address, length] = _memory(address, length).clone()


def save_tensor(capture: int, host: Tensor) -> None:
    """Keep the content of the storage behind a tensor of device memory seen as host memory."""
    storage = host.untyped_storage()
    save(capture, storage.data_ptr(), storage.nbytes())


def snapshot(blocks: list[tuple[int, int]]) -> list[Tensor]:
    return [_memory(*block).clone() for block in blocks]


def save_changed(capture: int, blocks: list[tuple[int, int]], before: list[Tensor]) -> None:
    """Keep the earlier content of those blocks that have changed since the snapshot."""
    import torch

    kept = _saved.setdefault(capture, {})
    for block, content in zip(blocks, before, strict=True):
        if block not in kept and not torch.equal(_memory(*block), content):
            kept[block] = content


def _memory(address: int, length: int) -> Tensor:
    import torch

    return torch.frombuffer((ctypes.c_char * length).from_address(address), dtype=torch.uint8)


def _replay(key: int, stream: int | None) -> int:
    import torch

    try:
        with torch.inference_mode():
            _work[key](stream or 0)
    except BaseException:  # whatever happens, it happened to work of a GPU
        print("stand-in GPU: a node of a graph failed", file=sys.stderr)
        traceback.print_exc()
        return ILLEGAL_ADDRESS
    return 0


def _release(key: int) -> None:
    _work.pop(key, None)


def _restore(capture: int) -> None:
    """The capture has ended. The latest content first: addresses may be used more than once."""
    import torch

    with torch.inference_mode():
        for block, content in reversed(_saved.pop(capture, {}).items()):
            _memory(*block).copy_(content)
