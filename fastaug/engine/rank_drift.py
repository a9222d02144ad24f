"""The weights of all ranks, compared during the run.

All ranks apply the same gradient to the same weights, so weights, buffers and the optimizer's state
stay equal to the bit. A rank whose memory or arithmetic fails, or that runs other code, drifts away
without an error: the others average its gradients into theirs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fastaug.engine.rank_check import most_common, name_ranks
from fastaug.errors import RankDriftError, few
from fastaug.runtime.distributed import Group

EVERY = 100
"""Steps between two checks, besides those after the first step and before each checkpoint."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes per element."""
_CHUNK = 2**24
"""Elements that are hashed at once: the copy takes up to 128 MB."""

State = Mapping[str, list[Tensor]]
"""Name of a part of the state, for messages -> its tensors."""


class DriftCheck:
    """Compares a hash of the state over the ranks; RankDriftError on every rank if it differs.

    A regular check costs no wait: the device computes the hash after a step, the host reads and
    sends it a step later, and compares it another step later.
    """

    def __init__(
        self, group: Group, device: torch.device, state: Callable[[], State], step: int
    ) -> None:
        """state: what is compared; the same parts on every rank. step: the one to start from."""
        self._group, self._device, self._state = group, device, state
        self._first = step
        self._equal_after = step
        """The last step after which the ranks were equal."""
        self._hashed: _Hashes | None = None
        self._sent: _Exchange | None = None
        self._machines = group.gather(f"{platform.node()}, {_processor(device)}")

    def after_step(self, step: int) -> None:
        """Call after each step, on every rank."""
        if self._group.ranks == 1:
            return
        if self._sent is not None:
            sent, self._sent = self._sent, None
            self._compare(sent.step, sent.receive())
        elif self._hashed is not None:
            hashed, self._hashed = self._hashed, None
            self._sent = _Exchange(hashed, self._group.ranks)
        elif step == self._first + 1 or step % EVERY == 0:
            self._hashed = _Hashes(step, self._state(), self._device)

    def check_now(self, step: int) -> None:
        """Compare the state after this step, which is the last one that was taken."""
        if self._group.ranks == 1 or self._equal_after == step:
            return
        self._hashed = None
        if self._sent is not None:
            self._sent.receive()
            self._sent = None
        hashes = _Hashes(step, self._state(), self._device)
        self._compare(step, _Exchange(hashes, self._group.ranks).receive())

    def _compare(self, step: int, hashes: list[tuple[int, ...]]) -> None:
        """hashes: by rank, then by part of the state."""
        usual = most_common(hashes)
        drifted = [rank for rank, own in enumerate(hashes) if own != usual]
        if not drifted:
            self._equal_after = step
            return
        differing = zip(self._state(), *hashes, strict=True)
        parts = " and ".join(part for part, *own in differing if len(set(own)) > 1)
        others = [rank for rank in range(len(hashes)) if rank not in drifted]
        unknown = " (it is not known which of them are right)"
        error = RankDriftError(
            f"ranks have drifted apart: after step {step:,}, {parts} of {self._named(drifted)} "
            f"differ from those of {self._named(others)}"
            f"{unknown if len(others) <= len(drifted) else ''}; all were equal after step "
            f"{self._equal_after:,}, and no checkpoint was written since then: --resume, or "
            "torchrun --max-restarts N, continues from the last one; if it happens again, test the "
            "memory and the GPU of the machine, or use machines of one kind"
        )
        error.reported = not self._group.is_first
        raise error

    def _named(self, ranks: list[int]) -> str:
        machines = dict.fromkeys(self._machines[rank] for rank in ranks)
        return f"{name_ranks(ranks)} ({few(machines)})"


class _Hashes:
    """Hashes of the parts of a state, on their way to the host."""

    def __init__(self, step: int, state: State, device: torch.device) -> None:
        self.step = step
        values = torch.stack([hash_tensors(tensors, device) for tensors in state.values()])
        self._values = values.to("cpu", non_blocking=True)
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()

    def read(self) -> Tensor:
        """[parts] int64 on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


class _Exchange:
    """The hashes of all ranks, on their way to this one."""

    def __init__(self, hashes: _Hashes, ranks: int) -> None:
        self.step = hashes.step
        own = hashes.read()
        self._received = [torch.empty_like(own) for _ in range(ranks)]
        self._work: Any = torch.distributed.all_gather(self._received, own, async_op=True)

    def receive(self) -> list[tuple[int, ...]]:
        """By rank, then by part of the state."""
        self._work.wait()
        return [tuple(values.tolist()) for values in self._received]


@torch.no_grad()
def hash_tensors(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """[] int64: a hash of the bits of tensors on a device.

    The sum over all elements of x + 2 x^2, where x is the element's bits as an integer. That is a
    permutation of the integers: one element that differs always changes the sum. It is not linear,
    so that several small differences do not cancel as they may in the sum of x.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for chunk in _chunks(tensors):
        bits = torch.cat(chunk)
        total += torch.addcmul(bits, bits, bits, value=2).sum(dtype=torch.int64)
    return total


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The bits of all tensors as integers [n], in groups of one dtype and limited size."""
    by_size: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        size = tensor.element_size()
        by_size.setdefault(size, []).extend(_flat(tensor).view(_INTEGERS[size]).split(_CHUNK))
    for pieces in by_size.values():
        chunk: list[Tensor] = []
        elements = 0
        for piece in pieces:
            if elements + len(piece) > _CHUNK:
                yield chunk
                chunk, elements = [], 0
            chunk.append(piece)
            elements += len(piece)
        yield chunk


def _flat(tensor: Tensor) -> Tensor:
    """[n]: the elements in any order, without a copy for channels-last weights."""
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.flatten()


def _processor(device: torch.device) -> str:
    """What computes: a difference explains ranks that round differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}, {threads} threads"
