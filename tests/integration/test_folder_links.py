"""A stranger's run folder: nothing outside it is written, renamed or deleted."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from expect import raises
from run_folders import SHAPES, measures, write_run
from states import save
from tiny_sweep import TINY, write_colors

from fastaug import cli, figures, report, sweep, train
from fastaug.config import TrainConfig
from fastaug.errors import ConfigError, ExportError
from fastaug.experiments.sweep_worker import Slot, _Worker
from fastaug.experiments.training_process import RunFailedError
from fastaug.exporters.preprocess_files import check_preprocess_files, write_preprocess_files
from fastaug.runs.checkpoint_writer import CheckpointWriter
from fastaug.runs.contents import FILES, check_contents
from fastaug.runs.folder import RunFolder
from fastaug.runs.loggers.base import ServiceRun
from fastaug.runs.resume import newest_checkpoint
from fastaug.runtime.folder_files import (
    BadFileError,
    create_file,
    open_regular,
    read_file,
    read_json_object,
    read_lines,
)
from fastaug.runtime.watchdog import Watchdog

Tiny = Callable[..., TrainConfig]
Content = dict[str, bytes | None]

PAGE = Path(__file__).parents[2] / "docs/reference/run-folder.md"
PLACES: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, victim: path.symlink_to(victim / "step-000000001.pt"),
    "link to nowhere": lambda path, victim: path.symlink_to(victim / "made"),
    "link to a folder": lambda path, victim: path.symlink_to(victim),
    "pipe": lambda path, victim: os.mkfifo(path),
    "folder": lambda path, victim: path.mkdir(),
}


def contents(folder: Path) -> Content:
    """All that is in a folder, by name; None: a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder outside, with names that a run would prune."""
    folder = tmp_path / "victim"
    folder.mkdir()
    for step in range(5):
        (folder / f"step-{step:09}.pt").write_text(f"precious {step}")
    (folder / ".step-000000001.pt.abc.tmp").write_text("precious, too")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 4 and 8, as --resume finds it."""
    folder = tmp_path / "run"
    save(folder, 4, 8)
    return folder


