"""benchmarks/load.py: a quick form of each part, and faults that it must find."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import load
import pytest
from expect import raises

from fastaug.data import retry
from fastaug.data.storage import Files
from fastaug.errors import ConfigError


def run(*flags: str, out: Path) -> tuple[int, dict]:
    code = load.main([*flags, "--out", str(out)])
    return code, json.loads((out / "load.json").read_text())


class TestStorage:
    FLAGS = ("storage", "--minutes", "0", "--batch-size", "16", "--errors", "0.3")

    @pytest.fixture(autouse=True)
    def more_retries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(retry, "RETRY_PAUSES", (0.001,) * 12)

    def test_nothing_is_lost(self, folder: Path, compiled_cache: Path, tmp_path: Path) -> None:
        code, found = run(*self.FLAGS, "--data", str(folder), out=tmp_path / "out")
        assert code == 0, found
        assert found["reads that failed"] > 0
        assert found["images lost"] == 0
        assert found["wrong"] == "nothing"

    def test_another_batch_is_found(
        self,
        folder: Path,
        compiled_cache: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A storage that returns another image where it should fail."""
        read = Files.read
        monkeypatch.setattr(
            load.StorageErrors, "fail", lambda _self, files, index: read(files, (index + 9) % 36)
        )
        code, found = run(*self.FLAGS, "--data", str(folder), out=tmp_path / "out")
        assert code == 1
        assert found["epochs with another batch"] == 1

    def test_the_share_of_errors(self, folder: Path) -> None:
        files = Files.of([next(folder.rglob("*.jpg"))])
        errors = load.StorageErrors(0.25)
        raised = 0
        with errors.active():
            for _ in range(1000):
                try:
                    files.read(0)
                except OSError as error:
                    raised += error.errno == errno.EIO
        assert raised == errors.raised
        assert 200 < raised < 300
        assert files.read(0)


def test_trainings(tmp_path: Path) -> None:
    code, found = run("trainings", "--count", "2", "--steps", "1", out=tmp_path / "out")
    assert code == 0, found
    assert found["with the weights of the one alone"] == 2
    # Both need both kernels, and each is compiled once.
    assert found["kernels compiled, over all trainings"] == found["kernels compiled, alone"]


def test_a_sweep(compiled_cache: Path, tmp_path: Path) -> None:
    flags = ("--count", "2", "--workers", "2", "--kill-every", "1000")
    code, found = run("sweep", *flags, out=tmp_path / "out")
    assert code == 0, found
    assert found["done exactly once"] == found["trainings started"] == 2


def test_mistakes(tmp_path: Path) -> None:
    with raises(ConfigError, "--out", str(tmp_path)):
        load.main(["storage", "--out", str(tmp_path)])
    with raises(ConfigError, "--count 1000000"):
        load.main(["trainings", "--count", "1000000", "--out", str(tmp_path / "out")])
