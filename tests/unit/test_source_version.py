"""The commit that results name, in a repository made here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fastaug.runtime.source_version import source_commit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *named, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    git(tmp_path, "init")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for file in (tmp_path / "file", results / "runs.csv"):
        file.write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "tag", "-a", "v1", "-m", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")[:12]
    assert source_commit(tmp_path) == commit
    (results / "runs.csv").write_text("2")
    assert source_commit(tmp_path) == commit, "results are no code"
    (tmp_path / "file").write_text("2")
    assert source_commit(tmp_path) == f"{commit}-dirty"


def test_no_checkout_and_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_commit(tmp_path) == ""
    git(tmp_path, "init")
    assert source_commit(tmp_path) == "", "git reports an error without a commit"
    monkeypatch.setenv("PATH", "")
    assert source_commit(tmp_path) == "", "no git"
