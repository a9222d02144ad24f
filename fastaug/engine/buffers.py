"""Buffers of a network as one tensor, so that work on all of them takes few kernel launches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class FlatBuffers:
    """Some buffers of one dtype. resnet18 has 60: a launch for each takes longer than the work."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self._sizes = [buffer.numel() for buffer in buffers]
        self.saved = self.read()
        """What save() has read; the same memory each time."""

    def read(self) -> Tensor:
        """-> [N]: a copy of the values of all buffers."""
        return torch.cat([buffer.flatten() for buffer in self._buffers])

    def save(self) -> None:
        torch.cat([buffer.flatten() for buffer in self._buffers], out=self.saved)

    def write(self, values: Tensor) -> None:
        """values: [N], as read() returns them."""
        parts = values.split(self._sizes)
        own = [part.view_as(buffer) for part, buffer in zip(parts, self._buffers, strict=True)]
        torch._foreach_copy_(self._buffers, own)


def group_buffers(buffers: Iterable[Tensor]) -> list[FlatBuffers]:
    """All buffers, grouped by dtype."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers:
        groups.setdefault(buffer.dtype, []).append(buffer)
    return [FlatBuffers(group) for group in groups.values()]
