"""Ranks whose weights differ by a bit are stopped, and no checkpoint has their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks, train
from torch import Tensor

from fastaug.config import TrainConfig
from fastaug.engine import rank_drift
from fastaug.engine.learner import Learner
from fastaug.engine.rank_drift import DriftCheck, hash_tensors
from fastaug.errors import RankDriftError
from fastaug.runs.checkpoint import load_checkpoint
from fastaug.runtime.distributed import Group

Tiny = Callable[..., TrainConfig]
CPU = torch.device("cpu")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """In place."""
    bits = tensor.detach().view(INTEGERS[tensor.element_size()])
    bits[np.unravel_index(element, tensor.shape)] ^= torch.ones((), dtype=bits.dtype) << bit


def hash_of(*tensors: Tensor) -> int:
    return hash_tensors(tensors, CPU).item()


class TestHash:
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]
    )
    def test_every_bit_counts(self, dtype: torch.dtype) -> None:
        tensor = (100 * torch.rand(5, 3, generator=torch.Generator().manual_seed(1))).to(dtype)
        expected, seen = hash_of(tensor), set()
        for element in range(tensor.numel()):
            for bit in range(8 * tensor.element_size()):
                flip_bit(tensor, element, bit)
                seen.add(hash_of(tensor))
                flip_bit(tensor, element, bit)
        assert expected not in seen
        assert hash_of(tensor) == expected

    def test_differences_do_not_cancel(self) -> None:
        tensor = torch.tensor([1.0, 2.0, 3.0])
        expected = hash_of(tensor)
        tensor.view(torch.int32)[0] += 1  # the sum of the bits stays the same
        tensor.view(torch.int32)[1] -= 1
        assert hash_of(tensor) != expected

    def test_the_formula(self) -> None:
        """Against Python's integers, with their overflow taken away."""
        tensor = torch.randn(50, generator=torch.Generator().manual_seed(2))
        bits = tensor.view(torch.int32).tolist()
        mixed = [(x + 2 * x * x + 2**31) % 2**32 - 2**31 for x in bits]
        assert hash_of(tensor) == sum(mixed)

    def test_strides_parts_and_dtypes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weights = torch.randn(4, 3, 5, 7)
        last = weights.to(memory_format=torch.channels_last)
        tensors = [weights, torch.tensor(2), torch.randn(11, dtype=torch.float16), torch.empty(0)]
        expected = hash_of(*tensors)
        assert hash_of(last, *tensors[1:]) == expected
        assert hash_of(weights.transpose(0, 3), *tensors[1:]) == expected
        monkeypatch.setattr(rank_drift, "_CHUNK", 100)
        assert hash_of(*tensors) == expected
        assert hash_of() == 0


# --- runs ---


def _train_with_a_flip(
    group: Group, config: TrainConfig, rank: int, step: int, part: str
) -> tuple[str, int, int, bool]:
    """A run in which one bit of a rank's state flips after a step: how it ends."""
    rank_drift.EVERY = 4
    update, taken = Learner.update, []

    def flipping(learner: Learner, rate: float) -> Tensor:
        skip = update(learner, rate)
        taken.append(1)
        if (group.rank, len(taken)) == (rank, step):
            flip_bit(learner.replicated_state()[part][0], 5, 0)
        return skip

    Learner.update = flipping  # type: ignore[assignment]
    try:
        train(group, config)
    except RankDriftError as error:
        return str(error), error.exit_code, len(taken), error.reported
    return "", 0, len(taken), False


@pytest.mark.parametrize(
    ("rank", "part", "changes"),
    [
        (1, "the weights", {}),
        # Of rank 0, which alone knows when it is time for a checkpoint.
        (0, "their moving average", {"ema": 0.9, "checkpoint_minutes": 1e-9}),
        (1, "the optimizer's state", {"checkpoint_every": 2}),
    ],
    ids=["weights", "average", "optimizer"],
)
def test_a_flipped_bit_ends_the_run(tiny: Tiny, rank: int, part: str, changes: dict) -> None:
    config = tiny(kernel="reference", epochs=6, eval_every=10, tta=0, **changes)  # of 4 steps
    flipped_after = 6
    first, second = run_ranks(2, _train_with_a_flip, config, rank, flipped_after, part)
    assert first[:3] == second[:3]
    message, code, taken, reported = first
    assert (code, reported, second[3]) == (75, False, True)
    assert part in message
    assert "ranks 0" in message.replace("rank 0", "ranks 0")
    assert flipped_after <= taken <= flipped_after + 2 + 2  # EVERY is 4: checked after step 8
    saved = load_checkpoint(Path(config.run.out) / "last.pt")["step"]
    assert 4 <= saved < flipped_after  # the end of the first epoch, or later


def _odd_one(group: Group, odd: int) -> str:
    weights = [torch.arange(3.0)]
    check = DriftCheck(group, CPU, lambda: {"the weights": weights}, step=7)
    check.check_now(8)
    if group.rank == odd:
        flip_bit(weights[0], 1, 3)
    check.check_now(8)  # is known to be equal: not compared again
    with pytest.raises(RankDriftError) as caught:
        check.check_now(9)
    return str(caught.value)


def test_the_odd_one_of_three_is_named() -> None:
    message, *others = run_ranks(3, _odd_one, 2)
    assert set(others) == {message}
    of_odd, of_others = message.partition(" differ from ")[::2]
    assert "rank 2 (" in of_odd
    assert "ranks 0, 1 (" in of_others
    assert "after step 9" in of_odd
    assert "equal after step 8" in of_others


def _count_exchanges(group: Group, config: TrainConfig) -> tuple[int, int]:
    """Hashes that are computed in a run, and all_gathers."""
    hashes, gathers, gather = [], [], torch.distributed.all_gather
    start = rank_drift._Hashes.__init__
    rank_drift._Hashes.__init__ = lambda self, *a: hashes.append(1) or start(self, *a)
    rank_drift.torch.distributed.all_gather = lambda *a, **k: gathers.append(1) or gather(*a, **k)
    train(group, config)
    return len(hashes), len(gathers)


def test_steps_without_a_check_exchange_nothing_more(tiny: Tiny) -> None:
    config = tiny(epochs=2, eval_every=2, tta=0)  # 8 steps
    after_first_step, at_epochs = 1, 2
    expected = after_first_step + at_epochs
    assert run_ranks(2, _count_exchanges, config) == [(expected, expected)] * 2
