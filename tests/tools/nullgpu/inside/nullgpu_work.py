"""Work on a stand-in GPU: logged on its stream, after the errors of earlier work."""

from __future__ import annotations

import ctypes

import nullgpu_client as client
import nullgpu_graphs as graphs
import torch


def note_operator(label: str, device: torch.device) -> None:
    raise_error(device)
    stream = torch.cuda.current_stream(device)
    graphs.note_uncaptured(stream.cuda_stream, "op", label)
    number = client.stream_number(stream)
    arrive_on(device.index, number)
    client.note("op", label, device.index, number)
    client.library().nullgpu_maybe_fault(label.encode())


def arrive_on(device: int, stream: int) -> None:
    """Late outputs of DALI that come before work on this stream."""
    client.library().nullgpu_arrive_on_device(ctypes.c_int(device), ctypes.c_long(stream))


def raise_error(device: torch.device) -> None:
    """Raise the error of an earlier kernel, if there is one."""
    if client.error():
        torch.cuda.synchronize(device)
