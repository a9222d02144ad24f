"""The view program with several real threads a block, under the sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_threaded_block import run

from fastaug.toolchain.build import source_folder

PROGRAM = Path(__file__).parents[1] / "helpers/threaded_views.cpp"


def run_views(sources: Path, sanitizer: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run(sources, sanitizer, folder, PROGRAM, "-ffp-contract=off")


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_threads_make_the_views_of_one_thread_and_keep_to_the_rules(
    sanitizer: str, tmp_path: Path
) -> None:
    done = run_views(source_folder(), sanitizer, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "145 cases, 0 differ" in done.stdout


@pytest.mark.parametrize(
    ("file", "before"),
    [
        ("views.h", "      sum_rows(pixels, row_bytes, top, end);\n"),
        ("views.h", "      sum_columns(top, end, out);\n"),
        ("operations.h", "    here = made;\n"),
    ],
)
def test_a_missing_sync_is_seen(file: str, before: str, tmp_path: Path) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(source_folder(), sources)
    head, right, tail = (sources / file).read_text().partition(before)
    assert right
    sync, _, rest = tail.partition("\n")
    assert sync.strip() == "block.sync();"
    (sources / file).write_text(head + right + rest)
    done = run_views(sources, "thread", tmp_path)
    assert done.returncode != 0
    assert "data race" in done.stderr
