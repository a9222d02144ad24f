"""The memory of tensors on stand-in GPUs, which is the host's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import nullgpu_graphs as graphs
import torch
from torch import Tensor


@lru_cache(maxsize=4096)
def _storage(address: int, length: int) -> Any:
    memory = (ctypes.c_char * length).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def on_host(tensor: Tensor) -> Tensor:
    """The memory of a CUDA tensor as a CPU tensor; any other tensor as it is."""
    if tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    size, stride = tensor.size(), tensor.stride()
    if not storage.nbytes():
        return torch.empty_strided(size, stride, dtype=tensor.dtype)
    memory = _storage(storage.data_ptr(), storage.nbytes())
    host = torch.empty(0, dtype=tensor.dtype)
    return host.set_(memory, tensor.storage_offset(), size, stride)


def on_device(tensor: Tensor, device: torch.device, capture: int = 0) -> Tensor:
    """A CUDA tensor with this content. During capture it may have memory that a tensor has left
    whose content an earlier graph still needs: that content is kept."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        host = on_host(made)
        if capture:
            graphs.save_tensor(capture, host)
        host.copy_(tensor)
    return made


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    return change(value)
