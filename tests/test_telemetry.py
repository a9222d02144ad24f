from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError
from fastaug.telemetry import Meter, RunFolder, Speedometer

Tiny = Callable[..., TrainConfig]


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_s_files(tmp_path: Path, tiny: Tiny) -> None:
    run = RunFolder(tmp_path / "run", tiny())
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
    RunFolder(tmp_path, tiny()).close()
    RunFolder(tmp_path, tiny()).close()  # no checkpoint yet: nothing to lose
    (tmp_path / "last.pt").touch()
    with pytest.raises(ConfigError, match="holds a run already; continue it with --resume"):
        RunFolder(tmp_path, tiny())


def test_a_folder_that_cannot_be_made(tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out \S+file/run: cannot be written"):
        RunFolder(tmp_path / "file/run", tiny())


def test_resuming_drops_what_will_be_written_again(tmp_path: Path, tiny: Tiny) -> None:
    run = RunFolder(tmp_path, tiny())
    for step in (2, 4, 6):
        run.write("train", step, {}, {})
    run.write("partial", 4, {}, {})
    run.write("final", 4, {}, {})
    run.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    RunFolder(tmp_path, tiny(), resume_step=4).close()
    assert [(r["kind"], r["step"]) for r in records(tmp_path)] == [("train", 2), ("train", 4)]


def test_the_meter_weighs_parts_and_starts_anew() -> None:
    meter = Meter(torch.device("cpu"))
    meter.add(torch.tensor(1.0), torch.tensor([0.0, 2.0]), torch.tensor([4.0]), weight=0.5)
    meter.add(torch.tensor(3.0), torch.tensor([3.0]), torch.tensor([0.0]), weight=0.5)
    state = meter.state_dict()
    assert meter.means() == meter.read() == {"loss": 2.0, "nll": 2.0, "kl": 2.0}
    meter.add(torch.tensor(7.0), torch.tensor([1.0]), torch.tensor([1.0]), weight=1.0)
    assert meter.read()["loss"] == 7.0
    meter.load_state_dict(state)
    assert meter.read()["loss"] == 2.0


def test_speed_leaves_out_what_is_between_start_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    speed = Speedometer(batch_size=64, views=4)
    speed.start(0)
    now[0] = 2.0
    assert speed.read(10) == {"images_per_s": 80.0, "views_per_s": 320.0}
    now[0] = 100.0  # an evaluation
    speed.start(10)
    now[0] = 102.0
    speed.read(30)
    whole = {"train_seconds": 4.0, "images_per_s": 120.0, "views_per_s": 480.0}
    assert speed.whole_run() == whole
