"""The meters of a run: means of the losses, speed, and the share of waiting for data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastaug.config import TrainConfig
from fastaug.data.torch_loader import TorchLoader
from fastaug.engine import learner, metrics, trainer
from fastaug.engine.metrics import Meter, Speedometer
from fastaug.engine.trainer import Trainer
from fastaug.runtime.distributed import Group
from fastaug.views.batch import ViewBatch

Tiny = Callable[..., TrainConfig]


def test_the_meter_weighs_parts_and_starts_again() -> None:
    meter = Meter(torch.device("cpu"))
    meter.add(torch.tensor(1.0), torch.tensor([0.0, 2.0]), torch.tensor([4.0]), weight=0.5)
    meter.add(torch.tensor(3.0), torch.tensor([3.0]), torch.tensor([0.0]), weight=0.5)
    meter.end_step(Group())
    state = meter.state_dict()
    assert meter.means() == meter.read() == {"loss": 2.0, "nll": 2.0, "kl": 2.0}
    meter.add(torch.tensor(7.0), torch.tensor([1.0]), torch.tensor([1.0]), weight=1.0)
    meter.end_step(Group())
    assert meter.read()["loss"] == 7.0
    meter.load_state_dict(state)
    assert meter.read()["loss"] == 2.0


def test_speed_leaves_out_what_is_between_start_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    speed = Speedometer(batch_size=64, views=4)
    speed.start(0)
    with speed.waiting():
        now[0] = 0.5
    now[0] = 2.0
    assert speed.read(10) == {"images_per_s": 80.0, "views_per_s": 320.0, "wait_for_data": 0.25}
    with speed.waiting():
        now[0] = 100.0  # the end of an epoch, and an evaluation
    speed.start(10)
    now[0] = 102.0
    speed.read(30)
    rates = {"images_per_s": 120.0, "views_per_s": 480.0, "wait_for_data": 0.125}
    assert speed.whole_run() == {"train_seconds": 4.0, **rates}


def test_timing_covers_all_parts_of_an_interrupted_run(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only the update moves: 1 s for each of 8 steps."""
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    update = learner.Learner.update

    def slow(self: learner.Learner, rate: float) -> torch.Tensor:
        now[0] += 1
        return update(self, rate)

    monkeypatch.setattr(learner.Learner, "update", slow)
    config = tiny(tta=0, log_every=3)
    last = Path(config.run.out) / "last.pt"
    Trainer(config.replace(max_steps=5)).fit()
    now[0] = 1000.0  # until somebody resumes it
    timing = Trainer(config, last).fit()["timing"]
    assert timing == {
        "train_seconds": 8.0,
        "views_per_s": 16.0,
        "images_per_s": 8.0,
        "wait_for_data": 0.0,
    }
    now[0] = 2000.0
    assert Trainer(config, last).fit()["timing"] == timing  # of a finished run


def test_the_share_of_waiting_for_data(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """On a clock that only the loader and the update move."""
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(TorchLoader):
        def __iter__(self) -> Iterator[ViewBatch]:
            for number, batch in enumerate(super().__iter__()):
                now[0] += number % 4  # 0 to 3 s in an epoch
                yield batch

    def update(self: learner.Learner, rate: float) -> torch.Tensor:
        now[0] += 1
        return torch.tensor(False)

    def slow(config: TrainConfig, images: object, **_ranks: int) -> Slow:
        return Slow(images, config.data, config.view, seed=0, train=True, images_per_batch=8)

    monkeypatch.setattr(trainer, "build_loader", slow)
    monkeypatch.setattr(learner.Learner, "update", update)
    timing = Trainer(config := tiny(tta=0)).fit()["timing"]
    assert timing["train_seconds"] == 2 * (6 + 4)
    assert timing["wait_for_data"] == pytest.approx(6 / 10)
    assert "60% waiting" in capsys.readouterr().out
    lines = (Path(config.run.out) / "metrics.jsonl").read_text().splitlines()
    trained = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    shares = [record["timing"]["wait_for_data"] for record in trained]
    assert shares == pytest.approx([1 / 3, 5 / 7] * 2)