def replace(path: Path, place: str, victim: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    PLACES[place](path, victim)


def listed_names() -> set[str]:
    """Names of files in the table of docs/reference/run-folder.md, without patterns."""
    table = PAGE.read_text(encoding="utf-8").partition("## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    return {name for name in names if "*" not in name and not name.endswith("/")}


def test_the_names_are_those_of_the_page() -> None:
    assert listed_names() <= FILES
    assert FILES - listed_names() == {"output.txt"}, "which a sweep writes"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", sorted(FILES | {"checkpoints", "checkpoints/step-000000004.pt"}))
def test_what_is_not_a_file_is_refused(
    name: str, place: str, run: Path, victim: Path, tiny: Tiny
) -> None:
    if (name, place) == ("checkpoints", "folder"):
        (run / "checkpoints" / "other").mkdir()
        check_contents(run)  # folders of the user do no harm
        return
    replace(run / name, place, victim)
    outside, inside = contents(victim), sorted(contents(run))
    with raises(ConfigError, str(run / name)):
        newest_checkpoint(run, pytest.fail)
    with raises(ConfigError, str(run / name)):
        RunFolder(tiny(out=str(run)), say=pytest.fail, resume_step=8).open()
    assert contents(victim) == outside
    assert sorted(contents(run)) == inside


@pytest.mark.parametrize("name", ["mine", ".wandb.json.new", "events.out.tfevents.1", "wandb"])
def test_a_link_of_any_name_is_refused(name: str, run: Path, victim: Path) -> None:
    (run / name).symlink_to(victim)
    with raises(ConfigError, str(run / name)):
        check_contents(run)


def test_the_folder_itself_may_be_a_link(run: Path, tmp_path: Path, tiny: Tiny) -> None:
    (tmp_path / "scratch").symlink_to(run)
    link = tmp_path / "scratch"
    assert newest_checkpoint(link, pytest.fail) is not None
    folder = RunFolder(tiny(out=str(link)), say=pytest.fail, resume_step=8).open()
    folder.write("train", 9, {}, {})
    folder.close()
    assert json.loads((run / "metrics.jsonl").read_text())["step"] == 9


@pytest.mark.parametrize("flags", [["--resume", "RUN"], ["--resume", "auto", "--out", "RUN"]])
def test_resume_ends_with_one_line(
    flags: list[str], run: Path, victim: Path, capsys: pytest.CaptureFixture
) -> None:
    replace(run / "checkpoints", "link to a folder", victim)
    (run / "metrics.jsonl").symlink_to(victim / "made")
    before = contents(victim)
    assert cli.run(train.main, [str(run) if word == "RUN" else word for word in flags]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert str(run / "checkpoints") in line
    assert contents(victim) == before


def test_a_new_run_in_a_folder_with_links(
    tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/metrics.jsonl").symlink_to(victim / "made")
    assert cli.run(train.main, ["--out", str(tmp_path / "new"), "--max-steps", "1"]) == 2
    assert str(tmp_path / "new/metrics.jsonl") in capsys.readouterr().err
    assert not (victim / "made").exists()


def test_links_among_several_runs_do_not_end_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """--resume names a folder above runs; one of them has a last.pt that leads nowhere."""
    save(tmp_path / "runs/a", 4)
    (tmp_path / "runs/b").mkdir()
    (tmp_path / "runs/b/last.pt").symlink_to("nowhere")
    assert cli.run(train.main, ["--resume", str(tmp_path / "runs")]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert str(tmp_path / "runs/a") in line


# --- each writer by itself, without the check at the start ---


def test_checkpoints_are_not_pruned_through_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "run").mkdir()
    before, said = contents(victim), list[str]()
    writer = CheckpointWriter(tmp_path / "run", keep=1, say=said.append)
    (tmp_path / "run/checkpoints").symlink_to(victim)
    with pytest.raises(BadFileError):
        writer._write_last({"step": 9})
    writer.close()
    assert contents(victim) == before


def test_an_open_file_is_a_regular_one(tmp_path: Path, victim: Path) -> None:
    file = victim / "step-000000001.pt"
    for place in PLACES:
        path = tmp_path / place
        PLACES[place](path, victim)
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND):
            with pytest.raises(BadFileError):
                open_regular(path, flags)
    assert not (victim / "made").exists()
    assert read_file(file, 10) == b"precious 1"
    with pytest.raises(BadFileError):
        read_file(file, 9)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_a_new_file_replaces_a_link_and_a_second_name(tmp_path: Path, victim: Path) -> None:
    before = contents(victim)
    link, second = tmp_path / "link", tmp_path / "second"
    link.symlink_to(victim / "step-000000001.pt")
    os.link(victim / "step-000000002.pt", second)
    for path in (link, second):
        with open(create_file(path), "w") as file:
            file.write("new")
        assert (path.read_text(), path.is_symlink()) == ("new", False)
    assert contents(victim) == before


def test_services_and_the_watchdog_do_not_follow_links(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(victim)
    for name in (".wandb.json.new", "wandb.json", "stall.txt"):
        (tmp_path / name).symlink_to(victim / "step-000000001.pt")
    state = ServiceRun(tmp_path / "wandb.json", resumed=True)
    assert state.id == ""
    state.keep("abc")
    assert json.loads((tmp_path / "wandb.json").read_text())["id"] == "abc"
    dog = Watchdog(1.0, name="test", file=tmp_path / "stall.txt", save=lambda: None)
    monkeypatch.setattr("os._exit", lambda code: None)
    monkeypatch.setattr("fastaug.runtime.watchdog._end_later", lambda seconds: None)
    dog._end_stalled()
    assert "no progress" in (tmp_path / "stall.txt").read_text()
    assert contents(victim) == before


@pytest.mark.parametrize("place", PLACES)
def test_an_export_beside_a_stranger_s_checkpoint(place: str, run: Path, victim: Path) -> None:
    """A pipe is not waited for, and a link is replaced and not written through."""
    before = contents(victim)
    for name in ("preprocess.json", "preprocess.py"):
        PLACES[place](run / name, victim)
    with suppress(ExportError):
        check_preprocess_files(run, {"size": 8})
        write_preprocess_files(run, {"size": 8})
    assert contents(victim) == before


# --- what reports and sweeps write ---


def test_a_report_replaces_a_link(tmp_path: Path, victim: Path) -> None:
    before = contents(victim)
    write_run(tmp_path / "runs/a", SHAPES, measures(0.5))
    (tmp_path / "runs/report.html").symlink_to(victim / "step-000000001.pt")
    assert cli.run(report.main, [str(tmp_path / "runs")]) == 0
    assert contents(victim) == before
    assert (tmp_path / "runs/report.html").read_text().startswith("<!")


def test_figures_are_not_written_through_a_link(
    tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture
) -> None:
    before = contents(victim)
    write_run(tmp_path / "runs/a", SHAPES, measures(0.5))
    (tmp_path / "runs/figures").symlink_to(victim)
    assert cli.run(figures.main, [str(tmp_path / "runs"), "--only", "results"]) == 2
    assert "figures" in capsys.readouterr().err
    assert contents(victim) == before
    named = ["--only", "results", "--out", str(tmp_path / "runs/figures")]
    assert cli.run(figures.main, [str(tmp_path / "runs"), *named]) == 0, "the user's own link"


@pytest.mark.parametrize("name", ["sweep.db", "runs", "runs/some"])
def test_a_sweep_refuses_links_in_its_folder(
    name: str, tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "sweep" / name).parent.mkdir(parents=True)
    (tmp_path / "sweep" / name).symlink_to(victim / "made" if name == "sweep.db" else victim)
    before = contents(victim)
    data = str(write_colors(tmp_path / "colors.npz"))
    flags = ["shapes", "--out", str(tmp_path / "sweep"), "--data", data, "--device", "cpu", *TINY]
    assert cli.run(sweep.main, flags) == 2
    assert str(tmp_path / "sweep" / name) in capsys.readouterr().err
    assert contents(victim) == before


@pytest.mark.parametrize("found", [None, {}, 5, {"top1": {}}, {"top1": 10**400}], ids=repr)
def test_a_sweep_does_not_count_a_summary_without_a_result(found: object, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"finished": True, "measures": found}))
    options: Any = SimpleNamespace(select_on="test")
    plan: Any = SimpleNamespace(sweep=options, run_folder=lambda name: tmp_path)
    unused: Any = None
    worker = _Worker(plan, {"run": SHAPES}, unused, Slot(0, {}), unused, unused, [])
    trial: Any = SimpleNamespace(set_user_attr=lambda name, value: None)
    with raises(RunFailedError, str(tmp_path), "summary.json"):
        worker._train("run", trial)


# --- limits of what is read ---


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"1",
        b"{",
        b"\xff{}",
        b"[" * 100_000,
        b'{"a": 1' + b"0" * 5000 + b"}",
        b" " * 300_000,
    ],
    ids=lambda content: content[:8].decode(errors="replace"),
)
def test_a_json_file_that_is_not_an_object(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises((ValueError, BadFileError)):
        read_json_object(tmp_path / "a.json")


def test_lines_have_limits(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"one\n" + b"x" * 25 + b"\ntwo\n\nlast")
    limits = {"most_bytes": 99, "line_bytes": 10, "most_lines": 5}
    assert [*read_lines(file, **limits)] == [b"one\n", b"x" * 10, b"two\n", b"\n", b"last"]
    for limit in ({"most_bytes": 38}, {"most_lines": 4}):
        with pytest.raises(BadFileError):
            [*read_lines(file, **limits | limit)]
