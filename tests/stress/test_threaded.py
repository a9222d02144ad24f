"""The block and view programs with several real threads per block, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fastaug.runtime.device import cpp_compiler
from fastaug.toolchain.build import source_folder

HELPERS = Path(__file__).parents[1] / "helpers"
# Program -> cases that it compares with those of a single thread.
CASES = {"threaded_block": 140, "threaded_views": 145}


def run(
    program: str, sources: Path, sanitizer: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Compiled for the baseline CPU, so that ThreadSanitizer sees every access."""
    compiler = cpp_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-w", "-ffp-contract=off", f"-I{sources}"]
    made = subprocess.run(
        [
            *(compiler, *flags, f"-fsanitize={sanitizer}"),
            *(str(HELPERS / f"{program}.cpp"), "-o", str(folder / program)),
        ],
        capture_output=True,
        text=True,
    )
    if "cannot find" in made.stderr:
        pytest.skip(f"the {sanitizer} sanitizer is not installed")
    assert made.returncode == 0, made.stderr
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [folder / program], capture_output=True, text=True, env=environment, timeout=300
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    return done


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
@pytest.mark.parametrize("program", CASES)
def test_threads_agree_with_one_thread_and_keep_to_the_rules(
    program: str, sanitizer: str, tmp_path: Path
) -> None:
    done = run(program, source_folder(), sanitizer, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CASES[program]} cases, 0 differ" in done.stdout


@pytest.mark.parametrize(
    ("program", "file", "before"),
    [
        ("threaded_block", "objective.h", "center_rows();\n"),
        ("threaded_views", "views.h", "      sum_rows(pixels, row_bytes, top, end);\n"),
        ("threaded_views", "views.h", "      sum_columns(top, end, out);\n"),
        ("threaded_views", "operations.h", "    here = made;\n"),
    ],
)
def test_a_missing_sync_is_seen(program: str, file: str, before: str, tmp_path: Path) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(source_folder(), sources)
    head, found, tail = (sources / file).read_text().partition(before)
    assert found
    sync, _, rest = tail.partition("\n")
    assert sync.strip() == "block.sync();"
    (sources / file).write_text(head + found + rest)
    done = run(program, sources, "thread", tmp_path)
    assert done.returncode != 0
    assert "data race" in done.stderr
