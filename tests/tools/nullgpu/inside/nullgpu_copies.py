"""Copies between the host and stand-in GPUs, which may arrive late, and which graphs capture."""

from __future__ import annotations

import ctypes
from typing import Any

import nullgpu_client as client
import nullgpu_graphs as graphs
import torch
from nullgpu_memory import on_host
from nullgpu_work import arrive_on, note_operator, raise_error
from torch import Tensor


def copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between devices it is a copy of the runtime's, after which the host may wait."""
    cuda = to.device if to.device.type == "cuda" else source.device
    stream = torch.cuda.current_stream(cuda)
    between_host = "cpu" in (to.device.type, source.device.type)
    if capture := graphs.capture_number(stream.cuda_stream):
        _capture_copy(to, source, stream, capture, between_host and not non_blocking)
        return to
    number = client.stream_number(stream)
    if to.device == source.device:
        note_operator("aten::copy_", cuda)
    else:
        raise_error(cuda)
        arrive_on(cuda.index, number)
        client.note("memcpy", _copy_kind(to, source), cuda.index, number, _bytes(to))
    _copy_values(to, source, non_blocking, cuda.index, number)
    if between_host and not non_blocking:
        client.note("sync_stream", "", cuda.index, number)
    return to


def _copy_values(to: Tensor, source: Tensor, non_blocking: bool, device: int, stream: int) -> None:
    if non_blocking and to.device.type == "cpu" and _arrives_late(to):
        content = torch.empty_like(to).copy_(_with_bits(source))
        pointers = to.data_ptr(), content.data_ptr(), _bytes(to)
        way = ctypes.c_int(device), ctypes.c_long(stream)
        client.library().nullgpu_copy_later(*map(ctypes.c_size_t, pointers), *way)
    else:
        _with_bits(to).copy_(_with_bits(source))


def _capture_copy(to: Tensor, source: Tensor, stream: Any, capture: int, waits: bool) -> None:
    kind = "D2D" if to.device == source.device else _copy_kind(to, source)
    if kind.endswith("pageable"):
        raise RuntimeError(
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU "
            "tensor is pinned."
        )
    if waits:
        stream.synchronize()  # is refused
    device = stream.device.index
    if to.device.type == "cuda":
        graphs.save_tensor(capture, on_host(to))
        _with_bits(to).copy_(_with_bits(source))
        target, origin = _with_bits(to), _with_bits(source)

        def replay(stream: int) -> None:
            target.copy_(origin)
    else:
        content = _with_bits(source)

        def replay(stream: int) -> None:
            _copy_values(to, content, True, device, client.library().nullgpu_stream_number(stream))

    graphs.add_node(
        stream.cuda_stream, *(("op", "aten::copy_") if kind == "D2D" else ("memcpy", kind)), replay
    )


def _arrives_late(to: Tensor) -> bool:
    """Whether it is for pinned memory, and such copies are to come no sooner than they must."""
    late = client.library().nullgpu_copies_are_late()
    return bool(late) and client.owner(to) == -1 and to.is_contiguous()


def _with_bits(tensor: Tensor) -> Tensor:
    """Other operators get no tensor that is to be conjugated or negated when it is read."""
    host = on_host(tensor)
    if host is tensor:
        return host
    host = host.conj() if tensor.is_conj() else host
    return torch._neg_view(host) if tensor.is_neg() else host


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy_kind(to: Tensor, source: Tensor) -> str:
    if to.device.type == source.device.type:
        return "peer"
    kind, host = ("D2H", to) if to.device.type == "cpu" else ("H2D", source)
    return kind if client.owner(host) == -1 else f"{kind} pageable"
