"""Work for a GPU goes to that GPU and to no other. Copies to the host arrive late, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nullgpu_client as gpu
import pytest
import torch
from ranks import run_ranks, train
from training import assert_same_weights, metrics, run

from fastaug.config import TrainConfig
from fastaug.engine import trainer
from fastaug.engine.learner import Learner
from fastaug.engine.nonfinite import NonFiniteGuard
from fastaug.errors import ConfigError
from fastaug.runtime.device import resolve_device

STAND_INS = {"devices": 3, "functional": True, "late_copies": True}
Tiny = Callable[..., TrainConfig]


def train_and_look(group: Any, config: TrainConfig) -> tuple[list, list, list]:
    """Train; the devices with work, those with a context, and what a real GPU would refuse."""
    assert train(group, config) == 0
    errors = gpu.selected(("error", "unimplemented"))
    return gpu.touched(), gpu.contexts(), errors


def current_at_the_first_step(group: Any, config: TrainConfig) -> list[int]:
    """The current device, which the default stream's handle means, when the trainer is built and
    when its first batch is on the GPU."""
    found = []

    class Stopped(Exception):
        pass

    def seen(*_: Any) -> None:
        found.append(gpu.current_device())
        if len(found) == 2:
            raise Stopped

    open_images = trainer.scanned_sets
    trainer.scanned_sets = lambda data: (seen(), open_images(data))[1]
    Learner.start_step = seen  # type: ignore[assignment]
    with pytest.raises(Stopped):
        train(group, config)
    return found


def test_the_gpu_of_a_run_is_current_from_the_start(tiny: Tiny) -> None:
    (found,) = run_ranks(1, current_at_the_first_step, tiny(device="cuda:1"))
    assert found == [1, 1]


def test_a_run_uses_only_the_gpu_it_was_given(tiny: Tiny) -> None:
    config = tiny(max_steps=4, kernel="reference", device="cuda:1")
    (found,) = run_ranks(1, train_and_look, config)
    assert found == ([1], [1], [])
    on_cpu = run(config.replace(device="cpu"), "-cpu")
    assert_same_weights(Path(config.run.out), on_cpu)
    assert metrics(on_cpu, "skipped") == metrics(Path(config.run.out), "skipped") == []


def test_each_rank_uses_only_its_own_gpu(tiny: Tiny) -> None:
    config = tiny(max_steps=4, kernel="reference", device="cuda", model="resnet18", ema=0.9)
    found = run_ranks(2, train_and_look, config)
    assert found == [([0], [0], []), ([1], [1], [])]
    assert metrics(Path(config.run.out), "skipped") == []
    on_cpu = config.replace(device="cpu", out=f"{config.run.out}-cpu")
    run_ranks(2, train, on_cpu)
    assert_same_weights(Path(config.run.out), Path(on_cpu.run.out))


def check_gpu_of_two_processes(group: Any, config: TrainConfig) -> str:
    with pytest.raises(ConfigError) as raised:
        train(group, config)
    return str(raised.value)


def test_two_ranks_on_one_gpu_are_refused(tiny: Tiny) -> None:
    messages = run_ranks(2, check_gpu_of_two_processes, tiny(device="cuda:1"))
    assert all("ranks 0 and 1 have the same GPU" in message for message in messages)


def test_a_process_that_sees_one_gpu_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with srun --gpus-per-task=1."""
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert resolve_device("cuda") == torch.device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda") == torch.device("cuda:0")


def train_with_events_on_another_gpu(group: Any, config: TrainConfig) -> int:
    """The control: a guard that records its event on another GPU."""

    def add(self: NonFiniteGuard, step: int, bad: torch.Tensor, parts: list) -> None:
        copied = bad.to("cpu", non_blocking=True)
        with torch.cuda.device(0):
            event = torch.cuda.current_stream().record_event()
        self._pending = step, copied, event, parts

    NonFiniteGuard.add = add  # type: ignore[method-assign]
    return train(group, config)


def test_an_event_on_the_wrong_gpu_is_noticed(tiny: Tiny) -> None:
    """What late copies are for: the flag is read before it has arrived."""
    config = tiny(kernel="reference", device="cuda:1")
    run_ranks(1, train_with_events_on_another_gpu, config)
    assert metrics(Path(config.run.out), "skipped") != []
