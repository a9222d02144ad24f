"""Coverage-guided fuzzing for a minute, with a fixed seed; docs/design/fuzzing.md has more."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import native_plan
import pytest
from target import SOURCES

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed"
)
needs_clang = pytest.mark.skipif(
    native_plan.compiler() is None, reason="there is no clang++ with libFuzzer"
)


def fuzz(
    target: str, corpus: Path, *, seconds: int, tests: Path = SOURCES
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tests / "run.py"), target, f"--seconds={seconds}"]
    return subprocess.run(
        [*command, "--corpus", str(corpus)], capture_output=True, text=True, timeout=400
    )


@needs_atheris
@pytest.mark.parametrize("target", ["fast-together", "slow-together"])
def test_no_reader_crashes(target: str, tmp_path: Path) -> None:
    done = fuzz(target, tmp_path, seconds=12)
    log = tmp_path / f"{target}.log"
    text = log.read_text()[-3000:] if log.exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert " 0 crashes" in done.stdout
    assert " 0 inputs" not in done.stdout


@needs_clang
def test_the_view_kernel_stays_in_its_memory(tmp_path: Path) -> None:
    done = fuzz("view-kernel", tmp_path, seconds=8)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 crashes" in done.stdout


def changed_tree(folder: Path, file: str, right: str, wrong: str) -> Path:
    """The sources with a mistake in them; returns the folder of the fuzzer there."""
    root = SOURCES.parents[1]
    for name in ("fastaug", "cuda", "pipelines", "tests/fuzz", "tests/helpers"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / name, folder / name, symlinks=True, ignore=ignored)
    text = (folder / file).read_text()
    assert text.count(right) == 1
    (folder / file).write_text(text.replace(right, wrong))
    return folder / "tests/fuzz"


@needs_atheris
def test_a_missing_check_of_a_reader_is_found(tmp_path: Path) -> None:
    """The header of a record may then be too short for struct."""
    tests = changed_tree(
        tmp_path / "tree",
        "fastaug/data/readers/recordio.py",
        'raise shard.invalid(record, "the record is too short for its header")',
        "return head",
    )
    done = fuzz("recordio", tmp_path / "corpus", seconds=30, tests=tests)
    assert done.returncode == 1, done.stdout + done.stderr
    (crash,) = (tmp_path / "corpus/crashes").iterdir()
    assert str(crash) in done.stdout
    assert "unpack requires a buffer" in (tmp_path / "corpus/recordio.log").read_text()


@needs_clang
def test_a_pixel_beyond_the_image_is_found(tmp_path: Path) -> None:
    tests = changed_tree(
        tmp_path / "tree",
        "cuda/views.h",
        "period - i - (border == MIRROR)",
        "period - i",
    )
    done = fuzz("view-kernel", tmp_path / "corpus", seconds=20, tests=tests)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "heap-buffer-overflow" in (tmp_path / "corpus/view-kernel.log").read_text()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    done = fuzz("no-such-target", tmp_path, seconds=1)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
