"""Which checkpoint a run goes on from, and in which folder: what --resume means, damaged files."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
import torch
from expect import missing, raises
from states import save, state_of, step_in

from fastaug import train
from fastaug.errors import CheckpointError, ConfigError
from fastaug.runs.checkpoint import write_checkpoint
from fastaug.runs.resume import find_checkpoint, newest_checkpoint


@pytest.fixture
def said() -> list[str]:
    return []


NAMES = ("last.pt", "checkpoints/step-000000030.pt", "checkpoints/step-000000020.pt")


class TestNewest:
    """Files apart from each other here, as on file systems without links."""

    @pytest.mark.parametrize("damaged", [*itertools.product([False, True], repeat=3)], ids=str)
    @pytest.mark.parametrize("absent", [(), NAMES[:1], NAMES[1:]], ids=["", "last", "steps"])
    def test_damaged_ones(
        self, tmp_path: Path, said: list[str], damaged: tuple[bool, ...], absent: tuple[str, ...]
    ) -> None:
        (tmp_path / "checkpoints").mkdir()
        there = {name: bad for name, bad in zip(NAMES, damaged, strict=True) if name not in absent}
        for name, bad in there.items():
            write_checkpoint(tmp_path / name, state_of(30))
            if bad:
                content = (tmp_path / name).read_bytes()
                (tmp_path / name).write_bytes(content[:5000] + b"?" + content[5001:])
        names = list(there)
        whole = next((i for i, name in enumerate(names) if not there[name]), None)
        if whole is None:
            for _ in range(2):  # and not a new beginning when it is tried again
                with raises(CheckpointError, f"{tmp_path}"):
                    newest_checkpoint(tmp_path, said.append)
            aside = []
        else:
            assert newest_checkpoint(tmp_path, said.append) == tmp_path / names[whole]
            aside = names[:whole]
        named = zip(said, aside, strict=True)
        assert all(missing(line, f"warning: {tmp_path / name}") == [] for line, name in named)
        left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
        assert left == {name + ".damaged" * (name in aside) for name in names}

    def test_a_kill_between_the_file_and_its_second_name(
        self, tmp_path: Path, said: list[str]
    ) -> None:
        (tmp_path / "checkpoints").mkdir()
        for name, step in (("last.pt", 20), (NAMES[1], 30), (NAMES[2], 20)):
            write_checkpoint(tmp_path / name, state_of(step))
        assert newest_checkpoint(tmp_path, said.append) == tmp_path / NAMES[1]
        assert said == []

    def test_none_at_all(self, tmp_path: Path, said: list[str]) -> None:
        assert newest_checkpoint(tmp_path, said.append) is None
        assert newest_checkpoint(tmp_path / "elsewhere", said.append) is None
        assert said == []

    def test_steps_are_numbers(self, tmp_path: Path, said: list[str]) -> None:
        save(tmp_path, 999_999_999, 5, say=said.append)
        (tmp_path / "last.pt").unlink()
        newest = newest_checkpoint(tmp_path, said.append)
        assert newest is not None
        assert step_in(newest) == 999_999_999

    def test_one_of_another_version_is_not_put_aside(self, tmp_path: Path, said: list[str]) -> None:
        torch.save({"format": 1, **state_of(5)}, tmp_path / "last.pt")
        with raises(CheckpointError, "1"):
            newest_checkpoint(tmp_path, said.append)
        assert (tmp_path / "last.pt").exists()


class TestWhatResumeMeans:
    @pytest.fixture
    def _runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """runs/c is the newest."""
        monkeypatch.chdir(tmp_path)
        for age, name in ((20, "b"), (10, "c"), (30, "a")):
            path = tmp_path / "runs" / name / "last.pt"
            path.parent.mkdir(parents=True)
            write_checkpoint(path, state_of(age))
            os.utime(path, (time.time() - age,) * 2)

    def test_nothing_to_find(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert find_checkpoint("auto", "", said.append) is None
        assert find_checkpoint("auto", "elsewhere", said.append) is None
        # A file that was named is there, or an error when it is loaded.
        assert find_checkpoint("nowhere", "", said.append) == Path("nowhere")
        with raises(CheckpointError, str(tmp_path)):
            find_checkpoint(str(tmp_path), "", said.append)

    @pytest.mark.parametrize("last", [None, b"torn"])
    @pytest.mark.parametrize("whole", [True, False])
    def test_only_the_best_is_left(
        self, tmp_path: Path, said: list[str], last: bytes | None, whole: bool
    ) -> None:
        """It is named as the way out if it is one."""
        best = tmp_path / "best.pt"
        write_checkpoint(best, state_of(1234))
        if not whole:
            best.write_bytes(best.read_bytes()[:-1])
        if last is not None:
            (tmp_path / "last.pt").write_bytes(last)
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(str(tmp_path), "", said.append)
        assert (missing(str(caught.value), f"1,234 --resume {best}") == []) == whole
        assert missing(str(caught.value), "--out") == []

    @pytest.mark.usefixtures("_runs")
    @pytest.mark.parametrize(
        ("resume", "out", "found"),
        [
            ("auto", "", "runs/c/last.pt"),
            ("auto", "runs/b", "runs/b/last.pt"),
            ("auto", "runs/new", None),
            ("runs/a", "", "runs/a/last.pt"),
            ("runs/a", "runs/new", "runs/a/last.pt"),
            ("runs/a/best.pt", "", "runs/a/best.pt"),
            ("runs/a/last.pt", "runs/b", "runs/a/last.pt"),
        ],
    )
    def test_which_run(self, resume: str, out: str, found: str | None, said: list[str]) -> None:
        assert find_checkpoint(resume, out, said.append) == (found and Path(found))
        assert said == []

    @pytest.mark.usefixtures("_runs")
    def test_the_folder_above_names_the_runs_in_it(self, said: list[str]) -> None:
        with raises(CheckpointError, "--resume runs runs/c runs/b runs/a") as caught:
            find_checkpoint("runs", "", said.append)
        assert str(caught.value).index("runs/c") < str(caught.value).index("runs/b")

    @pytest.mark.usefixtures("_runs")
    def test_the_newest_run_stays_the_newest_when_its_last_is_damaged(
        self, said: list[str]
    ) -> None:
        whole = Path("runs/c/checkpoints/step-000000007.pt")
        whole.parent.mkdir()
        write_checkpoint(whole, state_of(7))
        last = Path("runs/c/last.pt")
        stamp = last.stat().st_mtime
        last.write_bytes(b"torn")
        os.utime(last, (stamp, stamp))
        for warnings in (1, 1):  # and the next time, when it has been moved aside
            assert find_checkpoint("auto", "", said.append) == whole
            assert len(said) == warnings


class TestWhereARunGoesOn:
    """train.configure: the checkpoint, and the folder that is written to."""

    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """runs/x with the steps 10, 20 and 30, of which 20 is the best."""
        monkeypatch.chdir(tmp_path)
        folder = Path("runs/x")
        folder.mkdir(parents=True)
        save(folder, 10, 20, 30, keep=3, best=20)
        return folder

    @pytest.mark.parametrize("resume", ["auto", "runs/x", "./runs/x/", "runs/x/last.pt"])
    def test_the_last_one_goes_on_in_its_folder(self, run: Path, resume: str) -> None:
        config, checkpoint = train.configure(["--resume", resume])
        assert (checkpoint, config.run.out) == (run / "last.pt", "runs/x")

    @pytest.mark.parametrize("resume", ["auto", "runs/x"])
    def test_the_one_before_a_damaged_one_does_too(
        self, run: Path, resume: str, capsys: pytest.CaptureFixture
    ) -> None:
        content = (run / "last.pt").read_bytes()
        for name in NAMES[:2]:
            (run / name).write_bytes(content[:9000])
        config, checkpoint = train.configure(["--resume", resume])
        assert (checkpoint, config.run.out) == (run / NAMES[2], "runs/x")
        assert capsys.readouterr().err.count("warning: ") == 2
        assert not (run / "last.pt").exists()
        again, checkpoint = train.configure(["--resume", resume])
        assert (checkpoint, again.run.out) == (run / NAMES[2], "runs/x")

    @pytest.mark.parametrize("name", ["best.pt", "checkpoints/step-000000010.pt"])
    def test_an_older_one_by_name_goes_elsewhere(self, run: Path, name: str) -> None:
        config, checkpoint = train.configure(["--resume", f"runs/x/{name}"])
        assert checkpoint == run / name
        assert config.run.out.startswith("runs/")
        assert not Path(config.run.out).exists()
        config, _ = train.configure(["--resume", f"runs/x/{name}", "--out", "runs/y"])
        assert config.run.out == "runs/y"

    def test_only_out_decides_with_auto(
        self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        config, checkpoint = train.configure(["--resume", "auto", "--out", str(tmp_path / "new")])
        assert (checkpoint, config.run.out) == (None, str(tmp_path / "new"))
        assert "no checkpoint yet, starting from the beginning" in capsys.readouterr().err
        config, checkpoint = train.configure(["--resume", "auto", "--out", "runs/x"])
        assert (checkpoint, config.run.out) == (run / "last.pt", "runs/x")

    def test_what_only_the_earlier_invocation_was_told(self, run: Path) -> None:
        state = state_of(40)
        told = {"max_steps": 5, "profile": True, "debug": True, "views": 2, "out": "elsewhere"}
        state["config"] |= told
        write_checkpoint(run / "last.pt", state)
        config, _ = train.configure(["--resume", "runs/x"])
        assert (config.optim.max_steps, config.run.profile, config.run.debug) == (0, False, False)
        assert (config.view.views, config.run.out) == (2, "runs/x")

    def test_a_setting_of_another_version(self, run: Path) -> None:
        state = state_of(40)
        state["config"]["wings"] = 2
        write_checkpoint(run / "last.pt", state)
        with raises(ConfigError, "wings"):
            train.configure(["--resume", "runs/x"])

    def test_a_kernel_of_one_s_own_is_named_again(self, run: Path) -> None:
        """It is code, and a checkpoint may come from anyone."""
        state = state_of(40)
        state["config"]["kernel"] = "their.module:kernel"
        write_checkpoint(run / "last.pt", state)
        with raises(ConfigError, "their.module:kernel"):
            train.configure(["--resume", "runs/x"])
        config, _ = train.configure(["--resume", "runs/x", "--kernel", "reference"])
        assert config.loss.kernel == "reference"

    def test_a_folder_without_one(self, tmp_path: Path) -> None:
        with raises(CheckpointError, str(tmp_path)):
            train.configure(["--resume", str(tmp_path)])
