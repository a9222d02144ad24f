"""The ranks of a run, and what they exchange.

After every step all ranks have the same weights and the same state; only the images of a step are
divided among them. So only rank 0 writes checkpoints, and a run can be resumed with another number
of ranks. A single process is a group of one and does not use torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastaug.errors import ConfigError, FastaugError, RankLostError, first_line

Result = TypeVar("Result")

# Longer than any wait of a healthy run, for example while a rank scans a million files. During
# training, the watchdog detects a hang.
TIMEOUT = timedelta(hours=12)


@dataclass(frozen=True)
class Group:
    """The ranks of a run, as seen from one of them. The default is a single process."""

    rank: int = 0
    ranks: int = 1
    """Number of ranks: torch's world size."""
    local_rank: int = 0
    """Number of this rank on its machine."""
    gpus: ProcessGroup | None = None
    """NCCL's group, for tensors on GPUs; messages between hosts use gloo, the default group."""

    def on(self, device: torch.device) -> Group:
        """This group for tensors on a device; raises on every rank if two have the same GPU, or
        some have none."""
        if self.ranks == 1:
            return self
        is_cpu = device.type == "cpu"
        found = self.gather("" if is_cpu else str(torch.cuda.get_device_properties(device).uuid))
        if "" in found and any(found):
            raise self.common_error(
                f"--device: rank {found.index('')} has only a CPU, and other ranks have GPUs; "
                "check the driver of its machine with nvidia-smi, or give --device cpu"
            )
        if is_cpu:
            return self
        owners: dict[str, int] = {}
        for rank, gpu in enumerate(found):
            if (other := owners.setdefault(gpu, rank)) != rank:
                raise self.common_error(
                    f"--device {device.type}: ranks {other} and {rank} have the same GPU; start at "
                    "most as many ranks on a machine as it has GPUs, and do not give --device a "
                    "number"
                )
        # With its device, NCCL does not guess it from the first tensor.
        gpus = torch.distributed.new_group(backend="nccl", device_id=device, timeout=TIMEOUT)
        assert isinstance(gpus, ProcessGroup)  # every rank is a member
        return replace(self, gpus=gpus)

    def common_error(self, message: str) -> ConfigError:
        """An error that every rank raises and rank 0 prints."""
        error = ConfigError(message)
        error.reported = not self.is_first
        return error

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.ranks > 1:
            torch.distributed.all_reduce(tensor, group=self.gpus if tensor.is_cuda else None)
        return tensor

    def mean_(self, tensor: Tensor) -> Tensor:
        """Average a tensor over all ranks, in place."""
        return self.sum_(tensor).div_(self.ranks) if self.ranks > 1 else tensor

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of the ranks, on every rank."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(values, value)
        return values

    def from_first(self, work: Callable[[], Result]) -> Result:
        """Run `work` on rank 0 and return its result, or raise its error, on every rank."""
        if self.ranks == 1:
            return work()
        outcome: list[Any] = [None]
        if self.is_first:
            outcome = [_outcome(work)]
        torch.distributed.broadcast_object_list(outcome, src=0)
        return self._unwrapped(outcome[0], raised_by=0)

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the first rank of each machine, then on the others, which find its cache.

        An error of any rank is raised on every rank.
        """
        if self.ranks == 1:
            return work()
        own: _Value | BaseException | None = None
        for is_turn in (self.local_rank == 0, self.local_rank != 0):
            if is_turn:
                own = _outcome(work)
            errors = self.gather(own if isinstance(own, BaseException) else None)
            for rank, error in enumerate(errors):
                if error is not None:
                    self._unwrapped(error, raised_by=rank)
        assert isinstance(own, _Value)
        return own.value

    def _unwrapped(self, outcome: _Value | BaseException, raised_by: int) -> Any:
        if not isinstance(outcome, BaseException):
            return outcome.value
        if isinstance(outcome, FastaugError):
            outcome.reported = raised_by != self.rank
        raise outcome


class _Value:
    """A result, as opposed to an error."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _outcome(work: Callable[[], Any]) -> _Value | BaseException:
    try:
        return _Value(work())
    except (FastaugError, SystemExit) as error:  # SystemExit: --help ends all ranks
        return error


class Agreement:
    """The maxima of numbers over all ranks, one call late, so that no rank waits for the slowest.

    Every rank gets the same answer from its n-th call, and so acts on it in the same step.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pending: tuple[Any, Tensor] | None = None

    def largest(self, *numbers: int) -> list[int]:
        """The maximum of each of the previous call's numbers; 0 in the first call."""
        if self._group.ranks == 1:
            return list(numbers)
        previous, own = self._pending, torch.tensor(numbers)
        work = torch.distributed.all_reduce(own, torch.distributed.ReduceOp.MAX, async_op=True)
        self._pending = work, own
        if previous is None:
            return [0] * len(numbers)
        previous[0].wait()
        return previous[1].tolist()


def lost_rank(error: BaseException) -> RankLostError | None:
    """A RankLostError if the error means that another rank cannot be reached, else None."""
    message = str(error)
    if not isinstance(error, torch.distributed.DistError) and not any(
        sign in message for sign in ("gloo", "NCCL", "Connection closed", "Connection reset")
    ):
        return None
    return RankLostError(
        f"another rank has ended or cannot be reached ({first_line(error)[:200]}); its own message "
        "is above; torchrun --max-restarts N resumes automatically from the last checkpoint"
    )
