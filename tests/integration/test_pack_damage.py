"""fastaug.pack interrupted and continued; packed folders that are damaged."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from color_folders import write_folder
from expect import missing, raises
from image_sets import open_data

from fastaug import cli, pack
from fastaug.config import TrainConfig
from fastaug.data.packing.shard_writer import ShardWriter
from fastaug.data.readers.packed_index import JOURNAL
from fastaug.engine.trainer import Trainer
from fastaug.errors import DataError

pytestmark = pytest.mark.usefixtures("own_cache")
FLAGS = ["--shard-size", "1", "--max-side", "180"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """270 images that make about 5 shards of 1 MB."""
    root = tmp_path_factory.mktemp("data") / "colors"
    return write_folder(root, {"train": 80, "val": 10}, size=200)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, packed without an interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert cli.run(pack.main, [str(source), str(out), *FLAGS]) == 0
    assert len(list((out / "train").iterdir())) >= 3
    return out


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    """A copy of the packed folder, to damage."""
    return Path(shutil.copytree(whole, tmp_path / "packed"))


def contents(root: Path) -> dict[str, bytes]:
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}


def fails(capsys: pytest.CaptureFixture, *args: str | Path) -> str:
    """The one line of an error with exit code 2."""
    capsys.readouterr()
    assert cli.run(pack.main, list(map(str, args))) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    return line


def stop_after_two_shards(source: Path, out: Path, number: signal.Signals) -> tuple[int, str]:
    """Start the command, send it a signal once two shards are there; exit code and stderr."""
    command = [sys.executable, "-m", "fastaug.pack", str(source), str(out), *FLAGS]
    with subprocess.Popen([*command, "--workers", "1"], stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        while not (out / "train/00001.tar").exists():
            assert child.poll() is None
            time.sleep(0.001)
        child.send_signal(number)
        return child.wait(), child.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_pack_is_continued(
    number: signal.Signals, source: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, shown = stop_after_two_shards(source, out, number)
    if number == signal.SIGINT:
        assert code == 130
        assert "Traceback" not in shown
        assert not list(out.rglob(".*"))  # no temporary files
    else:
        assert code == -signal.SIGKILL
    assert (out / JOURNAL).exists()
    assert not (out / "train.index").exists()
    with raises(DataError, "fastaug.pack", str(out)):
        open_data(out, "train")
    finished = {f: f.stat().st_mtime_ns for f in sorted((out / "train").glob("0*.tar"))[:2]}
    assert cli.run(pack.main, [str(source), str(out), *FLAGS]) == 0
    assert contents(out) == contents(whole)
    kept = [f.stat().st_mtime_ns == then for f, then in finished.items()]
    assert kept[0]  # the second one may not have been recorded yet


def test_finished_shards_are_checked_before_they_are_kept(
    source: Path, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    stop_after_two_shards(source, out, signal.SIGINT)
    shard = out / "train/00000.tar"
    content = bytearray(shard.read_bytes())
    content[5000] ^= 1
    shard.write_bytes(content)
    assert cli.run(pack.main, [str(source), str(out), *FLAGS]) == 0
    assert any(str(shard) in message for message in caplog.messages)
    assert contents(out) == contents(whole)


def test_killed_before_the_journal_was_there(source: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / f".{JOURNAL}.0123.tmp").write_text('{"sour')
    assert cli.run(pack.main, [str(source), str(out), *FLAGS]) == 0
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.999])
def test_a_journal_that_was_cut(keep: float, source: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stop_after_two_shards(source, out, signal.SIGKILL)
    journal = out / JOURNAL
    text = journal.read_text()
    first = text.index("\n") + 1
    journal.write_text(text[: first + int(keep * (len(text) - first))])
    assert cli.run(pack.main, [str(source), str(out), *FLAGS]) == 0
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EIO])
def test_a_full_disk(
    kind: int,
    source: Path,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, write = [0], ShardWriter._write

    def limited(self: ShardWriter, content: bytes) -> None:
        written[0] += len(content)
        if written[0] > 2.5e6:
            raise OSError(kind, os.strerror(kind))
        write(self, content)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "_write", limited)
        line = fails(capsys, source, out, *FLAGS)
    assert os.strerror(kind) in line
    assert str(out) in line
    # The unfinished shard has been removed, and perhaps the one before it, which needed its end.
    assert {f.name for f in (out / "train").iterdir()} <= {"00000.tar", "00001.tar"}
    assert cli.run(pack.main, [str(source), str(out), *FLAGS]) == 0
    assert contents(out) == contents(whole)


def test_a_disk_that_returns_other_bytes(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = ShardWriter.finish

    def damage(self: ShardWriter) -> object:
        os.pwrite(self._file.fileno(), b"?", 1000)
        return finish(self)

    monkeypatch.setattr(ShardWriter, "finish", damage)
    assert "00000.tar" in fails(capsys, source, tmp_path / "out", *FLAGS)
    assert list((tmp_path / "out/train").iterdir()) == []


def test_a_source_that_fails_is_not_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastaug.data.storage import Files

    source, read = write_folder(tmp_path / "colors", {"train": 4}), Files.read

    def failing(self: Files, index: int) -> bytes:
        if index == 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "read", failing)
        line = fails(capsys, source, tmp_path / "out", "--max-bad", "1")
    assert str(source / "train/green/01.jpg") in line
    assert cli.run(pack.main, [str(source), str(tmp_path / "out")]) == 0
    assert len(open_data(tmp_path / "out", "train")) == 12


# The same command again, and others


def test_a_finished_folder_is_left_as_it_is(source: Path, whole: Path) -> None:
    before = {f: f.stat().st_mtime_ns for f in whole.rglob("*")}
    assert cli.run(pack.main, [str(source), str(whole), *FLAGS, "--workers", "3"]) == 0
    assert {f: f.stat().st_mtime_ns for f in whole.rglob("*")} == before


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_or_another_source(
    finished: bool, source: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = whole
    if not finished:
        out = tmp_path / "out"
        stop_after_two_shards(source, out, signal.SIGKILL)
    line = fails(capsys, source, out, "--shard-size", "1", "--max-side", "99")
    assert missing(line, "--max-side 180 99", str(out)) == []
    other = write_folder(tmp_path / "other", {"train": 2})
    assert missing(fails(capsys, other, out, *FLAGS), str(out), "source") == []


def test_two_at_once(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    import fcntl

    out = tmp_path / "out"
    out.mkdir()
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert str(out) in fails(capsys, source, out)
    os.close(descriptor)
    assert list(out.iterdir()) == []


def test_where_nothing_is_packed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    before = contents(source)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("dear")
    for out in (source, source / "packed", source / "train/red", foreign, foreign / "thesis.tex"):
        assert str(out) in fails(capsys, source, out)
    assert missing(fails(capsys, source), "OUT") == []
    assert missing(fails(capsys, source, tmp_path / "x", "--verify"), "--verify") == []
    assert missing(fails(capsys, tmp_path / "nowhere", tmp_path / "x"), "nowhere") == []
    assert missing(fails(capsys, source, tmp_path / "x", "--quality", "101"), "--quality 101") == []
    assert not (tmp_path / "x").exists()
    assert contents(source) == before
    assert [f.name for f in foreign.iterdir()] == ["thesis.tex"]


# Damaged folders


def truncate(out: Path) -> str:
    os.truncate(out / "train/00001.tar", 5000)
    return "00001.tar 5,000"


def lose(out: Path) -> str:
    (out / "train/00001.tar").unlink()
    return "00001.tar"


def exchange(out: Path) -> str:
    shutil.copy(out / "val/00000.tar", out / "train/00001.tar")
    return "00001.tar"


def index_of_another_split(out: Path) -> str:
    shutil.copy(out / "val.index", out / "train.index")
    (out / "val.index").unlink()
    shutil.rmtree(out / "val")
    return "00000.tar train.index"


def cut_index(out: Path) -> str:
    os.truncate(out / "train.index", 300)
    return "train.index"


def empty_index(out: Path) -> str:
    (out / "train.index").write_bytes(b"")
    return "train.index"


def lose_index(out: Path) -> str:
    (out / "train.index").unlink()
    return "train.index"


def unfinished(out: Path) -> str:
    (out / JOURNAL).write_text("{}\n")
    return "fastaug.pack"


DAMAGES = [
    truncate,
    lose,
    exchange,
    index_of_another_split,
    cut_index,
    empty_index,
    lose_index,
    unfinished,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line(
    damage: Callable[[Path], str],
    out: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    tiny: Callable[..., TrainConfig],
) -> None:
    names = damage(out)
    with raises(DataError, names, str(out)):
        Trainer(tiny(data=str(out))).fit()
    assert str(out) in fails(capsys, out, "--verify")
    assert str(out) in fails(capsys, out, tmp_path / "again")


def test_verify(out: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.run(pack.main, [str(out), "--verify"]) == 0
    assert "240 train images" in capsys.readouterr().out
    shard = out / "val/00000.tar"
    content = bytearray(shard.read_bytes())
    content[-3000] ^= 1
    shard.write_bytes(content)
    assert str(shard) in fails(capsys, out, "--verify")


def test_shards_of_another_set_with_the_same_sizes(
    out: Path, tiny: Callable[..., TrainConfig]
) -> None:
    for shard in (out / "train").iterdir():
        content = shard.read_bytes()
        shard.write_bytes(content[:512] + content[:511:-1])
    with raises(DataError, "--max-bad"):
        Trainer(tiny(data=str(out))).fit()
