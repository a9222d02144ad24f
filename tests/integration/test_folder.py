"""The run folder's records on a disk that fails: no line is lost or torn, no error ends the run."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from expect import missing, raises
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastaug.config import TrainConfig
from fastaug.errors import ConfigError
from fastaug.runs import folder as run_folder
from fastaug.runs.folder import RunFolder
from fastaug.runs.loggers.tensorboard import TensorBoardLogger

Tiny = Callable[..., TrainConfig]


def records(path: Path) -> list[dict]:
    """By the letter of the format, which knows neither NaN nor Infinity."""

    def no_number(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    lines = (path / "metrics.jsonl").read_text().split("\n")
    assert lines.pop() == ""
    return [json.loads(line, parse_constant=no_number) for line in lines]


def limit_files_to(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_run_s_files(tmp_path: Path, tiny: Tiny) -> None:
    run = RunFolder(tiny(), say=print).open()
    run.write("train", 2, {"loss": 1.5}, {"views_per_s": 100.0})
    run.write_picture("views", Image.new("RGB", (24, 16)))
    run.write_summary({"finished": True})
    run.close()
    assert records(run.path) == [
        {"kind": "train", "step": 2, "loss": 1.5, "timing": {"views_per_s": 100.0}}
    ]
    config = json.loads((run.path / "config.json").read_text())
    assert TrainConfig.from_saved(config) == tiny()
    events = EventAccumulator(str(run.path))
    events.Reload()
    assert events.Scalars("train/loss")[0].value == 1.5
    assert events.Scalars("train/views_per_s")[0].step == 2
    picture = events.Images("views")[0]
    assert (picture.width, picture.height) == (24, 16)


def test_a_folder_that_cannot_be_made(tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "file").touch()
    with raises(ConfigError, "--out"):
        RunFolder(tiny(out=str(tmp_path / "file/run")), say=print).open()


@pytest.mark.parametrize("limit", [1000, 1001, 1037, 6100])
def test_lines_wait_for_a_disk_that_is_full_for_a_while(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """A real limit: the write that meets it puts a part of its line into the file."""
    monkeypatch.setattr(TensorBoardLogger, "_TRY_AGAIN", 0.0)

    def work(parent: Any) -> None:
        said: list[str] = []
        run = RunFolder(tiny(out=str(tmp_path)), say=said.append).open()
        for outage in (0, 1):
            metrics = tmp_path / "metrics.jsonl"
            full = metrics.stat().st_size + limit
            limit_files_to(full)
            for step in range(300 * outage, 300 * outage + 200):
                run.write("train", step, {"loss": 1 / (step + 1)}, {})
            parent.send((metrics.stat().st_size, full))
            limit_files_to(resource.RLIM_INFINITY)
            for step in range(300 * outage + 200, 300 * outage + 300):
                run.write("train", step, {"loss": 1 / (step + 1)}, {})
        run.close()
        parent.send(said)

    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    for _ in range(2):  # that the limit was met, and in most cases in the middle of a line
        size, full = ours.recv()
        assert size == full
    said = ours.recv()
    process.join()
    assert process.exitcode == 0
    assert records(tmp_path) == [
        {"kind": "train", "step": step, "loss": 1 / (step + 1), "timing": {}} for step in range(600)
    ]
    assert [missing(line, "warning: metrics.jsonl") for line in said] == [[], []]


def test_lines_that_never_could_be_written_are_told(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    run = RunFolder(tiny(out=str(tmp_path)), say=said.append).open()

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for step in (1, 2, 3):
            run.write("train", step, {}, {})
        run.close()
    assert len(said) == 2
    assert missing(said[1], "warning: 3 metrics.jsonl") == []


def test_what_is_no_number_is_null(tmp_path: Path, tiny: Tiny) -> None:
    run = RunFolder(tiny(out=str(tmp_path)), say=print).open()
    values = {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 0.5, "e": [1, 2]}
    run.write("train", 1, values, {})
    run.close()
    (record,) = records(tmp_path)
    assert [record[name] for name in "abcde"] == [None, None, None, 0.5, [1, 2]]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), ValueError("closed file")])
def test_tensorboard_may_fail(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What it could not write is lost, what comes later is not."""
    monkeypatch.setattr(TensorBoardLogger, "_TRY_AGAIN", 0.0)
    run = RunFolder(tiny(out=str(tmp_path)), say=print).open()
    run.write("train", 1, {"loss": 1.0}, {})

    def fails(*_args: object, **_kwargs: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fails)
        patch.setattr("torch.utils.tensorboard.SummaryWriter.add_image", fails)
        run.write("train", 2, {"loss": 2.0}, {})
        run.write_picture("views", Image.new("RGB", (4, 4)))
        patch.setattr("torch.utils.tensorboard.SummaryWriter.__init__", fails)
        run.write("train", 3, {"loss": 3.0}, {})
    run.write("train", 4, {"loss": 4.0}, {})
    run.close()
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4]
    steps = []
    for file in tmp_path.glob("events.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        if "train/loss" in events.Tags()["scalars"]:
            steps += [event.step for event in events.Scalars("train/loss")]
    assert sorted(steps) == [1, 4]


def test_tensorboard_is_not_tried_with_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that answers slowly that it is full would hold up the training each time."""
    opened = []
    events = TensorBoardLogger()
    events.start(tmp_path, {}, None)

    def fails(*_args: object, **_kwargs: object) -> None:
        opened.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fails)
    for step in range(5):
        events.log(step, {"loss": 1.0})
    events.close()
    assert len(opened) == 1


@pytest.mark.parametrize(
    "tail", [b'{"kind": "train", "step": 5, "lo', b"\0" * 100, b"\xff\xfe{\n", b"\n\n"], ids=repr
)
def test_resuming_leaves_whole_lines(tmp_path: Path, tiny: Tiny, tail: bytes) -> None:
    """Whatever a power cut has put there."""
    run = RunFolder(tiny(out=str(tmp_path)), say=print).open()
    for step in (2, 4, 6):
        run.write("train", step, {}, {})
    for kind in ("partial", "final"):
        run.write(kind, 4, {}, {})
    run.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    run = RunFolder(tiny(out=str(tmp_path)), say=print, resume_step=4).open()
    run.write("train", 5, {}, {})
    run.close()
    assert [(r["kind"], r["step"]) for r in records(tmp_path)] == [
        ("train", step) for step in (2, 4, 5)
    ]


NOT_RECORDS = (
    *("1", "null", '"text"', "[1]", "{}", '{"kind": "train"}', '{"step": 2}', "NaN", "{torn"),
    *('{"kind": 1, "step": 2}', '{"kind": "train", "step": "2"}', '{"kind": "train", "step": 2.0}'),
    *('{"kind": "train", "step": true}', '{"kind": "train", "step": -1}', "[" * 100_000),
    *('{"kind": "train", "step": 1' + "0" * 400 + "}", '{"kind": "train", "step": NaN}'),
    *('{"kind": "eval", "step": 2}', '{"kind": "eval", "step": 2, "epoch": "1"}', "x" * 3_000_000),
    *('{"kind": "eval", "step": 2, "epoch": 1e999}', '{"kind": {}, "step": 2}'),
)


def test_resuming_drops_lines_that_are_not_records(tmp_path: Path, tiny: Tiny) -> None:
    good = '{"kind": "train", "step": 2, "epoch": {}, "timing": 5}'
    lines = [good, *NOT_RECORDS, "", good]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    said: list[str] = []
    start = {"resume_step": 4, "evaluated_epochs": 1}
    RunFolder(tiny(out=str(tmp_path)), say=said.append, **start).open().close()
    assert (tmp_path / "metrics.jsonl").read_text() == f"{good}\n{good}\n"
    [line] = said
    assert missing(line, f"warning: {tmp_path} metrics.jsonl {len(NOT_RECORDS)} 2") == []


def test_a_torn_last_line_is_dropped_without_a_warning(tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 2}\n{"kind": "tr')
    RunFolder(tiny(out=str(tmp_path)), say=pytest.fail, resume_step=4).open().close()
    assert [record["step"] for record in records(tmp_path)] == [2]


def test_a_metrics_file_of_a_terabyte_is_not_read(tmp_path: Path, tiny: Tiny) -> None:
    file = tmp_path / "metrics.jsonl"
    file.touch()
    os.truncate(file, 2**40)
    with raises(ConfigError, str(file)):
        RunFolder(tiny(out=str(tmp_path)), say=pytest.fail, resume_step=4).open()
    assert file.stat().st_size == 2**40


def test_an_evaluation_that_is_made_again_is_written_once(tmp_path: Path, tiny: Tiny) -> None:
    """The run was killed after its record, and before a checkpoint that knows of it."""
    for epochs in (None, 1):
        start = {} if epochs is None else {"resume_step": 8, "evaluated_epochs": epochs}
        run = RunFolder(tiny(out=str(tmp_path)), say=print, **start).open()
        if epochs is None:
            run.write("eval", 4, {"epoch": 1}, {})
            run.write("train", 8, {"epoch": 2.0}, {})
        run.write("eval", 8, {"epoch": 2}, {})
        run.close()
    kinds = [(record["kind"], record["step"]) for record in records(tmp_path)]
    assert kinds == [("eval", 4), ("train", 8), ("eval", 8)]


@pytest.mark.parametrize("name", ["last.pt", "checkpoints/step-000000004.pt"])
def test_a_run_is_not_written_over(tmp_path: Path, tiny: Tiny, name: str) -> None:
    """Also one whose last.pt was damaged and moved aside."""
    config = tiny(out=str(tmp_path))
    for _ in range(2):  # no checkpoint yet: nothing to lose
        RunFolder(config, say=print).open().close()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with raises(ConfigError, "--resume"):
        RunFolder(tiny(out=str(tmp_path)), say=print).open()


def test_a_checkpoint_with_an_odd_number(tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-\u00b2.pt").touch()  # a digit that int() does not take
    RunFolder(tiny(out=str(tmp_path)), say=print).open().close()


@pytest.mark.parametrize("failures", [0, 3, 99])
def test_the_summary_is_tried_for_a_while(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    said: list[str] = []
    waits: list[float] = []
    left = [failures]
    write_json = run_folder.write_json

    def write(path: Path, value: dict[str, Any]) -> None:
        if left[0] and path.name == "summary.json":
            left[0] -= 1
            raise OSError(28, "No space left on device")
        write_json(path, value)

    monkeypatch.setattr(run_folder, "write_json", write)
    monkeypatch.setattr("time.sleep", waits.append)
    run = RunFolder(tiny(out=str(tmp_path)), say=said.append).open()
    run.write_summary({"finished": True})
    run.close()
    if failures < 10:
        assert json.loads((tmp_path / "summary.json").read_text()) == {"finished": True}
        assert (len(waits), said) == (failures, [])
    else:
        assert len(waits) == 9
        assert [missing(line, "warning: summary.json") for line in said] == [[]]


def test_a_list_of_bad_images_that_cannot_be_written(tmp_path: Path, tiny: Tiny) -> None:
    run = RunFolder(tiny(out=str(tmp_path)), say=print).open()
    (tmp_path / "bad-images.txt").mkdir()
    run.write_bad_images(["a.jpg: torn"])
    (tmp_path / "bad-images.txt").rmdir()
    run.write_bad_images(["a.jpg: torn", "\udcff.jpg: torn"])
    assert len((tmp_path / "bad-images.txt").read_text().splitlines()) == 2
    run.write_bad_images([])
    assert not (tmp_path / "bad-images.txt").exists()
    run.close()
