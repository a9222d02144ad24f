"""The ranks of a run: processes that torchrun has started, and what they tell each other.

Every rank holds the same weights, and knows the same of the run, after every step: only the images
of a step are shared out. So a checkpoint is what rank 0 knows, and another number of ranks can go
on from it. A single process is a group of one and needs none of torch's machinery.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastaug.errors import FastaugError, RankLostError, first_line

Result = TypeVar("Result")


@dataclass(frozen=True)
class Group:
    """This rank among those of its run; on its own it is all of them."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    """Its number on this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """The tensor, summed over all ranks in place."""
        if self.ranks > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def mean_(self, tensor: Tensor) -> Tensor:
        """The tensor, averaged over all ranks in place."""
        return self.sum_(tensor).div_(self.ranks) if self.ranks > 1 else tensor

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank, on every rank."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(values, value)
        return values

    def from_first(self, work: Callable[[], Result]) -> Result:
        """What rank 0 makes of it, on every rank; its mistake, too, is everyone's."""
        if self.ranks == 1:
            return work()
        outcome: list[Any] = [None]
        if self.is_first:
            outcome = [_outcome(work)]
        torch.distributed.broadcast_object_list(outcome, src=0)
        return self._unwrapped(outcome[0], said_by=0)

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """The first rank of each machine does it, then the others: they find its cache filled."""
        if self.ranks == 1:
            return work()
        own = _outcome(work) if self.local_rank == 0 else None
        outcomes = self.gather(own if isinstance(own, BaseException) else None)
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                self._unwrapped(outcome, said_by=rank)
        return work() if own is None else self._unwrapped(own)

    def _unwrapped(self, outcome: _Value | BaseException, said_by: int | None = None) -> Any:
        if not isinstance(outcome, BaseException):
            return outcome.value
        if isinstance(outcome, FastaugError):
            outcome.told = said_by != self.rank
        raise outcome


class _Value:
    """What has been made, apart from what went wrong."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _outcome(work: Callable[[], Any]) -> _Value | BaseException:
    try:
        return _Value(work())
    except (FastaugError, SystemExit) as error:  # --help, too, ends all of them
        return error


class Agreement:
    """The largest of the ranks' numbers, as it stood one call earlier: none waits for the slowest.

    Every rank gets the same answer from its n-th call, and so does the same thing in the same step.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._asked: tuple[Any, Tensor] | None = None

    def largest(self, number: int) -> int:
        if self._group.ranks == 1:
            return number
        asked, numbers = self._asked, torch.tensor([number])
        work = torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, async_op=True)
        self._asked = work, numbers
        if asked is None:
            return 0
        asked[0].wait()
        return int(asked[1])


def lost_rank(error: BaseException) -> RankLostError | None:
    """The error as that of a rank which can no longer reach another one, if it is."""
    said = str(error)
    if not isinstance(error, torch.distributed.DistError) and not any(
        sign in said for sign in ("gloo", "NCCL", "Connection closed", "Connection reset")
    ):
        return None
    return RankLostError(
        f"another rank has ended or cannot be reached ({first_line(error)[:200]}); what it said "
        "is above; torchrun --max-restarts N goes on from the last checkpoint by itself"
    )
