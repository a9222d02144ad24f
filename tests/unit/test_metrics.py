from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from expect import raises
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastaug.config import TrainConfig
from fastaug.data.torch_loader import TorchLoader
from fastaug.engine import learner, trainer
from fastaug.engine.metrics import Meter, Speedometer
from fastaug.engine.trainer import Trainer
from fastaug.errors import ConfigError
from fastaug.runs.folder import RunFolder
from fastaug.runtime.distributed import Group
from fastaug.views.batch import ViewBatch

Tiny = Callable[..., TrainConfig]


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_s_files(tmp_path: Path, tiny: Tiny) -> None:
    run = RunFolder(tmp_path / "run", tiny(), say=print)
    run.write("train", 2, {"loss": 1.5}, {"views_per_s": 100.0})
    run.write_picture("views", Image.new("RGB", (24, 16)))
    run.write_summary({"finished": True})
    run.close()
    assert records(run.path) == [
        {"kind": "train", "step": 2, "loss": 1.5, "timing": {"views_per_s": 100.0}}
    ]
    config = json.loads((run.path / "config.json").read_text())
    assert TrainConfig.from_dict(config) == tiny()
    events = EventAccumulator(str(run.path))
    events.Reload()
    assert events.Scalars("train/loss")[0].value == 1.5
    assert events.Scalars("train/views_per_s")[0].step == 2
    picture = events.Images("views")[0]
    assert (picture.width, picture.height) == (24, 16)


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path, tiny: Tiny) -> None:
    RunFolder(tmp_path, tiny(), say=print).close()
    RunFolder(tmp_path, tiny(), say=print).close()  # no checkpoint yet: nothing to lose
    (tmp_path / "last.pt").touch()
    with raises(ConfigError, "--resume"):
        RunFolder(tmp_path, tiny(), say=print)


def test_a_folder_that_cannot_be_made(tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "file").touch()
    with raises(ConfigError, "--out"):
        RunFolder(tmp_path / "file/run", tiny(), say=print)


def test_resuming_drops_what_will_be_written_again(tmp_path: Path, tiny: Tiny) -> None:
    run = RunFolder(tmp_path, tiny(), say=print)
    for step in (2, 4, 6):
        run.write("train", step, {}, {})
    run.write("partial", 4, {}, {})
    run.write("final", 4, {}, {})
    run.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    RunFolder(tmp_path, tiny(), say=print, resume_step=4).close()
    assert [(r["kind"], r["step"]) for r in records(tmp_path)] == [("train", 2), ("train", 4)]


def test_the_meter_weighs_parts_and_starts_anew() -> None:
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


@pytest.mark.parametrize("slow", ["loader", "learner"])
def test_the_share_of_waiting_for_data(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, slow: str
) -> None:
    pause = 0.05

    class Sleepy(TorchLoader):
        def __iter__(self) -> Iterator[ViewBatch]:
            for batch in super().__iter__():
                time.sleep(pause if slow == "loader" else 0)
                yield batch

    def update(self: learner.Learner, rate: float) -> torch.Tensor:
        time.sleep(pause if slow == "learner" else 0)
        return torch.tensor(False)

    def sleepy(config: TrainConfig, images: object, **_ranks: int) -> Sleepy:
        return Sleepy(images, config, train=True, images_per_batch=8)

    monkeypatch.setattr(trainer, "build_loader", sleepy)
    monkeypatch.setattr(learner.Learner, "update", update)
    timing = Trainer(config := tiny(tta=0)).fit()["timing"]
    waited = timing["wait_for_data"] * timing["train_seconds"]
    slept = 8 * pause if slow == "loader" else 0
    assert slept <= waited < slept + 0.25  # what else the loader does
    assert f"{100 * timing['wait_for_data']:.0f}% waiting" in capsys.readouterr().out
    trained = [r["timing"] for r in records(Path(config.out)) if r["kind"] == "train"]
    shares = [timing["wait_for_data"] for timing in trained]
    assert len(shares) == 4
    assert all(0 <= share <= 1 for share in shares)
    assert min(shares) < timing["wait_for_data"] < max(shares)
