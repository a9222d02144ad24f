"""The block program with several real threads a block, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fastaug.runtime.device import cpp_compiler
from fastaug.toolchain.build import source_folder

PROGRAM = Path(__file__).parents[1] / "helpers/threaded_block.cpp"


def run(
    sources: Path, sanitizer: str, folder: Path, source: Path = PROGRAM, *options: str
) -> subprocess.CompletedProcess[str]:
    """Compile a program for the least vectors, of which ThreadSanitizer sees every access."""
    compiler = cpp_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    program = folder / "block"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-w", f"-fsanitize={sanitizer}", f"-I{sources}"]
    made = subprocess.run(
        [compiler, *flags, *options, str(source), "-o", str(program)],
        capture_output=True,
        text=True,
    )
    if "cannot find" in made.stderr:
        pytest.skip(f"the {sanitizer} sanitizer is not installed")
    assert made.returncode == 0, made.stderr
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([program], capture_output=True, text=True, env=environment, timeout=300)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    return done


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_threads_agree_with_one_thread_and_keep_to_the_rules(
    sanitizer: str, tmp_path: Path
) -> None:
    done = run(source_folder(), sanitizer, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "80 cases, 0 differ" in done.stdout


def test_a_missing_sync_is_seen(tmp_path: Path) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(source_folder(), sources)
    text = (sources / "objective.h").read_text()
    assert text.count("center_rows();\n    block.sync();") == 1
    (sources / "objective.h").write_text(
        text.replace("center_rows();\n    block.sync();", "center_rows();")
    )
    done = run(sources, "thread", tmp_path)
    assert done.returncode != 0
    assert "data race" in done.stderr
